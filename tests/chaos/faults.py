"""What is done to whom: a sequence of faults made of a seed alone, and whoever does them to a stack.

There are two lanes that go on side by side: one is done to predictors, the other to all else. A predictor is hit
where it serves, and mostly where another one does too: else none would ever live long enough to serve.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

from runner.stack import Stack
from tests.chaos.health import serves
from tests.chaos.oracle import Span
from tests.waiting import until

PREDICTORS, OTHERS = "predictors", "others"
# In each lane (kind, whom) → how often.
_LANES = {
    PREDICTORS: {"kill": 4, "stop": 3, "terminate": 3, "step raises": 3},
    OTHERS: {
        ("kill", "transformer"): 2,
        ("terminate", "transformer"): 2,
        ("stop", "transformer"): 2,
        ("kill", "envoy"): 2,
        ("terminate", "envoy"): 2,
        ("stop", "envoy"): 1,
        ("reload", "envoy"): 2,
        ("kill", "logger"): 3,
        ("terminate", "logger"): 2,
        ("stop", "logger"): 3,
        ("fill the disk", "spool"): 3,
    },
}
_QUIET_S = {PREDICTORS: (0.5, 6.0), OTHERS: (3.0, 12.0)}
_LASTS_S = (0.5, 6.0)
# Of the faults of predictors, which are done though no other one serves.
_RECKLESS = 0.2
_SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}
_BACK_S = 60.0
_BALLAST = "ballast"


@dataclass(frozen=True)
class Fault:
    """`seconds`: how long what ends by itself lasts; `quiet_s`: before the next of the lane."""

    kind: str
    whom: str
    seconds: float
    quiet_s: float
    reckless: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.whom.partition('-')[0]}"


def faults(seed: int, lane: str, predictors: int) -> Iterator[Fault]:
    """The lane's faults, without end."""
    kinds = _LANES[lane]
    for number in count():
        dice = Random(f"{seed}/{lane}/{number}")
        (chosen,) = dice.choices(list(kinds), list(kinds.values()))
        kind, whom = chosen if lane == OTHERS else (chosen, f"predictor-{dice.randrange(predictors)}")
        lasts, quiet = dice.uniform(*_LASTS_S), dice.uniform(*_QUIET_S[lane])
        yield Fault(kind, whom, lasts, quiet, reckless=dice.random() < _RECKLESS)


@dataclass
class Done:
    """A fault that was done; `until` is when its victim was back, infinite while it is not."""

    fault: Fault
    since: float
    until: float = math.inf

    @property
    def span(self) -> Span:
        return Span(self.since, self.until)


class Tormentor:
    """Does the faults of one seed to a stack, as long as `run` is not cancelled.

    `folder` is the predictors' FAULTS, `disk` a small one under the spool where there is one; without it the faults
    of a full disk are left out.
    """

    def __init__(self, stack: Stack, seed: int, folder: Path, disk: Path | None) -> None:
        self._stack = stack
        self._seed = seed
        self._folder = folder
        self._disk = disk
        self._predictors = [name for name in stack.names if name.startswith("predictor")]
        self.done: list[Done] = []
        self.begun = time.monotonic()

    def excuses(self) -> list[Span]:
        """When the gateway or the transformer was away, or may have been; of a reload nobody may notice anything."""
        return [
            done.span
            for done in self.done
            if done.fault.whom in ("envoy", "transformer") and done.fault.kind != "reload"
        ]

    def of(self, kind: str, whom: str) -> list[Span]:
        return [done.span for done in self.done if (done.fault.kind, done.fault.whom) == (kind, whom)]

    async def run(self) -> None:
        self.begun = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for lane in _LANES:
                tasks.create_task(self._lane(lane, tasks), name=f"faults of {lane}")

    async def _lane(self, lane: str, tasks: asyncio.TaskGroup) -> None:
        for fault in faults(self._seed, lane, len(self._predictors)):
            if fault.whom == "spool" and self._disk is None:
                continue
            await self._until_it_can_be_hit(fault)
            done = Done(fault, time.monotonic())
            self.done.append(done)
            print(f"  {done.since - self.begun:6.1f} s: {fault.kind} {fault.whom}, {fault.seconds:.1f} s")
            await self._do(fault)
            tasks.create_task(self._watch(done), name=f"watch {fault.whom}")
            await asyncio.sleep(fault.quiet_s)

    async def _until_it_can_be_hit(self, fault: Fault) -> None:
        if fault.whom not in self._predictors:
            await until(lambda: self._runs(fault.whom), _BACK_S)
            return
        needed = [fault.whom] if fault.reckless else self._predictors

        async def enough_serve() -> bool:
            return all([await serves(self._stack.addresses[name]) for name in needed])

        await until(enough_serve, 2 * _BACK_S)

    async def _do(self, fault: Fault) -> None:
        if fault.kind == "step raises":
            port = self._stack.addresses[fault.whom].rpartition(":")[2]
            (self._folder / f"raise-{port}").touch()
        elif fault.kind == "fill the disk":
            await self._fill_the_disk(fault.seconds)
        elif fault.kind == "reload":
            await self._stack.reload()
        elif fault.kind == "stop":
            await self._stop(fault)
        else:
            with suppress(ProcessLookupError):  # It may have died of another fault.
                await self._stack.kill(fault.whom, _SIGNALS[fault.kind])

    async def _stop(self, fault: Fault) -> None:
        with suppress(ProcessLookupError):
            process = self._stack.pid(fault.whom)
            os.kill(process, signal.SIGSTOP)
            try:
                await asyncio.sleep(fault.seconds)
            finally:
                os.kill(process, signal.SIGCONT)

    async def _fill_the_disk(self, seconds: float) -> None:
        if self._disk is None:
            return
        ballast = self._disk / _BALLAST
        try:
            with suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
            await asyncio.sleep(seconds)
        finally:
            ballast.unlink(missing_ok=True)

    async def _watch(self, done: Done) -> None:
        """Notes when the victim is back, as those who call it see it."""
        whom = done.fault.whom
        if whom != "spool":
            by_gateway = whom in ("envoy", "transformer")
            address = self._stack.gateway if by_gateway else self._stack.addresses[whom]
            await until(lambda: serves(address), 2 * _BACK_S)
        done.until = time.monotonic()
        print(f"  {done.until - self.begun:6.1f} s: {whom} is back")

    def _runs(self, name: str) -> bool:
        if name == "spool":
            return True
        try:
            return self._stack.pid(name) > 0
        except ProcessLookupError:
            return False
