"""Sends cases through the gateway and returns their outcomes, within the time after which a call hangs."""

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from typing import Self

import grpc
import httpx2
import orjson

from headrace_protos import inference_pb2
from tests.fuzz.case import Case, GrpcCall, HttpCall, Outcome
from tests.system.calls import channel, web_frames
from tests.waiting import HANG_S

_CONNECTIONS = 32
# The error of grpc.aio's client if a call ends while it still writes; the server's status is lost then.
_CUT_OFF = "Internal error from Core"
_ATTEMPTS = 100  # Within the time of a case: on a busy machine most of one may be cut off.
_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_GRPC = {str(code.value[0]): code.name for code in grpc.StatusCode}


class Sender:
    """Connections to one gateway; an async context manager."""

    def __init__(self, gateway: str) -> None:
        self._channels = {authority: channel(gateway, authority or None) for authority in ("", "predictor")}
        limits = httpx2.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS)
        self._http = httpx2.AsyncClient(base_url=f"http://{gateway}", timeout=2 * HANG_S, limits=limits)

    async def send(self, case: Case) -> Outcome:
        begun = time.monotonic()
        call = case.call
        try:
            async with asyncio.timeout(HANG_S):
                if isinstance(call, GrpcCall):
                    for _ in range(_ATTEMPTS):
                        status, accepted, message, faults = await self._grpc(call, read_all=case.must_fail)
                        if message != _CUT_OFF:
                            break
                else:
                    status, accepted, message, faults = await self._rest(call)
        except TimeoutError:
            status, accepted, message, faults = "none", False, "", [f"no answer within {HANG_S:g} s"]
        except httpx2.HTTPError as error:
            status, accepted, message, faults = "none", False, "", [f"the connection broke: {error!r}"]
        return Outcome(status, accepted, time.monotonic() - begun, message, tuple(faults))

    async def _grpc(self, call: GrpcCall, read_all: bool) -> tuple[str, bool, str, list[str]]:
        # On the wire a unary answer looks like a stream of one.
        opened = self._channels[call.authority]
        if len(call.messages) != 1:
            stream = opened.stream_stream(call.path)(_each(call.messages), metadata=call.metadata)
        else:
            stream = opened.unary_stream(call.path)(*call.messages, metadata=call.metadata)
        refusals = []
        try:
            async for response in stream:
                if call.path == _STREAM:
                    error = inference_pb2.ModelStreamInferResponse.FromString(response).error_message
                    refusals += [error] if error else []
                if not read_all:
                    break
            else:
                await stream.code()
        except grpc.aio.AioRpcError as error:
            hop = dict(error.trailing_metadata() or ()).get("x-failed-hop")
            unsigned = hop is None and error.code() is not grpc.StatusCode.INTERNAL
            return error.code().name, False, error.details() or "", ["no hop says that it failed"] if unsigned else []
        finally:
            stream.cancel()
        # An error of one request on a stream, which continues: the text is the only information.
        return ("INVALID_ARGUMENT", False, refusals[0], []) if refusals else ("OK", True, "", [])

    async def _rest(self, call: HttpCall) -> tuple[str, bool, str, list[str]]:
        request = self._http.build_request(call.method, call.path, content=call.body, headers=dict(call.headers))
        response = await self._http.send(request, stream=True)
        try:
            streams = response.headers.get("content-type", "").startswith("text/event-stream")
            body = await anext(response.aiter_raw(), b"") if streams else await response.aread()
        finally:
            await response.aclose()
        if call.web or "grpc-status" in response.headers:
            return _web_outcome(response, body)
        if response.status_code < 400:
            return str(response.status_code), True, "", []
        faults = [] if "x-failed-hop" in response.headers else ["no hop says that it failed"]
        return str(response.status_code), False, body.decode(errors="replace")[:300], faults + _body_faults(call, body)

    async def close(self) -> None:
        await self._http.aclose()
        for open_channel in self._channels.values():
            await open_channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _web_outcome(response: httpx2.Response, body: bytes) -> tuple[str, bool, str, list[str]]:
    if response.status_code != 200 and "grpc-status" not in response.headers:
        return str(response.status_code), False, body.decode(errors="replace")[:300], []
    if "text" in response.headers.get("content-type", ""):
        body = base64.b64decode(body)
    metadata = dict(response.headers) | web_frames(body)[1]
    status = _GRPC.get(metadata.get("grpc-status", ""), "none")
    return status, status == "OK", metadata.get("grpc-message", ""), []


def _body_faults(call: HttpCall, body: bytes) -> list[str]:
    """The faults of an error's form, by the shape of the path's API."""
    if "%00" in call.path:
        return []  # Envoy refuses such a path without a body, before it finds its API.
    try:
        error = orjson.loads(body)["error"]
    except (ValueError, TypeError, KeyError):
        return [f"the error's body is {body[:200]!r}"]
    is_openai = call.path.startswith(("/v1/", "/openai/"))
    message = error.get("message") if is_openai and isinstance(error, dict) else error
    if not isinstance(message, str) or not message:
        return [f"the error's body is {body[:200]!r}"]
    return ["a stack trace came back"] if "Traceback" in message else []


async def _each(messages: tuple[bytes, ...]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message
