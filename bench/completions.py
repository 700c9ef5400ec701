"""A light client of OpenAI's streamed completions, and a closed loop of callers: HTTP/1.1 over asyncio.

    async with Callers(address, model, count=8, new_tokens=64) as callers:
        await callers.measure(1.0)  # Not counted: it warms up.
        load = await callers.measure(5.0)

Events are not parsed: their tokens are counted in the text, which for the benchmarks' small models has one word `tN`
for each token (bench/architectures.py), except for special ones, which have no text and are rare; with another
vocabulary (`words` is False) each event with a text counts as one. An answer whose usage is not the number of tokens of
the request is an error, as is any status except 200; both end the measurement. Times are those of time.perf_counter(),
in seconds.
"""

import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from bench.cases import PROMPT_IDS

_COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?([0-9]+)')
_TEXT = re.compile(rb'"text": ?"([^"]*)"')
_ANSWER_TIMEOUT_S = 300.0
_CONNECT_TIMEOUT_S = 10.0

# Takes the time of arrival and the number of tokens of one piece of an answer.
OnTokens = Callable[[float, int], None]


class CompletionError(Exception):
    """The server refused or failed a request; one line of reason."""


class Connection(asyncio.Protocol):
    """A connection that is kept; one request at a time."""

    def __init__(self) -> None:
        self.words = True
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._in_body = False
        self._chunk_left = 0  # Bytes of the current chunk, with the line end after it.
        self._event = b""  # The beginning of an event whose end has not arrived.
        self._on_tokens: OnTokens = lambda at, tokens: None
        self._usage = 0
        self._ended: asyncio.Future[int] | None = None

    @classmethod
    async def open(cls, address: str, words: bool = True) -> Self:
        host, _, port = address.rpartition(":")
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            _, connection = await asyncio.get_running_loop().create_connection(cls, host, int(port))
        connection.words = words
        return connection

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def complete(self, body: bytes, on_tokens: OnTokens) -> int:
        """Sends a request; returns the completion tokens of its usage when it has ended; raises CompletionError."""
        if self._transport is None or self._transport.is_closing():
            raise CompletionError("the connection was closed")
        self._on_tokens = on_tokens
        self._in_body, self._event, self._usage = False, b"", 0
        self._ended = asyncio.get_running_loop().create_future()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._transport.write(head.encode() + body)
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            return await self._ended

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        part = "its body" if self._in_body else "its head"
        self._end(CompletionError(f"the connection was closed before the end of an answer, within {part} ({error})"))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._buffer += data
        try:
            if not self._in_body and not self._read_head():
                return
            contents, is_last = self._read_chunks()
            self._read_events(contents, now)
            if is_last:
                self._end(None)
        except CompletionError as error:
            self._end(error)
            self.close()

    def _read_head(self) -> bool:
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return False
        if head.split(b" ", 2)[1] != b"200":
            raise CompletionError(f"{head.splitlines()[0].decode()}: {rest[:300].decode(errors='replace')}")
        if b"transfer-encoding: chunked" not in head.lower():
            raise CompletionError("the answer is not chunked")
        self._buffer, self._in_body, self._chunk_left = rest, True, 0
        return True

    def _read_chunks(self) -> tuple[bytes, bool]:
        """The contents of the chunks that have arrived, and whether the last one has."""
        contents = []
        is_last = False
        while self._buffer:
            if self._chunk_left:
                part = self._buffer[: self._chunk_left]
                self._buffer = self._buffer[len(part) :]
                # Of the chunk's content, without its line end.
                contents.append(part[: max(0, self._chunk_left - 2)])
                self._chunk_left -= len(part)
                continue
            size, end, rest = self._buffer.partition(b"\r\n")
            if not end:
                break
            if int(size, 16) == 0:
                is_last = rest[:2] == b"\r\n"
                self._buffer = rest[2:] if is_last else self._buffer
                break
            self._buffer, self._chunk_left = rest, int(size, 16) + 2
        return b"".join(contents), is_last

    def _read_events(self, data: bytes, now: float) -> None:
        events, end, self._event = (self._event + data).rpartition(b"\n\n")
        if not end:
            return
        if b'"error":' in events:
            raise CompletionError(events[:300].decode(errors="replace"))
        if usage := _COMPLETION_TOKENS.findall(events):
            self._usage = int(usage[-1])
        texts = _TEXT.findall(events)
        tokens = sum(text.count(b"t") if self.words else bool(text) for text in texts)
        if tokens:
            self._on_tokens(now, tokens)

    def _end(self, error: CompletionError | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(self._usage)
        else:
            self._ended.set_exception(error)


@dataclass
class Load:
    """The load within a measurement: tokens, times to the first token, gaps between pieces of an answer.

    A piece is what one read of the socket returns, one or more events.
    """

    seconds: float = 0.0
    tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Stream:
    """One request: counts what arrives in the load that `current` returns, and keeps each piece's time and tokens."""

    def __init__(self, prompt: Sequence[int], new_tokens: int, model: str, current: Callable[[], Load]) -> None:
        self.arrivals: list[tuple[float, int]] = []
        self._current = current
        self._new_tokens = new_tokens
        self._latest: float | None = None
        self._started = 0.0
        self._body = json.dumps(
            {
                "model": model,
                "prompt": list(prompt),
                "max_tokens": new_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()

    async def run(self, connection: Connection) -> None:
        """Runs the request to its end; raises CompletionError."""
        self._started = time.perf_counter()
        tokens = await connection.complete(self._body, self._take)
        if tokens != self._new_tokens:
            raise CompletionError(f"{tokens} tokens came instead of {self._new_tokens}")

    def _take(self, at: float, tokens: int) -> None:
        self.arrivals.append((at, tokens))
        load = self._current()
        load.tokens += tokens
        if self._latest is None:
            load.first_token_s.append(at - self._started)
        else:
            load.gaps_s.append(at - self._latest)
        self._latest = at


class Callers:
    """Callers that each send a request as soon as the previous answer is complete; see the module."""

    def __init__(
        self, address: str, model: str, count: int, new_tokens: int = 64, prompt_tokens: int = 32, seed: int = 0
    ) -> None:
        self._address, self._model = address, model
        self._count, self._new_tokens, self._prompt_tokens = count, new_tokens, prompt_tokens
        self._draw = random.Random(seed)  # noqa: S311  # Prompts, no secrets.
        self._load = Load()
        self._leaving = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._call_again_and_again()) for _ in range(self._count)]
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leaving = True
        if error_type is not None:
            self.abandon()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        failed = [outcome for outcome in ended if isinstance(outcome, Exception)]
        if failed and error_type is None:
            raise failed[0]

    async def measure(self, seconds: float) -> Load:
        """The load that arrives from now on within a time; raises the first error of a caller."""
        return await self.measure_during(asyncio.create_task(asyncio.sleep(seconds)))

    async def measure_during(self, work: asyncio.Task[Any]) -> Load:
        """The load that arrives from now on until the end of other work."""
        load = self._load = Load()
        started = time.perf_counter()
        try:
            await asyncio.wait([work, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            load.seconds = time.perf_counter() - started
            self._load = Load()
            if not work.done():
                work.cancel()
        for task in self._tasks:
            if task.done():
                task.result()
        await work
        return load

    def abandon(self) -> None:
        """Closes the connections; answers end within."""
        self._leaving = True
        for task in self._tasks:
            task.cancel()

    async def _call_again_and_again(self) -> None:
        connection = await Connection.open(self._address)
        try:
            while not self._leaving:
                prompt = self._draw.choices(PROMPT_IDS, k=self._prompt_tokens)
                await Stream(prompt, self._new_tokens, self._model, lambda: self._load).run(connection)
        finally:
            connection.close()
