"""One seed: a stack under mixed load and faults, and what came of it.

Two predictors, one of everything else, as they run in production but for a silence limit that is shorter than the
longest stop. Nothing is asserted here: `Outcome.failures` says what is not as it must be.
"""

from __future__ import annotations

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

from runner.stack import Stack
from tests.chaos.asks import DATE_MODEL, STORIES, TENSOR_MODEL, TEXT_MODEL, VECTOR_MODEL, WORDS, Ask, ask_of
from tests.chaos.faults import Tormentor
from tests.chaos.health import serves
from tests.chaos.load import Client, Told
from tests.chaos.memory import SMALL_CACHES, MemoryWatch
from tests.chaos.oracle import EXCUSED, Oracle, Verdict
from tests.chaos.records import Findings, compare, is_seen, stored
from tests.random_encoders import save_random_encoder, save_words_tokenizer
from tests.support.free_ports import start_stack
from tests.waiting import until

_PREDICTORS = 2
_AT_ONCE = 12
_SILENCE_LIMIT_S = 3
_BACK_OFF_S = 0.25  # Between the questions of a caller to whom nobody answers.
_BACK_S = 90.0
_RECORDED_S = 60.0
_DISK_MB = 16
_MAX_GROWTH_MB = 64
_MOST_SHOWN = 20


@dataclass
class Outcome:
    """The figures of one seed; `failures` is empty where all is as it must be."""

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
        """What is worth keeping, as JSON."""
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
    """Everything of one seed, in a folder of its own."""
    outcome = Outcome(seed, seconds)
    before = set(psutil.Process().children(recursive=True))
    with small_disk(folder / "disk") as disk:
        async with chaotic_stack(folder, disk) as stack, Client(stack.gateway) as client:
            oracle = Oracle()
            for stories in STORIES.values():
                await oracle.learn(client, stories)
            await oracle.learn_vectors(client)
            tormentor = Tormentor(stack, seed, folder / "faults", disk)
            all_told = await _under_fire(stack, client, tormentor, outcome)
            await _comes_back(stack, client, oracle, outcome)
            _judge(all_told, oracle, tormentor, outcome)
            await _check_records(stack, all_told, oracle, tormentor, outcome)
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
        commands={"predictor": (sys.executable, "-m", "tests.chaos.predictor")},
        environment={"predictor": {"FAULTS": str(folder / "faults"), **SMALL_CACHES}, "transformer": transformer},
        say=lambda line: print(f"  {line}"),
    )
    try:
        yield stack
    finally:
        await stack.stop()


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A disk of some megabytes, None where none may be mounted."""
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


async def _under_fire(stack: Stack, client: Client, tormentor: Tormentor, outcome: Outcome) -> list[Told]:
    """The load, for as long as it was asked for, while the tormentor is at work; what became of each request."""
    numbers, all_told = count(), []
    end = time.monotonic() + outcome.seconds

    async def caller() -> None:
        while time.monotonic() < end:
            told = await client.tell(ask_of(outcome.seed, next(numbers)))
            all_told.append(told)
            # Requests for a gateway that is away would show nothing.
            while told.status in EXCUSED and not await serves(stack.gateway) and time.monotonic() < end:  # noqa: ASYNC110
                await asyncio.sleep(_BACK_OFF_S)

    async with MemoryWatch(stack) as memory:
        torment = asyncio.create_task(tormentor.run(), name="tormentor")
        callers = asyncio.gather(*(caller() for _ in range(_AT_ONCE)))
        # Nobody waits for callers any more where the tormentor has failed.
        await asyncio.wait((torment, asyncio.ensure_future(callers)), return_when=asyncio.FIRST_COMPLETED)
        if torment.done():
            callers.cancel()
            torment.result()
        await callers
        torment.cancel()
        await asyncio.gather(torment, return_exceptions=True)
    outcome.growth_mb = memory.growth_mb()
    outcome.failures += [
        f"{name} grew by {growth} MB" for name, growth in outcome.growth_mb.items() if growth > _MAX_GROWTH_MB
    ]
    return all_told


async def _comes_back(stack: Stack, client: Client, oracle: Oracle, outcome: Outcome) -> None:
    """Waits until the stack is ready again, and asks for one story of each way."""
    await stack.wait_ready(_BACK_S)
    for way, stories in STORIES.items():
        verdict = oracle.judge(await client.tell(Ask(f"afterwards {way}", way, stories[0])), ())
        if verdict.outcome != "right":
            outcome.failures.append(f"afterwards {way}: {verdict.reason}")


def _judge(all_told: list[Told], oracle: Oracle, tormentor: Tormentor, outcome: Outcome) -> None:
    excuses = tormentor.excuses()
    for done in tormentor.done:
        outcome.faults[str(done.fault)] += 1
    for told in all_told:
        verdict: Verdict = oracle.judge(told, excuses)
        outcome.requests[verdict.outcome] += 1
        outcome.ways[told.ask.way] += 1
        if verdict.outcome == "excused":
            outcome.excused[told.status] += 1
        if verdict.outcome == "wrong":
            outcome.failures.append(f"{_when(told, tormentor)} {told.ask}: {verdict.reason}")
        if told.ask.manner == "reads" and verdict.outcome == "right" and told.pieces:
            outcome.longest_pause_s = max(outcome.longest_pause_s, round(told.longest_pause_s, 3))
            outcome.longest_first_wait_s = max(outcome.longest_first_wait_s, round(told.first_wait_s, 3))


def _when(told: Told, tormentor: Tormentor) -> str:
    return f"{told.begun - tormentor.begun:.1f} to {told.ended - tormentor.begun:.1f} s"


async def _check_records(
    stack: Stack, all_told: list[Told], oracle: Oracle, tormentor: Tormentor, outcome: Outcome
) -> None:
    database = stack.settings.run_folder / "payloads.sqlite3"
    full_disk = tormentor.of("fill the disk", "spool")
    expected = {told.ask.name for told in all_told if is_seen(told) and not any(span.meets(told) for span in full_disk)}
    with suppress(AssertionError):  # What is missing is told one by one.
        await until(lambda: expected <= stored(database).keys(), _RECORDED_S)
    outcome.records = compare(
        all_told, stored(database), oracle, tormentor.excuses(), tormentor.of("kill", "transformer"), full_disk
    )
    for name in ("lost", "doubled", "wrong"):
        outcome.failures += [f"record {name}: {text}" for text in getattr(outcome.records, name)]
