"""One request and its outcome, in words that all ways into the stack share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

TEXT_MODEL, TENSOR_MODEL = "storyteller", "tensors"


@dataclass(frozen=True)
class Ask:
    """A generation; `parameters` are sampling parameters. `goes_on`: whether the next request would be answered."""

    model: str = TEXT_MODEL
    version: str = ""
    prompt: str = "Once upon a time"
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"max_tokens": 2, "ignore_eos": True})
    timeout_s: float = 60.0
    goes_on: bool = True


@dataclass(frozen=True)
class Outcome:
    """What a client is told: `status` is gRPC's or HTTP's, or one of a stream; `retry_after` is the header's text.

    `begun` says whether some of the answer had come before.
    """

    status: grpc.StatusCode | int | str
    hop: str | None = None
    message: str = ""
    retry_after: str | None = None
    begun: bool = False


# An error among the responses of a stream, which goes on after it.
ON_STREAM = "error_message"
STREAM_LOST = "nor was the next request answered"
WayIn = Callable[[str, Ask], Awaitable[Outcome]]

# Asyncio's own has a few threads only, and a call that is held takes one.
_THREADS = ThreadPoolExecutor(64, thread_name_prefix="way-in")


async def in_thread(call: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call, *arguments)


def tensor_model(ask: Ask) -> str:
    return TENSOR_MODEL if ask.model == TEXT_MODEL else ask.model
