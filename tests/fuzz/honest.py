"""16 honest streams and 16 honest unary callers: the neighbours of an attack.

Streams are `Generate`, completions, streamed chats and `ModelStreamInfer`; unary calls are `ModelInfer` of a small
tensor, and readiness. Each caller waits a little between its calls, so that the stack is busy and not full. gRPC
callers share two connections, as callers behind a proxy do. Every answer is compared with the first one of its kind.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

from bench.statistics import quantile
from tests.chaos.load import OK, Client
from tests.chaos.requests import TEXT_WAYS, Request, greedy
from tests.system.calls import serves
from tests.waiting import until

_STORY, _CHAT = greedy("Once upon a time", 16), greedy("Once upon a time", 16, is_chat=True)
_LIMIT_S = 90.0  # An honest caller's timeout.
_PAUSE_S = 0.3


@dataclass
class Figures:
    """The figures of one phase: seconds of unary calls, to first tokens, and between pieces; errors as text."""

    unary_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    answers: int = 0

    def p99_ms(self) -> dict[str, float]:
        """The 99th percentile of each kind that has any."""
        kinds = {"unary": self.unary_s, "first token": self.first_s, "gap": self.gaps_s}
        return {name: round(1000 * quantile(values, 0.99), 1) for name, values in kinds.items() if values}


class Honest:
    """The callers; an async context manager. `figures` has those of the present phase."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self._client = Client(gateway, connections=2)
        self._expected: dict[str, Any] = {}
        self._enough = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.figures = Figures()

    def phase(self) -> Figures:
        """Begins a new phase; returns the figures that it fills. Calls count in the phase in which they end."""
        self.figures = Figures()
        return self.figures

    async def settled(self, phase: Figures) -> None:
        """Waits until as many calls as there are callers have ended; fails if that takes too long."""
        begun = phase.answers + len(phase.errors)
        await until(lambda: phase.answers + len(phase.errors) >= begun + len(self._tasks), 2 * _LIMIT_S)

    async def _call(self, way: str) -> None:
        if way == "readiness":
            begun = time.monotonic()
            self._end(way, "" if await serves(self._gateway, "ready", _LIMIT_S) else "not ready")
            self.figures.unary_s.append(time.monotonic() - begun)
            return
        story = None if way == "ModelInfer" else _CHAT if way == "chat completions" else _STORY
        call = await self._client.send(Request(f"honest {way}", way, story, timeout_s=_LIMIT_S))
        answer = call.text, [piece.vector for piece in call.pieces if piece.vector], call.finish_reason
        if call.status != OK:
            self._end(way, f"{call.status} {call.message}")
        elif self._expected.setdefault(way, answer) != answer:
            self._end(way, f"another answer than before: {answer!r}")
        elif story is None:
            self._end(way)
            self.figures.unary_s.append(call.ended - call.begun)
        else:
            self._end(way)
            self.figures.first_s.append(call.first_wait_s)
            self.figures.gaps_s += [after.at - before.at for before, after in pairwise(call.pieces)]

    def _end(self, way: str, error: str = "") -> None:
        if error:
            self.figures.errors.append(f"{way}: {error}")
        else:
            self.figures.answers += 1

    async def _repeat(self, way: str) -> None:
        while not self._enough.is_set():
            await self._call(way)
            with suppress(TimeoutError):
                async with asyncio.timeout(_PAUSE_S):
                    await self._enough.wait()

    async def __aenter__(self) -> Self:
        ways = [*TEXT_WAYS * 4, *["ModelInfer"] * 12, *["readiness"] * 4]
        self._tasks = [asyncio.create_task(self._repeat(way), name="honest caller") for way in ways]
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._enough.set()
        await asyncio.gather(*self._tasks, return_exceptions=error is not None)
        await self._client.__aexit__(error_type, error, traceback)
