"""One seed: a stack under mixed load and faults, and its outcome.

Two predictors and one of each other service, configured as in production except for a silence limit shorter than the
longest stop. Nothing is asserted here: `Outcome.failures` lists what went wrong.
"""

import asyncio
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.faults import FaultInjector
from tests.chaos.load import Call, Client
from tests.chaos.memory import SMALL_CACHES, MemoryWatch
from tests.chaos.oracle import EXCUSED, Oracle, Verdict
from tests.chaos.records import Findings, compare, is_seen, stored
from tests.chaos.requests import DATE_MODEL, STORIES, TENSOR_MODEL, TEXT_MODEL, VECTOR_MODEL, WORDS, Request, request_of
from tests.random_encoders import save_random_encoder, save_words_tokenizer
from tests.support.free_ports import start_stack
from tests.support.runner_stack import Stack
from tests.system.calls import serves
from tests.waiting import until

_PREDICTORS = 2
_AT_ONCE = 12
_SILENCE_LIMIT_S = 3
_BACK_OFF_S = 0.25  # The interval between a caller's checks of a gateway that is away.
_RECOVERY_S = 90.0
_RECORDING_S = 60.0
_DISK_MB = 16
_MAX_GROWTH_MB = 64
_MOST_SHOWN = 20


@dataclass
class Outcome:
    """The figures of one seed; `failures` is empty if nothing went wrong."""

    seed: int
    seconds: float
    faults: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    excused: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    longest_pause_s: float = 0.0
    longest_first_wait_s: float = 0.0
    growth_mb: dict[str, float] = field(default_factory=dict)
    records: Findings = field(default_factory=Findings)
    failures: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """The results, as JSON."""
        records = self.records
        return {
            "seed": self.seed,
            "seconds": self.seconds,
            "faults": dict(sorted(self.faults.items())),
            "ways": dict(sorted(self.ways.items())),
            "requests": dict(sorted(self.requests.items())),
            "excused": dict(sorted(self.excused.items())),
            "wrong_answers": self.requests["wrong"],
            "requests_resumed": records.resumed,
            "resumes": records.resumes,
            "longest_pause_s": self.longest_pause_s,
            "longest_first_wait_s": self.longest_first_wait_s,
            "records_lost": len(records.lost),
            "records_doubled": len(records.doubled),
            "records_wrong": len(records.wrong),
            "records_lost_on_full_disk": records.lost_on_full_disk,
            "latest_lost_chunk_ms": round(records.latest_lost_chunk_ms, 1),
            "growth_mb": self.growth_mb,
            "failures": self.failures[:_MOST_SHOWN],
        }


async def run_seed(seed: int, seconds: float, folder: Path) -> Outcome:
    """Runs one seed in its own folder."""
    outcome = Outcome(seed, seconds)
    before = set(psutil.Process().children(recursive=True))
    with small_disk(folder / "disk") as disk:
        async with chaotic_stack(folder, disk) as stack, Client(stack.gateway) as client:
            oracle = Oracle()
            for stories in STORIES.values():
                await oracle.record_answers(client, stories)
            await oracle.record_vectors(client)
            injector = FaultInjector(stack, seed, folder / "faults", disk)
            calls = await _run_under_faults(stack, client, injector, outcome)
            await _check_recovery(stack, client, oracle, outcome)
            _judge(calls, oracle, injector, outcome)
            await _check_records(stack, calls, oracle, injector, outcome)
    left = set(psutil.Process().children(recursive=True)) - before
    outcome.failures += [f"was left behind: {process}" for process in left]
    return outcome


@asynccontextmanager
async def chaotic_stack(folder: Path, disk: Path | None) -> AsyncIterator[Stack]:
    """A stack whose predictors look for faults in `folder`/faults."""
    (folder / "faults").mkdir()
    save_random_encoder("bert", folder / "embedder")
    save_words_tokenizer(folder / "embedder", *WORDS)
    models = [f"{name}=models/{name}" for name in (TEXT_MODEL, DATE_MODEL, TENSOR_MODEL)]
    transformer = {"TRANSFORMER_SILENCE_LIMIT": str(_SILENCE_LIMIT_S)}
    if disk is not None:
        transformer["TRANSFORMER_PAYLOAD_SPOOL"] = str(disk / "spool")
    stack = await start_stack(
        folder / "stack",
        {"models": ",".join([*models, f"{VECTOR_MODEL}={folder / 'embedder'}"]), "predictors": _PREDICTORS},
        commands={"predictor": (sys.executable, "-m", "tests.system.faulty_predictor")},
        environment={"predictor": {"FAULTS": str(folder / "faults"), **SMALL_CACHES}, "transformer": transformer},
        say=lambda line: print(f"  {line}"),
    )
    try:
        yield stack
    finally:
        await stack.stop()


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A disk of some megabytes; None if mounting is not allowed."""
    folder.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m", "tmpfs", str(folder))
    if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode:
        print("  no small disk may be mounted here: none gets full")
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(("umount", str(folder)), check=True)


async def _run_under_faults(stack: Stack, client: Client, injector: FaultInjector, outcome: Outcome) -> list[Call]:
    """Runs the load for the given time while faults are injected; returns its calls."""
    numbers, calls = count(), []
    end = time.monotonic() + outcome.seconds

    async def caller() -> None:
        while time.monotonic() < end:
            call = await client.send(request_of(outcome.seed, next(numbers)))
            calls.append(call)
            # Requests to a gateway that is away would show nothing.
            while call.status in EXCUSED and not await serves(stack.gateway) and time.monotonic() < end:  # noqa: ASYNC110
                await asyncio.sleep(_BACK_OFF_S)

    async with MemoryWatch(stack) as memory:
        injection = asyncio.create_task(injector.run(), name="fault injector")
        callers = asyncio.gather(*(caller() for _ in range(_AT_ONCE)))
        # If the fault injector fails, the callers are cancelled.
        await asyncio.wait((injection, asyncio.ensure_future(callers)), return_when=asyncio.FIRST_COMPLETED)
        if injection.done():
            callers.cancel()
            injection.result()
        await callers
        injection.cancel()
        await asyncio.gather(injection, return_exceptions=True)
    outcome.growth_mb = memory.growth_mb()
    outcome.failures += [
        f"{name} grew by {growth} MB" for name, growth in outcome.growth_mb.items() if growth > _MAX_GROWTH_MB
    ]
    return calls


async def _check_recovery(stack: Stack, client: Client, oracle: Oracle, outcome: Outcome) -> None:
    """Waits until the stack is ready again, and checks one story of each way."""
    await stack.wait_ready(_RECOVERY_S)
    for way, stories in STORIES.items():
        verdict = oracle.judge(await client.send(Request(f"afterwards {way}", way, stories[0])), ())
        if verdict.outcome != "right":
            outcome.failures.append(f"afterwards {way}: {verdict.reason}")


def _judge(calls: list[Call], oracle: Oracle, injector: FaultInjector, outcome: Outcome) -> None:
    excuses = injector.excuses()
    for injected in injector.injected:
        outcome.faults[str(injected.fault)] += 1
    for call in calls:
        verdict: Verdict = oracle.judge(call, excuses)
        outcome.requests[verdict.outcome] += 1
        outcome.ways[call.request.way] += 1
        if verdict.outcome == "excused":
            outcome.excused[call.status] += 1
        if verdict.outcome == "wrong":
            outcome.failures.append(f"{_when(call, injector)} {call.request}: {verdict.reason}")
        if call.request.manner == "reads" and verdict.outcome == "right" and call.pieces:
            outcome.longest_pause_s = max(outcome.longest_pause_s, round(call.longest_pause_s, 3))
            outcome.longest_first_wait_s = max(outcome.longest_first_wait_s, round(call.first_wait_s, 3))


def _when(call: Call, injector: FaultInjector) -> str:
    return f"{call.begun - injector.begun:.1f} to {call.ended - injector.begun:.1f} s"


async def _check_records(
    stack: Stack, calls: list[Call], oracle: Oracle, injector: FaultInjector, outcome: Outcome
) -> None:
    database = stack.settings.run_folder / "payloads.sqlite3"
    full_disk = injector.of("fill the disk", "spool")
    expected = {
        call.request.name for call in calls if is_seen(call) and not any(span.meets(call) for span in full_disk)
    }
    with suppress(AssertionError):  # `compare` lists the missing ones.
        await until(lambda: expected <= stored(database).keys(), _RECORDING_S)
    outcome.records = compare(
        calls,
        stored(database),
        oracle,
        excuses=injector.excuses(),
        kills=injector.of("kill", "transformer"),
        predictors=injector.away("predictor"),
        full_disk=full_disk,
    )
    for name in ("lost", "doubled", "wrong"):
        outcome.failures += [f"record {name}: {text}" for text in getattr(outcome.records, name)]
