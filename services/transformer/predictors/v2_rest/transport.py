"""HTTP/1.1 to one server: a bounded pool of connections, and every failure as a HeadraceError.

When the deadline passes or the caller cancels, the call ends and its connection is closed. Connecting takes at most 2
s; waiting for a pooled connection at most `wait_s`. TCP keepalive detects a dead host within 40 s. The body of a POST's
answer may have `MAX_ANSWER_BYTES`, that of a GET, which is decoded on the event loop, `MAX_DOCUMENT_BYTES`.

A connection is not reused after four seconds of silence: uvicorn closes it after five, and a request that meets the
close would fail.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import httpx2
import orjson

from headrace.deadline import PASSED, Deadline
from headrace.errors import (
    DeadlineError,
    HeadraceError,
    HopBrokenError,
    NotReadyError,
    OverloadedError,
    TooLargeError,
    from_http_status,
)
from headrace.rpc.byte_budget import MAX_MESSAGE_BYTES
from headrace.telemetry.http import HttpCall, HttpClientSpans

CONNECTIONS = 128
MAX_ANSWER_BYTES = MAX_MESSAGE_BYTES
MAX_DOCUMENT_BYTES = 1024 * 1024
_HOP = "predictor"
_CONNECT_S, _REUSE_S = 2.0, 4.0
_RETRY_AFTER_MS = 1000
_MAX_TIMEOUT_MS = 99_999_999
_PIECE_BYTES = 256 * 1024
_MAX_ERROR_BYTES = 64 * 1024  # Of an error's body, of which only a sentence is passed on.
# As gRPC's channels do: silent for 30 s, a connection is probed, and ends 10 s later.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2))
        if hasattr(socket, name)
    ),
)

Body = Sequence[bytes | memoryview]  # In parts.


@dataclass(frozen=True)
class Answer:
    """Headers by their lower-case names, and the body."""

    headers: Mapping[str, str]
    body: bytes


class HttpTransport:
    """Owned by the event loop; `address` is host:port, `wait_s` the longest wait for a connection of the pool."""

    def __init__(self, address: str, wait_s: float) -> None:
        self._address = address
        self._spans = HttpClientSpans(address)
        self._timeouts = httpx2.Timeout(None, connect=_CONNECT_S, pool=wait_s).as_dict()
        # Only the transport: a client adds cookies, redirects, proxies and a log line a call.
        self._transport = httpx2.AsyncHTTPTransport(
            trust_env=False,
            limits=httpx2.Limits(
                max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS, keepalive_expiry=_REUSE_S
            ),
            socket_options=_KEEPALIVE,
        )

    async def close(self) -> None:
        await self._transport.aclose()

    async def get(self, template: str, path: str, deadline: Deadline) -> Answer:
        """The answer to a GET; `template` is the path with names for its variable parts.

        Raises NotReadyError if the server cannot be reached, OverloadedError if no connection becomes free,
        DeadlineError, HopBrokenError if the connection breaks or the answer is compressed, TooLargeError for an answer
        beyond the limit, and the HeadraceError of a status other than 200.
        """
        return await self._call("GET", template, path, {}, (), deadline)

    async def post(
        self,
        template: str,
        path: str,
        headers: Mapping[str, str],
        body: Body,
        deadline: Deadline,
    ) -> Answer:
        """The answer to a POST of a body in parts; raises as `get` does."""
        sized = {**headers, "content-length": str(sum(map(len, body)))}
        return await self._call("POST", template, path, sized, body, deadline)

    async def _call(
        self,
        method: str,
        template: str,
        path: str,
        headers: Mapping[str, str],
        body: Body,
        deadline: Deadline,
    ) -> Answer:
        with self._spans.call(method, template, path) as call:
            sent = {**headers, **call.headers, **_timeout_header(deadline), "accept-encoding": "identity"}
            request = httpx2.Request(
                method,
                f"http://{self._address}{path}",
                headers=sent,
                content=_pieces(body) if body else None,
                extensions={"timeout": self._timeouts},
            )
            try:
                async with deadline.scope():
                    return await self._answered(request, call)
            except DeadlineError as error:
                raise error if error.hop else DeadlineError(PASSED, hop=_HOP) from None
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                raise NotReadyError(f"no {_HOP} is ready", hop=_HOP) from None
            except httpx2.PoolTimeout:
                raise OverloadedError(
                    f"all {CONNECTIONS} connections to the {_HOP} are in use", retry_after_ms=_RETRY_AFTER_MS
                ) from None
            except httpx2.TransportError:
                raise HopBrokenError(f"the connection to the {_HOP} broke", hop=_HOP) from None

    async def _answered(self, request: httpx2.Request, call: HttpCall) -> Answer:
        response = await self._transport.handle_async_request(request)
        async with aclosing(response):
            call.status = response.status_code
            if response.status_code != httpx2.codes.OK:
                raise await _error_of(response)
            if response.headers.get("content-encoding", "identity") != "identity":
                raise HopBrokenError(f"the {_HOP}'s answer is compressed, although identity was requested", hop=_HOP)
            limit = MAX_DOCUMENT_BYTES if request.method == "GET" else MAX_ANSWER_BYTES
            declared = response.headers.get("content-length", "")
            if declared.isdecimal() and int(declared) > limit:
                raise _too_large(limit)
            parts, size = [], 0
            async for part in response.aiter_raw():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
            return Answer(response.headers, b"".join(parts))


async def _pieces(body: Body) -> AsyncIterator[bytes]:
    """The body in pieces, so that other tasks run between two; a small one is one piece."""
    if sum(map(len, body)) <= _PIECE_BYTES:
        yield b"".join(body)
        return
    for part in body:
        for start in range(0, len(part), _PIECE_BYTES):
            yield bytes(part[start : start + _PIECE_BYTES])


def _timeout_header(deadline: Deadline) -> dict[str, str]:
    """The deadline, as a gateway of ours reads it."""
    left_s = deadline.left()
    return {} if left_s is None else {"x-timeout-ms": str(min(max(1, int(1000 * left_s)), _MAX_TIMEOUT_MS))}


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"the {_HOP}'s answer has more than {limit} bytes", hop=_HOP)


async def _error_of(response: httpx2.Response) -> HeadraceError:
    body = b""
    async for part in response.aiter_raw():
        body += part
        if len(body) > _MAX_ERROR_BYTES:
            break
    status, retry_after = response.status_code, response.headers.get("retry-after", "")
    retry_after_ms = 1000 * int(retry_after) if retry_after.isdecimal() and len(retry_after) <= 6 else None
    return from_http_status(status, _message_of(body) or f"the {_HOP} answered {status}", _HOP, retry_after_ms)


def _message_of(body: bytes) -> str:
    """The message of an error's body: `error` in the protocol, `detail` in FastAPI's servers."""
    try:
        values = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    found = values.get("error") or values.get("detail") if isinstance(values, dict) else None
    return found if isinstance(found, str) else orjson.dumps(found).decode() if found else ""
