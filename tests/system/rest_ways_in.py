"""Ways in over REST: bodies of requests, and the shapes of errors."""

import json
import struct
from collections.abc import Callable
from typing import Any

from tests.system.calls import Answer, http_request
from tests.system.request_outcome import Outcome, Request, WayIn, in_thread, tensor_model


def rest(path: str, body: Callable[[Request], Any], shape: Callable[[Any], str], takes_tensors: bool = False) -> WayIn:
    """`shape` checks an error's body and gives its message; bytes are JSON in one line, and binary data."""

    async def way_in(gateway: str, request: Request) -> Outcome:
        model = tensor_model(request) if takes_tensors else request.model
        where = path.format(model=f"{model}/versions/{request.version}" if request.version else model)
        written, headers = body(request), {"x-timeout-ms": str(int(request.timeout_s * 1000)), **request.headers}
        if isinstance(written, bytes):
            headers["inference-header-content-length"] = str(written.index(b"\n") + 1)
        answer = await in_thread(http_request, gateway, "POST", where, written, headers, None, request.on_connection)
        return rest_outcome(answer, shape)

    return way_in


def rest_outcome(answer: Answer, shape: Callable[[Any], str]) -> Outcome:
    """An answer's outcome; an error in the middle of a stream has the status 200 and a message."""
    retry_after = answer.headers.get("retry-after")
    if answer.status >= 400:
        assert answer.headers["content-type"] == "application/json", answer.headers
        internal = [name for name in answer.headers if name.startswith("grpc-") or name == "x-http-status"]
        assert not internal, internal
        message = shape(answer.json)
        hop = answer.headers.get("x-failed-hop")
        return Outcome(answer.status, hop, message, retry_after, headers=answer.headers)
    kind = answer.headers["content-type"].partition(";")[0]
    if kind not in ("text/event-stream", "application/x-ndjson"):
        return Outcome(answer.status, begun=True, headers=answer.headers)
    lines = [line.removeprefix("data: ") for line in answer.body.decode().split("\n")]
    pieces = [json.loads(line) for line in lines if line not in ("", "[DONE]") and not line.startswith("event: ")]
    errors = [piece for piece in pieces if piece.get("error") or piece.get("type") == "response.failed"]
    assert errors in ([], pieces[-1:]), errors
    assert not errors or "[DONE]" not in answer.body.decode()
    whole = {"response", "request_id"}  # What the shapes read beside the error itself.
    message = shape(errors[0] if whole & errors[0].keys() else {"error": errors[0]["error"]}) if errors else ""
    begun = len(pieces) > len(errors)
    return Outcome(answer.status, None, message, retry_after, begun, headers=answer.headers)


def openai_shape(body: Any) -> str:
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    assert body["error"]["type"]
    return str(body["error"]["message"])


def responses_shape(body: Any) -> str:
    if body.get("type") != "response.failed":
        return openai_shape(body)
    assert body["response"]["status"] == "failed"
    assert sorted(body["response"]["error"]) == ["code", "message"]
    return str(body["response"]["error"]["message"])


def anthropic_shape(body: Any) -> str:
    assert (body.get("type", "error"), bool(body["request_id"])) == ("error", True)
    assert sorted(body["error"]) == ["message", "type"]
    assert body["error"]["type"]
    return str(body["error"]["message"])


def v2_shape(body: Any) -> str:
    assert list(body) == ["error"]
    assert isinstance(body["error"], str)
    return body["error"]


def completion_body(stream: bool) -> Callable[[Request], Any]:
    return lambda request: {"model": request.model, "prompt": request.prompt, "stream": stream, **request.parameters}


def chat_body(stream: bool) -> Callable[[Request], Any]:
    def body(request: Request) -> Any:
        messages = [{"role": "user", "content": request.prompt}]
        return {"model": request.model, "messages": messages, "stream": stream, **request.parameters}

    return body


def messages_body(stream: bool) -> Callable[[Request], Any]:
    return lambda request: {"max_tokens": 256, **chat_body(stream)(request)}


def responses_body(stream: bool) -> Callable[[Request], Any]:
    def body(request: Request) -> Any:
        parameters = {
            "max_output_tokens" if name == "max_tokens" else name: v for name, v in request.parameters.items()
        }
        return {"model": request.model, "input": request.prompt, "stream": stream, **parameters}

    return body


def generate_body(request: Request) -> Any:
    return {"model": request.model, "prompt": request.prompt, **request.parameters}


def fields_body(name: str) -> Callable[[Request], Any]:
    return lambda request: {name: request.prompt, "parameters": dict(request.parameters)}


def tensors_body(name: str) -> Callable[[Request], Any]:
    def body(request: Request) -> Any:
        tensor = {"name": name, "datatype": "BYTES", "shape": [1], "data": [request.prompt]}
        return {"inputs": [tensor], "parameters": dict(request.parameters)}

    return body


def binary_tensors_body(name: str) -> Callable[[Request], bytes]:
    def body(request: Request) -> bytes:
        data = struct.pack("<I", len(request.prompt)) + request.prompt.encode()
        tensor = {"name": name, "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(data)}}
        parameters = {**request.parameters, "binary_data_output": True}
        return json.dumps({"inputs": [tensor], "parameters": parameters}).encode() + b"\n" + data

    return body
