"""`python -m tests.fuzz.neighbours`: each attack in turn beside honest callers, and its effect on them.

For each attack of attacks.py: a quiet phase of honest.py's callers, then the attack for the same time, then up to a
minute in which memory must shrink again. Limits: no honest call fails or gets another answer; the 99th percentiles of
honest callers are at most twice the quiet ones plus 100 ms; no process is restarted or above its container's limit; a
minute later each process is within 20 % of its memory before. A model with a pace (10 ms a step) replaces the GPU.

Writes one JSON object; exits with 1 if a limit is exceeded.
"""

import argparse
import asyncio
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
from pydantic import ByteSize, TypeAdapter

from headrace_transformer.processes.body_processes import LARGE_BYTES, SMALL_BYTES
from tests.chaos.memory import peaks, resident_bytes
from tests.fuzz.attacks import ATTACKS
from tests.fuzz.honest import Figures, Honest
from tests.support.free_ports import start_stack
from tests.support.runner_stack import Stack
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
_RESULTS = ROOT / "bench" / "results" / "neighbours.json"
_PACE_MS = 10
_P99_FACTOR, _P99_MORE_MS = 2.0, 100.0
_COMES_BACK_S, _COMES_BACK_TO = 60.0, 1.2
_ENDS_WITHIN_S = 60.0
_WARM_UP_S = 60.0


@dataclass
class Outcome:
    """The effect of one attack on its neighbours; `failures` names each exceeded limit."""

    attack: str
    report: dict[str, Any]
    quiet_p99_ms: dict[str, float]
    attacked_p99_ms: dict[str, float]
    honest_answers: int
    honest_errors: list[str]
    before_mb: dict[str, int]
    peak_mb: dict[str, int]
    later_mb: dict[str, int]
    back_after_s: float
    restarted: list[str]
    failures: list[str] = field(default_factory=list)


def limits_mb() -> dict[str, int]:
    """Each container's memory limit, from `.env.example`, by the kind of process."""
    found = re.findall(
        r"^MEMORY_(ENVOY|TRANSFORMER|PREDICTOR|LOGGER)=(\S+)$", (ROOT / ".env.example").read_text(), re.MULTILINE
    )
    size = TypeAdapter(ByteSize)
    return {name.lower(): size.validate_python(f"{value}ib") // 2**20 for name, value in found}


@asynccontextmanager
async def attacked_stack(folder: Path) -> AsyncIterator[Stack]:
    """The bundled models with a pace, and one with a hostile template."""
    shutil.copytree(ROOT / "models" / "storyteller", folder / "powers")
    (folder / "powers" / "chat_template.jinja").write_text("{{ 9 ** (9 ** 9) }}")
    models = f"storyteller=models/storyteller,identity=models/identity,powers={folder / 'powers'}"
    stack = await start_stack(
        folder / "stack",
        {"models": models},
        commands={"predictor": (sys.executable, "-m", "bench.paced_predictor")},
        environment={"predictor": {"PACE_MS": str(_PACE_MS), "PREDICTOR_MAX_RUNNING": "32"}},
        say=lambda line: None,
    )
    try:
        await _use_once(stack.gateway)
        yield stack
    finally:
        await stack.stop()


async def _use_once(gateway: str) -> None:
    """Lets the transformer start its processes for bodies and templates, so that their memory is not the attack's."""
    completions = "/v1/completions", "/v1/completions", "/v1/chat/completions"
    prompts: list[dict[str, Any]] = [{"prompt": "a" * size} for size in (2 * SMALL_BYTES, LARGE_BYTES + 1)]
    chat = {"messages": [{"role": "user", "content": "a"}] * 128}
    async with httpx2.AsyncClient(base_url=f"http://{gateway}", timeout=60.0) as client:
        for path, fields in zip(completions, [*prompts, chat], strict=True):
            await client.post(path, json={"model": "storyteller", "max_tokens": 1, **fields})


async def beside(
    stack: Stack, honest: Honest, name: str, seconds: float, comes_back_s: float = _COMES_BACK_S
) -> Outcome:
    """Runs one attack beside honest callers; checks memory against its limit if there is time for it to shrink."""
    pids = _pids(stack)
    before = resident_mb(stack)
    quiet = await _phase(honest, seconds)
    begun, attacked = time.monotonic(), honest.phase()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fuzz.attacks", name, stack.gateway, str(seconds)),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Its niceness applies to its session.
    )
    try:
        async with peaks(stack) as peak, asyncio.timeout(seconds + _ENDS_WITHIN_S):
            output, _ = await process.communicate()
            if process.returncode:
                raise RuntimeError(f"the attack {name} itself failed with {process.returncode}")
            await asyncio.sleep(max(0.0, begun + seconds - time.monotonic()))
            await honest.settled(attacked)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    honest.phase()
    ended = time.monotonic()
    with suppress(AssertionError):  # The failure is recorded below.
        await until(lambda: _is_back(before, resident_mb(stack)), comes_back_s)
    later = resident_mb(stack)
    outcome = Outcome(
        attack=name,
        report=json.loads(output),
        quiet_p99_ms=quiet.p99_ms(),
        attacked_p99_ms=attacked.p99_ms(),
        honest_answers=attacked.answers,
        honest_errors=quiet.errors + attacked.errors,
        before_mb=before,
        peak_mb={name: size >> 20 for name, size in peak.items()},
        later_mb=later,
        back_after_s=round(time.monotonic() - ended, 1),
        restarted=[name for name, pid in _pids(stack).items() if pid != pids.get(name)],
    )
    outcome.failures = _failures(outcome)
    if comes_back_s and not _is_back(before, later):
        outcome.failures.append(f"memory did not come back: {before} before, {later} later")
    return outcome


async def _phase(honest: Honest, seconds: float) -> Figures:
    figures = honest.phase()
    await asyncio.sleep(seconds)
    await honest.settled(figures)
    return figures


def _failures(outcome: Outcome) -> list[str]:
    failures = [f"honest: {error}" for error in [*outcome.honest_errors, *outcome.report["honest_errors"]]]
    failures += [f"{name} was restarted" for name in outcome.restarted]
    if not outcome.report["begun"]:
        failures.append("the attack began nothing: the machine is too busy to judge it")
    limits = limits_mb()
    for name, size in outcome.peak_mb.items():
        if size > limits[name.partition("-")[0]]:
            failures.append(f"{name} held {size} MB, its container's limit is {limits[name.partition('-')[0]]} MB")
    return failures


def slow(outcome: Outcome) -> list[str]:
    """The percentiles above their limits, which are for an otherwise idle machine."""
    return [
        f"p99 of {kind}: {outcome.attacked_p99_ms[kind]} ms, {quiet} ms when quiet"
        for kind, quiet in outcome.quiet_p99_ms.items()
        if outcome.attacked_p99_ms.get(kind, 0.0) > _P99_FACTOR * quiet + _P99_MORE_MS
    ]


def resident_mb(stack: Stack) -> dict[str, int]:
    """The resident memory of each process and its children, in MiB; shared pages count once for each."""
    return {name: size >> 20 for name, size in resident_bytes(stack).items()}


def _is_back(before: dict[str, int], later: dict[str, int]) -> bool:
    return all(later.get(name, 0) <= _COMES_BACK_TO * size for name, size in before.items())


def _pids(stack: Stack) -> dict[str, int]:
    found = {}
    for name in stack.names:
        with suppress(ProcessLookupError):
            found[name] = stack.pid(name)
    return found


async def _run(names: Sequence[str], seconds: float) -> list[Outcome]:
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="neighbours-") as folder:
        async with attacked_stack(Path(folder)) as stack, Honest(stack.gateway) as honest:
            await _phase(
                honest, _WARM_UP_S
            )  # Not counted: this loads everything that is loaded at first use, and fills caches.
            for name in names:
                outcome = await beside(stack, honest, name, seconds)
                outcome.failures += slow(outcome)
                outcomes.append(outcome)
                _print(outcome)
    return outcomes


def _print(outcome: Outcome) -> None:
    print(f"{outcome.attack}: {'FAILED' if outcome.failures else 'held'}")
    print(f"  requests {outcome.report['begun']}, answers {outcome.report['answers']}")
    print(f"  honest answers {outcome.honest_answers}, p99 ms {outcome.attacked_p99_ms}, quiet {outcome.quiet_p99_ms}")
    print(f"  MB before {outcome.before_mb}, peak {outcome.peak_mb}, after {outcome.back_after_s} s {outcome.later_mb}")
    for failure in outcome.failures[:10]:
        print(f"  {failure}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack")
    parser.add_argument("--only", default="", help="comma list of attacks: " + ", ".join(ATTACKS))
    parser.add_argument("--out", type=Path, help=f"where the figures go, such as {_RESULTS}")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(ATTACKS)
    outcomes = asyncio.run(_run(names, arguments.seconds))
    failed = [outcome.attack for outcome in outcomes if outcome.failures]
    if arguments.out is not None:
        figures = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds_each": arguments.seconds,
            "limits_mb": limits_mb(),
            "attacks": [vars(outcome) for outcome in outcomes],
        }
        arguments.out.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"{len(outcomes) - len(failed)} held, {len(failed)} failed: {', '.join(failed) or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
