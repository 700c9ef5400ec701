"""One gateway as ordinary clients see it: a gRPC channel, the same with the predictor's authority, and HTTP.

`Failed` says that something was not as promised; every call has a time limit.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx2
from grpc_health.v1 import health_pb2_grpc

from millrace_protos import millrace_pb2_grpc
from millrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub

TIMEOUT_S = 60.0

_REFUSED = {400: grpc.StatusCode.INVALID_ARGUMENT, 404: grpc.StatusCode.NOT_FOUND}


class Failed(Exception):  # noqa: N818  # No error of the program: what it found.
    """What was not as it must be."""


def expect(holds: object, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)


@dataclass
class Stream:
    """Pieces of an answer, and when each came, in seconds since the request."""

    pieces: list[Any] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def told(self, has_text: bool = True) -> str:
        """What the table says of it; Failed where it did not come piece by piece, unless there was no text to come."""
        if not has_text:
            return f"{len(self.pieces)} pieces without text"
        expect(len(self.pieces) > 1, f"{len(self.pieces)} pieces, several were expected")
        expect(self.times[0] < self.times[-1], "all pieces came at once")
        first, last = self.times[0] * 1000, self.times[-1] * 1000
        return f"{len(self.pieces)} pieces, the first after {first:.0f} ms, the last after {last:.0f} ms"


class Gateway:
    """See the module; to be closed."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.aio.insecure_channel(address)
        self._at_predictor = grpc.aio.insecure_channel(address, options=(("grpc.default_authority", "predictor"),))
        self.inference: Any = GRPCInferenceServiceStub(self.channel)
        self.predictor: Any = GRPCInferenceServiceStub(self._at_predictor)
        self.text: Any = millrace_pb2_grpc.TextGenerationStub(self.channel)
        self.log: Any = millrace_pb2_grpc.PayloadLogStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)
        self._http = httpx2.AsyncClient(base_url=f"http://{address}", timeout=TIMEOUT_S)

    async def close(self) -> None:
        await self._http.aclose()
        await self.channel.close()
        await self._at_predictor.close()

    async def get(self, path: str) -> httpx2.Response:
        """The answer to a GET, which must be 200."""
        return _checked(await self._http.get(path))

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> httpx2.Response:
        """The answer to a POST of JSON or of bytes, which must be 200."""
        return _checked(await self._post(path, body, headers))

    async def refused(self, path: str, body: Any, status: int = 400) -> str:
        """Posts what must be refused; what the table says of it."""
        answer = await self._post(path, body, None)
        expect(answer.status_code == status, f"{status} was expected, not {answer.status_code}: {answer.text[:200]}")
        expect("x-failed-hop" in answer.headers, "no x-failed-hop")
        error = answer.json()["error"]
        expect(isinstance(error, dict) == path.startswith(("/v1/", "/openai/")), f"not its API's shape: {error!r}")
        return f"{status}: {error['message'] if isinstance(error, dict) else error}"

    async def streamed(self, path: str, body: Any) -> Stream:
        """The lines of a streamed answer that are not empty, as they come."""
        stream, begun = Stream(), time.monotonic()
        async with self._http.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                raise Failed(f"200 was expected, not {answer.status_code}: {(await answer.aread())[:200]!r}")
            async for line in answer.aiter_lines():
                if line:
                    stream.pieces.append(line)
                    stream.times.append(time.monotonic() - begun)
        return stream

    async def streamed_bytes(self, path: str, body: bytes, headers: Mapping[str, str]) -> Stream:
        """The body of a streamed answer in the pieces in which it came."""
        stream, begun = Stream(), time.monotonic()
        async with self._http.stream("POST", path, content=body, headers=dict(headers)) as answer:
            async for piece in answer.aiter_raw():
                stream.pieces.append(piece)
                stream.times.append(time.monotonic() - begun)
        return stream

    async def _post(self, path: str, body: Any, headers: Mapping[str, str] | None) -> httpx2.Response:
        if isinstance(body, bytes):
            return await self._http.post(path, content=body, headers=dict(headers or {}))
        return await self._http.post(path, json=body, headers=dict(headers or {}))


async def collected(call: AsyncIterator[Any]) -> Stream:
    """The messages of a gRPC stream, as they come."""
    stream, begun = Stream(), time.monotonic()
    async for message in call:
        stream.pieces.append(message)
        stream.times.append(time.monotonic() - begun)
    return stream


async def refused_call(call: Any, status: int = 400) -> str:
    """Awaits a gRPC call, unary or streaming, that must be refused; what the table says of it."""
    wanted = _REFUSED[status]
    try:
        if hasattr(call, "__aiter__"):
            await collected(call)
        else:
            await call
    except grpc.aio.AioRpcError as error:
        expect(error.code() is wanted, f"{wanted.name} was expected, not {error.code().name}: {error.details()}")
        expect("x-failed-hop" in dict(error.trailing_metadata() or ()), "no x-failed-hop")
        return f"{wanted.name}: {error.details()}"
    raise Failed(f"{wanted.name} was expected, not an answer")


def _checked(answer: httpx2.Response) -> httpx2.Response:
    expect(answer.status_code == 200, f"200 was expected, not {answer.status_code}: {answer.text[:200]}")
    return answer
