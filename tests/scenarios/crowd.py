"""Dozens of callers that send their requests over and over during faults of the stack.

    async with Crowd(client, stories, callers=64) as crowd:
        ...  # the faults
    crowd.all_right(oracle)

At the end of the block each caller finishes its current request.
"""

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from loadtest.prompts import EXAMPLES
from tests.chaos.load import Call, Client
from tests.chaos.oracle import Oracle
from tests.chaos.requests import Request, Story, greedy, sampled


def stories_of(tokens: int) -> list[Story]:
    """Stories of so many tokens, half greedy, half sampled."""
    stories = [greedy(prompt, tokens) for prompt in EXAMPLES]
    return stories + [sampled(prompt, tokens, seed=number + 1) for number, prompt in enumerate(EXAMPLES)]


class Crowd:
    """See the module; the stories are distributed over the callers in turn."""

    def __init__(self, client: Client, stories: Sequence[Story], callers: int, name: str = "caller") -> None:
        self._client = client
        self._name = name  # Without a hyphen.
        self._stories = [stories[number % len(stories)] for number in range(callers)]
        self._enough = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._last_piece_at = dict.fromkeys(range(callers), 0.0)
        self.calls: list[Call] = []

    def all_have_moved(self, since: float = 0.0) -> bool:
        """Whether every caller has received a piece since the time `since` of time.monotonic()."""
        for call in self.calls[-2 * len(self._stories) :]:
            if call.pieces:
                number = int(call.request.name.split("-")[1])
                self._last_piece_at[number] = max(self._last_piece_at[number], call.pieces[-1].at)
        return all(at > since for at in self._last_piece_at.values())

    def pauses_s(self) -> list[float]:
        """The longest time without a piece of each request, the shortest first."""
        return sorted(max(call.first_wait_s, call.longest_pause_s) for call in self.calls)

    def all_right(self, oracle: Oracle) -> None:
        """Fails the test unless every call got the whole right answer."""
        verdicts = [oracle.judge(call, ()) for call in self.calls]
        wrong = [f"{call.request.name}: {verdict.reason}" for call, verdict in zip(self.calls, verdicts, strict=True)
                 if verdict.outcome != "right"]  # fmt: skip
        assert not wrong, "\n".join([f"{len(wrong)} of {len(verdicts)} went wrong", *wrong[:10]])
        assert verdicts

    async def _send_again_and_again(self, number: int) -> None:
        turn = 0
        while not turn or not self._enough.is_set():
            turn += 1
            request = Request(f"{self._name}-{number}-{turn}", "Generate", self._stories[number])
            self.calls.append(Call(request, time.monotonic()))
            await self._client.send(request, self.calls[-1])

    async def __aenter__(self) -> Self:
        callers = range(len(self._stories))
        self._tasks = [
            asyncio.create_task(self._send_again_and_again(number), name=f"caller {number}") for number in callers
        ]
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
