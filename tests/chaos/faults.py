"""A sequence of faults, generated from a seed alone, and their injection into a stack.

Two lanes run side by side: faults of predictors, and faults of everything else. A predictor gets its fault while it
serves, and mostly while another one does too: else none would ever live long enough to serve.
"""

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

from tests.chaos.oracle import Span
from tests.support.runner_stack import Stack
from tests.system.calls import serves
from tests.waiting import until

PREDICTORS, OTHERS = "predictors", "others"
# In each lane (kind, target) → its weight.
_LANES = {
    PREDICTORS: {"kill": 4, "stop": 3, "terminate": 3, "step raises": 3},
    OTHERS: {
        ("kill", "transformer"): 2,
        ("terminate", "transformer"): 2,
        ("stop", "transformer"): 2,
        ("kill", "envoy"): 2,
        ("terminate", "envoy"): 2,
        ("stop", "envoy"): 1,
        ("kill", "logger"): 3,
        ("terminate", "logger"): 2,
        ("stop", "logger"): 3,
        ("fill the disk", "spool"): 3,
    },
}
_QUIET_S = {PREDICTORS: (0.5, 6.0), OTHERS: (3.0, 12.0)}
_DURATION_S = (0.5, 6.0)
# The share of predictors' faults that are injected even if no other predictor serves.
_WITHOUT_OTHERS_SHARE = 0.2
_SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}
_BACK_S = 60.0
_BALLAST = "ballast"


@dataclass(frozen=True)
class Fault:
    """`seconds`: the duration of a fault that ends by itself; `quiet_s`: the pause before the lane's next fault."""

    kind: str
    target: str
    seconds: float
    quiet_s: float
    without_others: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.target.partition('-')[0]}"


def faults(seed: int, lane: str, predictors: int) -> Iterator[Fault]:
    """The lane's faults, without end."""
    kinds = _LANES[lane]
    for number in count():
        dice = Random(f"{seed}/{lane}/{number}")
        (chosen,) = dice.choices(list(kinds), list(kinds.values()))
        kind, target = chosen if lane == OTHERS else (chosen, f"predictor-{dice.randrange(predictors)}")
        duration, quiet = dice.uniform(*_DURATION_S), dice.uniform(*_QUIET_S[lane])
        yield Fault(kind, target, duration, quiet, without_others=dice.random() < _WITHOUT_OTHERS_SHARE)


@dataclass
class InjectedFault:
    """An injected fault; `until` is the time when its target was back, infinite while it is not."""

    fault: Fault
    since: float
    until: float = math.inf

    @property
    def span(self) -> Span:
        return Span(self.since, self.until)


class FaultInjector:
    """Injects the faults of one seed into a stack until `run` is cancelled.

    `folder` is the predictors' FAULTS, `disk` a small one under the spool where there is one; without it the faults
    of a full disk are left out.
    """

    def __init__(self, stack: Stack, seed: int, folder: Path, disk: Path | None) -> None:
        self._stack = stack
        self._seed = seed
        self._folder = folder
        self._disk = disk
        self._predictors = [name for name in stack.names if name.startswith("predictor")]
        self.injected: list[InjectedFault] = []
        self.begun = time.monotonic()

    def excuses(self) -> list[Span]:
        """When the gateway or the transformer may have been away."""
        return self.away("envoy", "transformer")

    def away(self, *services: str) -> list[Span]:
        """When the services may have been away; those of predictors together."""
        return [injected.span for injected in self.injected if injected.fault.target.partition("-")[0] in services]

    def of(self, kind: str, target: str) -> list[Span]:
        return [
            injected.span
            for injected in self.injected
            if (injected.fault.kind, injected.fault.target) == (kind, target)
        ]

    async def run(self) -> None:
        self.begun = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for lane in _LANES:
                tasks.create_task(self._lane(lane, tasks), name=f"faults of {lane}")

    async def _lane(self, lane: str, tasks: asyncio.TaskGroup) -> None:
        for fault in faults(self._seed, lane, len(self._predictors)):
            if fault.target == "spool" and self._disk is None:
                continue
            await self._until_it_can_be_injected(fault)
            injected = InjectedFault(fault, time.monotonic())
            self.injected.append(injected)
            print(f"  {injected.since - self.begun:6.1f} s: {fault.kind} {fault.target}, {fault.seconds:.1f} s")
            await self._inject(fault)
            tasks.create_task(self._watch(injected), name=f"watch {fault.target}")
            await asyncio.sleep(fault.quiet_s)

    async def _until_it_can_be_injected(self, fault: Fault) -> None:
        if fault.target not in self._predictors:
            await until(lambda: self._runs(fault.target), _BACK_S)
            return
        needed = [fault.target] if fault.without_others else self._predictors

        async def enough_serve() -> bool:
            return all([await serves(self._stack.addresses[name]) for name in needed])

        await until(enough_serve, 2 * _BACK_S)

    async def _inject(self, fault: Fault) -> None:
        if fault.kind == "step raises":
            port = self._stack.addresses[fault.target].rpartition(":")[2]
            (self._folder / f"raise-{port}").touch()
        elif fault.kind == "fill the disk":
            await self._fill_the_disk(fault.seconds)
        elif fault.kind == "stop":
            await self._suspend(fault)
        else:
            with suppress(ProcessLookupError):  # It may have died of another fault.
                await self._stack.kill(fault.target, _SIGNALS[fault.kind])

    async def _suspend(self, fault: Fault) -> None:
        with suppress(ProcessLookupError):
            process = self._stack.pid(fault.target)
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

    async def _watch(self, injected: InjectedFault) -> None:
        """Records when the target serves again, as seen by its callers."""
        target = injected.fault.target
        if target != "spool":
            by_gateway = target in ("envoy", "transformer")
            address = self._stack.gateway if by_gateway else self._stack.addresses[target]
            await until(lambda: serves(address), 2 * _BACK_S)
        injected.until = time.monotonic()
        print(f"  {injected.until - self.begun:6.1f} s: {target} is back")

    def _runs(self, name: str) -> bool:
        if name == "spool":
            return True
        try:
            return self._stack.pid(name) > 0
        except ProcessLookupError:
            return False
