"""The knees of this machine: the most users at which each kind of call meets an objective; by model, and with kills.

A search of the load test (loadtest/knee) for each row, one after the other, against a stack as `make up` starts it with
the row's model: closed load without think time, so that users equal requests at once, answers of 16 to 64 tokens. The
callers are on the same machine. A level holds if 95 % of its requests are good. `tensors` are calls of 262 KB that are
answered with their input (docs/field-cases.md, "big tensors"). `kills`: two predictors, one of which is killed about
once a minute while the load rises.

`python -m bench.knees` writes bench/results/knees.json; 20 minutes. It needs Locust (`make load` installs it).
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.contenders import ROOT
from bench.runs import machine, parser, running_stack, write

_FILES = ",".join(f"loadtest/{name}.py" for name in ("locustfile", "knee_locustfile"))
_MODELS_FOLDER = ROOT / ".run" / "bench" / "models"
_QUICK = "TTFT <= 300 ms, gap <= 100 ms"
_PATIENT = "TTFT <= 1 s, gap <= 300 ms"
_TENSOR = ("--tensor-shape", "16,2048")
_TIMEOUT_S = 900.0


class Row(NamedTuple):
    """A stack and its load; the knee of each of `users` is searched, one after the other, from `start` users on."""

    model: str
    users: Sequence[str]
    objective: str
    start: int = 8
    predictors: int = 1
    options: Sequence[str] = ()


ROWS = {
    "text": Row("storyteller", ("StreamUser", "TritonStreamUser", "ChatUser"), _QUICK),
    "text-patient": Row("storyteller", ("ChatUser",), _PATIENT, start=32),
    "llama-10M": Row("llama-10M", ("StreamUser",), _QUICK),
    "OPT-125M": Row("OPT-125M", ("StreamUser",), _PATIENT, start=2),
    "tensors": Row("identity", ("TensorUser", "TensorRestUser"), "whole <= 200 ms", options=_TENSOR),
    "kills": Row("storyteller", ("StreamUser",), "TTFT <= 2 s, gap <= 3 s", 16, 2, options=("--kills-per-minute", "1")),
}


def main() -> None:
    options = parser(__doc__, "knees")
    options.add_argument("--only", nargs="+", choices=ROWS, default=tuple(ROWS), metavar="ROW", help=", ".join(ROWS))
    options.add_argument("--seconds", type=int, default=10, help="that each level is measured")
    arguments = options.parse_args()
    subprocess.run([sys.executable, "-m", "bench.architectures", str(_MODELS_FOLDER)], cwd=ROOT, check=True)
    asyncio.run(_measure(arguments))


async def _measure(arguments: argparse.Namespace) -> None:
    """Writes the results after each row."""
    rows: list[dict[str, Any]] = []
    for name in arguments.only:
        row = ROWS[name]
        async with running_stack(
            models=f"{row.model}={_folder(row.model)}", predictors=row.predictors, development=True
        ) as stack:
            with tempfile.TemporaryDirectory() as folder:
                knees = await _search(stack.gateway, row, arguments.seconds, Path(folder))
        for knee in knees:
            rows.append({"row": name, "model": row.model, "objective": row.objective, **knee})
            print(_line(rows[-1]), flush=True)
        write(arguments.out, {"machine": machine(), "seconds_a_level": arguments.seconds, "rows": rows})


async def _search(gateway: str, row: Row, seconds: int, folder: Path) -> list[dict[str, Any]]:
    """The knees of a row's users; raises RuntimeError if Locust wrote none."""
    locust = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "locust", "-f", _FILES, "--headless", "--only-summary", "--host", f"http://{gateway}"),
        *("-u", str(row.start), "--knee-folder", str(folder), "--knee-seconds", str(seconds)),
        *("--model", row.model, "--objective", row.objective, "--think-time", "0", *row.options, *row.users),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            output, _ = await locust.communicate()
    finally:
        if locust.returncode is None:
            locust.kill()
    report = folder / "knee.json"
    if not report.exists():
        raise RuntimeError(f"no knee was found: {output.decode()[-2000:]}")
    return [
        {**{name: knee[name] for name in ("user", "knee", "bounded", "at_knee")}, "levels": len(knee["levels"])}
        for knee in json.loads(report.read_text())["knees"]
    ]


def _folder(model: str) -> Path:
    bundled = ROOT / "models" / model
    return bundled if bundled.is_dir() else _MODELS_FOLDER / model


def _line(row: dict[str, Any]) -> str:
    level = row["at_knee"] or {}
    figures = (f"{name} {level[name]:.0f}" for name in ("goodput", "tokens", "ttft_p50", "gap_p99") if level.get(name))
    return f"{row['row']:<14} {row['user']:<18} {row['knee']:>4} users  {row['objective']:<32} {', '.join(figures)}"


if __name__ == "__main__":
    main()
