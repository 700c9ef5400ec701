"""One request and its outcome, in terms that all ways into the stack share."""

import asyncio
import http.client
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

TEXT_MODEL, TENSOR_MODEL = "storyteller", "tensors"


@dataclass(frozen=True)
class Request:
    """A generation; `parameters` are sampling parameters. `goes_on`: whether the next request would be answered.

    `headers` are metadata over gRPC. `on_connection` gets the connection of a way over REST, which another thread may
    break.
    """

    model: str = TEXT_MODEL
    version: str = ""
    prompt: str = "Once upon a time"
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"max_tokens": 2, "ignore_eos": True})
    timeout_s: float = 60.0
    goes_on: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    on_connection: Callable[[http.client.HTTPConnection], None] | None = None

    @property
    def id(self) -> str:
        return self.headers.get("x-request-id", "r")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple(self.headers.items())


@dataclass(frozen=True)
class Outcome:
    """The outcome for a client: `status` is gRPC's, HTTP's or that of a stream; `retry_after` is the header's text.

    `begun`: whether a part of the answer came before. `headers`: those of the answer, or its initial metadata.
    """

    status: grpc.StatusCode | int | str
    hop: str | None = None
    message: str = ""
    retry_after: str | None = None
    begun: bool = False
    headers: Mapping[str, Any] = field(default_factory=dict)


# An error among the responses of a stream, which continues after it.
ON_STREAM = "error_message"
STREAM_LOST = "nor was the next request answered"
WayIn = Callable[[str, Request], Awaitable[Outcome]]

# asyncio's own executor has few threads, and a blocked call takes one.
_THREADS = ThreadPoolExecutor(64, thread_name_prefix="way-in")


async def in_thread(call: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call, *arguments)


def tensor_model(request: Request) -> str:
    return TENSOR_MODEL if request.model == TEXT_MODEL else request.model
