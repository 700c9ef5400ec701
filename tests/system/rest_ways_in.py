"""Ways in by REST: bodies of requests, and what an error's body must look like."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

from tests.system.ask import Ask, Outcome, WayIn, in_thread, tensor_model
from tests.system.calls import Answer, http_request


def rest(path: str, body: Callable[[Ask], Any], shape: Callable[[Any], str], takes_tensors: bool = False) -> WayIn:
    """`shape` checks an error's body and gives its message; bytes are JSON in one line, and binary data."""

    async def way_in(gateway: str, ask: Ask) -> Outcome:
        model = tensor_model(ask) if takes_tensors else ask.model
        where = path.format(model=f"{model}/versions/{ask.version}" if ask.version else model)
        written, headers = body(ask), {"x-timeout-ms": str(int(ask.timeout_s * 1000))}
        if isinstance(written, bytes):
            headers["inference-header-content-length"] = str(written.index(b"\n") + 1)
        return rest_outcome(await in_thread(http_request, gateway, "POST", where, written, headers), shape)

    return way_in


def rest_outcome(answer: Answer, shape: Callable[[Any], str]) -> Outcome:
    """An answer's outcome; an error in the middle of a stream has the status 200 and a message."""
    retry_after = answer.headers.get("retry-after")
    if answer.status >= 400:
        assert answer.headers["content-type"] == "application/json", answer.headers
        internal = [name for name in answer.headers if name.startswith("grpc-") or name == "x-http-status"]
        assert not internal, internal
        message = shape(answer.json)
        return Outcome(answer.status, answer.headers.get("x-failed-hop"), message, retry_after)
    kind = answer.headers["content-type"].partition(";")[0]
    if kind not in ("text/event-stream", "application/x-ndjson"):
        return Outcome(answer.status, begun=True)
    lines = [line.removeprefix("data: ") for line in answer.body.decode().split("\n")]
    pieces = [json.loads(line) for line in lines if line not in ("", "[DONE]")]
    errors = [piece for piece in pieces if piece.get("error")]
    assert errors in ([], pieces[-1:]), errors
    assert not errors or "[DONE]" not in answer.body.decode()
    message = shape({"error": errors[0]["error"]}) if errors else ""
    return Outcome(answer.status, None, message, retry_after, begun=len(pieces) > len(errors))


def openai_shape(body: Any) -> str:
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    assert body["error"]["type"]
    return str(body["error"]["message"])


def v2_shape(body: Any) -> str:
    assert list(body) == ["error"]
    assert isinstance(body["error"], str)
    return body["error"]


def completion_body(stream: bool) -> Callable[[Ask], Any]:
    return lambda ask: {"model": ask.model, "prompt": ask.prompt, "stream": stream, **ask.parameters}


def chat_body(stream: bool) -> Callable[[Ask], Any]:
    def body(ask: Ask) -> Any:
        messages = [{"role": "user", "content": ask.prompt}]
        return {"model": ask.model, "messages": messages, "stream": stream, **ask.parameters}

    return body


def generate_body(ask: Ask) -> Any:
    return {"model": ask.model, "prompt": ask.prompt, **ask.parameters}


def fields_body(name: str) -> Callable[[Ask], Any]:
    return lambda ask: {name: ask.prompt, "parameters": dict(ask.parameters)}


def tensors_body(name: str) -> Callable[[Ask], Any]:
    def body(ask: Ask) -> Any:
        tensor = {"name": name, "datatype": "BYTES", "shape": [1], "data": [ask.prompt]}
        return {"inputs": [tensor], "parameters": dict(ask.parameters)}

    return body


def binary_tensors_body(name: str) -> Callable[[Ask], bytes]:
    def body(ask: Ask) -> bytes:
        data = struct.pack("<I", len(ask.prompt)) + ask.prompt.encode()
        tensor = {"name": name, "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(data)}}
        parameters = {**ask.parameters, "binary_data_output": True}
        return json.dumps({"inputs": [tensor], "parameters": parameters}).encode() + b"\n" + data

    return body
