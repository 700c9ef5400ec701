"""Callers by the dozen who tell their stories over and over while something is done to the stack.

    async with Crowd(client, stories, callers=64) as crowd:
        ...  # the faults
    crowd.all_right(oracle)

At the end of the block each goes on to the end of its story.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from loadtest.prompts import EXAMPLES
from tests.chaos.asks import Ask, Story, greedy, sampled
from tests.chaos.load import Client, Told
from tests.chaos.oracle import Oracle


def stories_of(tokens: int) -> list[Story]:
    """Greedy and sampled ones of so many tokens, half of each."""
    told = [greedy(prompt, tokens) for prompt in EXAMPLES]
    return told + [sampled(prompt, tokens, seed=number + 1) for number, prompt in enumerate(EXAMPLES)]


class Crowd:
    """See the module; caller i tells story i, the stories being dealt round."""

    def __init__(self, client: Client, stories: Sequence[Story], callers: int) -> None:
        self._client = client
        self._stories = [stories[number % len(stories)] for number in range(callers)]
        self._enough = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._last_piece_at = dict.fromkeys(range(callers), 0.0)
        self.told: list[Told] = []

    def all_have_moved(self, since: float = 0.0) -> bool:
        """Whether every caller has had a piece since then, a time of time.monotonic(), of this request or the last."""
        for told in self.told[-2 * len(self._stories) :]:
            if told.pieces:
                number = int(told.ask.name.split("-")[1])
                self._last_piece_at[number] = max(self._last_piece_at[number], told.pieces[-1].at)
        return all(at > since for at in self._last_piece_at.values())

    def pauses_s(self) -> list[float]:
        """Of each request the longest time without a piece, the shortest first."""
        return sorted(max(told.first_wait_s, told.longest_pause_s) for told in self.told)

    def all_right(self, oracle: Oracle) -> None:
        """Fails the test unless every caller got the whole right answer, and nobody an error."""
        verdicts = [oracle.judge(told, ()) for told in self.told]
        wrong = [f"{told.ask.name}: {verdict.reason}" for told, verdict in zip(self.told, verdicts, strict=True)
                 if verdict.outcome != "right"]  # fmt: skip
        assert not wrong, "\n".join([f"{len(wrong)} of {len(verdicts)} went wrong", *wrong[:10]])
        assert verdicts

    async def _tell(self, number: int) -> None:
        turn = 0
        while not turn or not self._enough.is_set():
            turn += 1
            ask = Ask(f"caller-{number}-{turn}", "Generate", self._stories[number])
            self.told.append(Told(ask, time.monotonic()))
            await self._client.tell(ask, self.told[-1])

    async def __aenter__(self) -> Self:
        callers = range(len(self._stories))
        self._tasks = [asyncio.create_task(self._tell(number), name=f"caller {number}") for number in callers]
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._enough.set()
        if error is not None:
            for task in self._tasks:
                task.cancel()
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        if error is None:
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome
