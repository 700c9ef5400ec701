"""Judges a machine with a GPU in nine minutes: `python tests/gpu/run.py [WHEELS]`, with nothing but Python and torch.

WHEELS, a folder of `make wheels`, is installed into a temporary folder; without it the parts run with what this Python
has. Parts run one after the other, each in a process of its own with a limit of time, so that one that crashes or hangs
hides nothing of the others. The end is a table; a JSON file has all figures. Exit code 1: a promise broke, or a part
failed. DEVICE=cpu runs the same parts with small shapes.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = (ROOT, ROOT / "services" / "transformer", ROOT / "services" / "predictor")
_INSTALL_S = 60
_LOG_LINES = 30
# It would compile the kernels for CPUs first, which takes a minute.
_NO_NUMBA = 'raise ImportError("the check of GPUs has no use for the kernels for CPUs")\n'
_NOT_INHERITED = ("PREDICTOR_", "TRANSFORMER_", "MODELS", "PYTEST_", "PYTHONPATH")


class Part(NamedTuple):
    """A module with its arguments, which device and file of the report follow, and its limit of time.

    `binds`: the check fails if it fails.
    """

    module: str
    arguments: tuple[str, ...]
    limit_s: float
    binds: bool = True


# Those that say most come first, with time to compile kernels and to read libraries for the first time.
PARTS = {
    "machine": Part("tests.gpu.machine", (), 60),
    "speed 0.6B": Part("tests.gpu.speed", ("headrace", "0.6B", "auto"), 120),
    "kernels": Part("tests.gpu.kernels", (), 150),
    "exactness": Part("tests.gpu.exactness", (), 150),
    "stack": Part("tests.gpu.stack", (), 120),
    "speed 4B": Part("tests.gpu.speed", ("headrace", "4B", "auto"), 90),
    "transformers 4B": Part("tests.gpu.speed", ("transformers", "4B", "auto"), 60, binds=False),
    "speed 4B int8": Part("tests.gpu.speed", ("headrace", "4B", "int8"), 90),
    "transformers 0.6B": Part("tests.gpu.speed", ("transformers", "0.6B", "auto"), 45, binds=False),
}


class Goal(NamedTuple):
    """A bar for a GPU's speed: a figure's ratio to another one, or the figure itself, at least."""

    name: str
    part: str
    figure: str
    least: float
    of_part: str = ""
    of_figure: str = ""


GOALS = tuple(
    goal
    for shape in ("0.6B", "4B")
    for goal in (
        Goal(f"{shape}: share of the bandwidth at 1, %", f"speed {shape}", "share of the bandwidth at 1, %", least=40),
        Goal(
            f"{shape}: 64 streams / 1",
            f"speed {shape}",
            "tokens/s of 64",
            least=8,
            of_part=f"speed {shape}",
            of_figure="tokens/s of 1",
        ),
        Goal(
            f"{shape}: 64 streams / transformers' batching",
            f"speed {shape}",
            "tokens/s of 64",
            least=1.5,
            of_part=f"transformers {shape}",
            of_figure="tokens/s of 64",
        ),
    )
)


def main() -> None:
    options = _parse_options()
    began = time.monotonic()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-") as folder:
        environment = _environment(Path(folder), options.wheels)
        if options.device == "cpu":  # Others may use its cores; threads of small products would wait for them.
            environment["OMP_NUM_THREADS"] = "1"
        environment["TRITON_INTERPRET"] = "1" if options.device == "cpu" else "0"
        for name in options.parts:
            left = options.limit - (time.monotonic() - began)
            results[name] = run_part(PARTS[name], options.device, environment, Path(folder), left)
            print(part_table(name, results[name]), flush=True)
            _write(options, results, began)
    for line in goal_lines(results) if options.device == "cuda" else ():
        print(line)
    failed = broken(results)
    print(f"\n{options.out}: {time.monotonic() - began:.0f} s; {'; '.join(failed) or 'every promise holds'}")
    raise SystemExit(1 if failed else 0)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, nargs="?", help="folder of `make wheels`")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cpu" if os.environ.get("DEVICE") == "cpu" else "cuda"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=tuple(PARTS), metavar="PART")
    parser.add_argument("--limit", type=float, default=540, help="seconds of all parts together (default 540)")
    parser.add_argument("--out", type=Path, default=ROOT / ".run" / "gpu.json", help="default .run/gpu.json")
    return parser.parse_args()


def _environment(folder: Path, wheels: Path | None) -> dict[str, str]:
    """The variables of the parts' processes, with the code of this checkout before what the wheels bring."""
    packages = folder / "packages"
    packages.mkdir()
    if wheels is not None:
        _install(wheels, packages)
    (packages / "numba.py").write_text(_NO_NUMBA)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    path = os.pathsep.join(map(str, (*_SOURCES, packages)))
    return kept | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _install(wheels: Path, target: Path) -> None:
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise SystemExit(f"{wheels} has no wheels; `make wheels` makes them on a machine with a network")
    quiet = ("--quiet", "--disable-pip-version-check", "--no-cache-dir", "--root-user-action", "ignore")
    install = (sys.executable, "-m", "pip", "install", *quiet, "--no-index", "--no-deps", "--no-compile")
    subprocess.run((*install, "--target", target, *files), check=True, timeout=_INSTALL_S)


def run_part(part: Part, device: str, environment: Mapping[str, str], folder: Path, left_s: float) -> dict[str, Any]:
    """The report of a part, with `seconds` and, if it did not end well, `failed`: why, and the end of its output."""
    report, log = folder / "report.json", folder / "log"
    report.unlink(missing_ok=True)
    if left_s <= 0:
        return {"failed": "the time of all parts was over before it began"}
    # A CPU is slower, and others may use it.
    limit, began = min(part.limit_s * (2 if device == "cpu" else 1), left_s), time.monotonic()
    command = (sys.executable, "-m", part.module, *part.arguments, device, str(report))
    with log.open("wb") as output:
        streams = {"stdout": output, "stderr": output}
        process = subprocess.Popen(command, cwd=ROOT, env=dict(environment), start_new_session=True, **streams)
        try:
            code = process.wait(limit)
            failed = f"it ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            failed = f"it was not done within {limit:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # What it has started ends with it.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    result: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1)}
    with suppress(OSError, ValueError):
        result |= json.loads(report.read_text())
    if failed:
        result["failed"] = failed
        result["output"] = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return result


def broken(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What makes the check fail: parts that did, and promises that do not hold."""
    binding = {name for name in results if name not in PARTS or PARTS[name].binds}
    found = [f"{name}: {results[name]['failed']}" for name in results if "failed" in results[name] and name in binding]
    for name, result in results.items():
        for promise, counts in result.get("promises", {}).items():
            if counts["binds"] and counts["holds"] < counts["of"]:
                found.append(f"{name}: {promise} ({counts['holds']} of {counts['of']})")
    return found


def part_table(name: str, result: Mapping[str, Any]) -> str:
    """A part's figures, promises and notes as lines."""
    lines = [f"\n{name} ({result.get('seconds', 0):.0f} s)"]
    for figure, value in result.get("figures", {}).items():
        lines.append(f"  {figure:<66}{value:>14,.1f}" if isinstance(value, float) else f"  {figure:<52}{value!s:>28}")
    for promise, counts in result.get("promises", {}).items():
        holds = counts["holds"] >= counts["of"]
        verdict = "holds" if holds and counts["binds"] else "BROKEN" if counts["binds"] else "measured only"
        lines.append(f"  {promise:<66}{counts['holds']:>6} of {counts['of']:<6} {verdict}")
    lines += [f"  note: {note}" for note in result.get("notes", ())]
    if "failed" in result:
        lines += [f"  FAILED: {result['failed']}", *(f"    {line}" for line in result.get("output", ()))]
    return "\n".join(lines)


def goal_lines(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Each bar with its figure; a bar that is missed breaks no promise."""
    lines = ["\nbars for a GPU"]
    for goal in GOALS:
        value = results.get(goal.part, {}).get("figures", {}).get(goal.figure)
        if goal.of_part:
            other = results.get(goal.of_part, {}).get("figures", {}).get(goal.of_figure)
            value = value / other if value and other else None
        verdict = "not measured" if value is None else "met" if value >= goal.least else "MISSED"
        shown = "" if value is None else f"{value:,.1f}"
        lines.append(f"  {goal.name:<66}{shown:>10} at least {goal.least:g}: {verdict}")
    return lines


def _write(options: argparse.Namespace, results: Mapping[str, Any], began: float) -> None:
    report = {"device": options.device, "seconds": round(time.monotonic() - began), "parts": results}
    options.out.write_text(json.dumps(report | {"broken": broken(results)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
