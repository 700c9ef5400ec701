"""Checks a running stack from outside: every endpoint that a model should answer, and those it must refuse.

Metadata and configuration define the kind of model: text generation with or without chat template, encoder-decoder,
embeddings, classification, a user's tensors, a processor.

Of a user's code only datatypes and shapes are known: its inputs are ones, with size 1 for every open dimension, and it
may refuse them with INVALID_ARGUMENT.
"""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import grpc
import httpx2
import numpy as np
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from headrace.oip.parameters import set_parameters
from headrace.oip.tensors import BYTES, Tensor, add_input, bytes_tensor, dtype_of, encode_raw
from headrace_protos import headrace_pb2
from headrace_protos import inference_pb2 as pb
from headrace_runner.smoke.gateway import Answer, Check, Failed, Gateway, Kind, Model, ask, describe
from headrace_runner.terminal import one_line

_PROMPT = "Once upon a time"
_RANKED = {"query": "a fox", "documents": ["the fox", "the hen"]}
_TOKENS = 16
# The pace keeps tokens apart: on a busy machine those that wait are sent as one piece.
_SAMPLING: Mapping[str, Any] = {"max_tokens": _TOKENS, "ignore_eos": True, "pace": 200.0}
_NO_MODEL = "no-such-model"
_OUTPUTS = {Kind.EMBEDDING: "embedding", Kind.CLASSIFICATION: "logits"}
_OPTIONAL = ("attention_mask", "token_type_ids")
_UNDECLARED = pb.ModelMetadataResponse.TensorMetadata(name="x", datatype="INT64", shape=(1, 3))  # Accepts any input.
_RECORD_POLLS, _POLL_S = 100, 0.1


def checks_of(gateway: Gateway, model: Model) -> Iterator[Check]:
    yield from _of_the_server(gateway)
    yield from _of_any_model(gateway, model)
    if model.kind is Kind.TEXT:
        yield from _of_text_by_grpc(gateway, model.name)
        yield from _of_text_by_rest(gateway, model)
    else:
        yield from _of_tensors(gateway, model)
        yield from _of_text_endpoints(gateway, model)


def _of_the_server(gateway: Gateway) -> Iterator[Check]:
    for service in ("", "ready"):
        request = health_pb2.HealthCheckRequest(service=service)
        yield _grpc(gateway.health, "Check", request, "status: SERVING", note=f" of health {service!r}")
    every = reflection_pb2.ServerReflectionRequest(list_services="")
    services = ("inference.GRPCInferenceService", "headrace.v1.TextGeneration", "headrace.v1.PayloadLog")
    yield _grpc(gateway.reflection, "ServerReflectionInfo", every, *services)
    yield _grpc(gateway.inference, "ServerLive", pb.ServerLiveRequest(), "live: true")
    yield _grpc(gateway.inference, "ServerReady", pb.ServerReadyRequest(), "ready: true")
    yield _grpc(gateway.inference, "ServerMetadata", pb.ServerMetadataRequest(), "version:")
    for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/health", "/version", "/v1/models", "/"):
        yield _rest(gateway, path)
    yield _rest(gateway, "/v2/repository/index", {})
    prompt: dict[str, Any] = {"model": _NO_MODEL, "prompt": "x"}
    infer, generate = pb.ModelInferRequest(model_name=_NO_MODEL), headrace_pb2.GenerateRequest(**prompt)
    yield _grpc(gateway.inference, "ModelInfer", infer, note=" of no model", status=404)
    yield _grpc(gateway.text, "Generate", generate, note=" of no model", status=404)
    yield _rest(gateway, "/v1/completions", prompt, note=" of no model", status=404)
    for path in (f"/v2/models/{_NO_MODEL}/infer", "/v2/no/such/path", "/v1/no-such-path"):
        yield _rest(gateway, path, {"inputs": []}, status=404)


def _of_any_model(gateway: Gateway, model: Model) -> Iterator[Check]:
    name, named = model.name, f'name: "{model.name}"'
    for protocol, stub in _stubs(gateway, model).items():
        by = partial(_grpc, stub, protocol=protocol)
        yield by("ModelReady", pb.ModelReadyRequest(name=name, version=model.version), "ready: true")
        yield by("ModelMetadata", pb.ModelMetadataRequest(name=name), named)
        yield by("ModelConfig", pb.ModelConfigRequest(name=name), named)
    yield _grpc(gateway.inference, "ModelStatistics", pb.ModelStatisticsRequest(name=name), named)
    yield _grpc(gateway.inference, "RepositoryIndex", pb.RepositoryIndexRequest(ready=True), named)
    wrong = pb.ModelMetadataRequest(name=name, version="no-such-version")
    yield _grpc(gateway.inference, "ModelMetadata", wrong, note=" of no version", status=404)
    for end in ("", "/ready", "/config", "/stats", f"/versions/{model.version}"):
        yield _rest(gateway, f"/v2/models/{name}{end}")


def _of_text_by_grpc(gateway: Gateway, name: str) -> Iterator[Check]:
    request, text = headrace_pb2.GenerateRequest(model=name, prompt=_PROMPT, **_SAMPLING), _text_input()
    ended = ('finish_reason: "length"', f"completion_tokens: {_TOKENS}")
    yield _grpc(gateway.text, "Generate", request, *ended, streamed=True)
    for field, value in (("temperature", -1.0), ("prompt", ""), ("max_tokens", 2**31)):
        wrong = headrace_pb2.GenerateRequest()
        wrong.CopyFrom(request)
        setattr(wrong, field, value)
        yield _grpc(gateway.text, "Generate", wrong, note=f", {field}={value!r}", status=400)
    yield _grpc(gateway.inference, "ModelInfer", _infer(name, [text], _SAMPLING), '"text_output"')
    final = 'key: "triton_final_response" value { bool_param: true }'
    yield _grpc(gateway.inference, "ModelStreamInfer", _infer(name, [text], _SAMPLING), final, streamed=True)
    by = partial(_grpc, gateway.predictor, "ModelInfer", protocol="predictor")
    yield by(_infer(name, [_ids(1, 2, 3)], _SAMPLING), f'name: "output_ids" datatype: "INT32" shape: {_TOKENS}')
    yield by(_infer(name, [_ids(2**40)], _SAMPLING), note=" of an id outside", status=400)
    message = request.SerializeToString()
    frame = b"\0" + len(message).to_bytes(4, "big") + message
    path, headers = "/headrace.v1.TextGeneration/Generate", {"content-type": "application/grpc-web+proto"}
    call = partial(gateway.rest, path, frame, headers)
    yield Check("gRPC-Web", "Generate", call, ("grpc-status:0",), streamed=True)
    yield Check("log", "Query, Get, /headrace/v1/payloads", partial(_record, gateway, request))


def _of_text_by_rest(gateway: Gateway, model: Model) -> Iterator[Check]:
    own, named = f"/v2/models/{model.name}", {"model": model.name}
    completion = {**named, "prompt": _PROMPT, **_SAMPLING}
    chat = {**named, "messages": [{"role": "user", "content": "Tell me a story."}], **_SAMPLING}
    ended = ('"finish_reason": "length"', f'"completion_tokens": {_TOKENS}')
    chats: dict[str, Any] = {} if model.has_chat_template else {"status": 400, "note": " is refused"}
    openai = partial(_rest, gateway, protocol="OpenAI")
    yield openai(f"/v1/models/{model.name}", None, f'"id": "{model.name}"')
    yield openai("/openai/v1/completions", completion, *ended)
    yield openai("/v1/completions", {**completion, "temperature": "hot"}, note=", temperature='hot'", status=400)
    for path, body, more in (("/v1/completions", completion, {}), ("/v1/chat/completions", chat, chats)):
        yield openai(path, body, *ended, **more)
        yield openai(path, {**body, "stream": True}, "data: [DONE]", streamed=True, **more)
    yield openai("/v1/embeddings", {**named, "input": _PROMPT}, note=" is refused", status=400)
    limits = {"max_tokens": None, "max_output_tokens": _TOKENS}
    response = {**named, "input": _PROMPT, **_SAMPLING, **limits}
    yield openai("/v1/responses", response, '"status": "incomplete"', f'"output_tokens": {_TOKENS}', **chats)
    yield openai("/v1/responses", {**response, "stream": True}, "event: response.incomplete", **chats)
    anthropic = partial(_rest, gateway, "/v1/messages", protocol="Anthropic")
    yield anthropic(chat, '"stop_reason": "max_tokens"', f'"output_tokens": {_TOKENS}', **chats)
    yield anthropic({**chat, "stream": True}, "event: message_stop", streamed=True, **chats)
    vllm = partial(_rest, gateway, protocol="vLLM")
    yield Check("vLLM", "POST /tokenize, POST /detokenize", partial(_ids_and_back, gateway, named), (_PROMPT,))
    yield vllm(f"/tokenizer_info?model={model.name}", None, "eos_token")
    yield _json_infer(gateway, model.name, [_text_input()], _SAMPLING)
    yield _binary_infer(gateway, model.name, [_text_input()], _SAMPLING)
    for end, streamed in (("generate", False), ("generate_stream", True)):
        by = partial(_rest, gateway, f"{own}/{end}", protocol="V2 REST")
        yield by({"text_input": _PROMPT, "parameters": dict(_SAMPLING)}, '"text_output":', streamed=streamed)
        yield by({"text_input": _PROMPT, "parameters": {"max_tokens": 0}}, note=", max_tokens=0", status=400)
    by = partial(_rest, gateway, "/headrace/v1/generate")
    yield by(completion, '"finish_reason": "length"', streamed=True)
    yield by({**completion, "prompt": ""}, note=", prompt=''", status=400)


def _of_tensors(gateway: Gateway, model: Model) -> Iterator[Check]:
    name, may_refuse = model.name, model.kind not in _OUTPUTS
    inputs = [_ones(tensor) for tensor in model.inputs or (_UNDECLARED,) if tensor.name not in _OPTIONAL]
    outputs = () if may_refuse else (f'name: "{_OUTPUTS[model.kind]}"',)
    final = 'key: "triton_final_response" value { bool_param: true }'
    for protocol, stub in _stubs(gateway, model).items():
        by = partial(_grpc, stub, "ModelInfer", protocol=protocol)
        if not model.decoupled:
            yield by(_infer(name, inputs), *outputs, may_refuse=may_refuse)
        stream = partial(_grpc, stub, "ModelStreamInfer", protocol=protocol)
        yield stream(_infer(name, inputs), final, *outputs, may_refuse=may_refuse)
        wrong = _infer(name, inputs)
        wrong.raw_input_contents[0] += b"\0"
        yield by(wrong, note=", a byte too many", status=400)
        wrong = _infer(name, inputs)
        wrong.inputs[0].datatype = "NO_SUCH_TYPE"
        yield by(wrong, note=", no such datatype", status=400)
        if model.inputs:
            wrong = _infer(name, inputs)
            wrong.inputs[0].name = "no-such-input"
            yield by(wrong, note=", no such input", status=400)
        if model.kind in _OUTPUTS:
            yield by(_infer(name, [_ids(2**40)]), note=", token id outside", status=400)
    if not model.decoupled:
        yield _binary_infer(gateway, name, inputs, may_refuse=may_refuse)
        if not model.has_half_floats:
            yield _json_infer(gateway, name, inputs, may_refuse=may_refuse, finite=not may_refuse)
    broken = {"inputs": [{"name": "x", "datatype": "INT64", "shape": [2, 2], "data": [1]}]}
    yield _rest(gateway, f"/v2/models/{name}/infer", broken, protocol="V2 REST", note=", wrong shape", status=400)


def _of_text_endpoints(gateway: Gateway, model: Model) -> Iterator[Check]:
    prompt: dict[str, Any] = {"model": model.name, "prompt": _PROMPT}
    chat = {"model": model.name, "messages": [{"role": "user", "content": _PROMPT}]}
    yield _grpc(gateway.text, "Generate", headrace_pb2.GenerateRequest(**prompt), note=" is refused", status=400)
    for path, body in (
        ("/v1/completions", prompt),
        ("/v1/chat/completions", chat),
        ("/headrace/v1/generate", prompt),
    ):
        yield _rest(gateway, path, body, note=" is refused", status=400)
    embeddings = partial(_rest, gateway, "/v1/embeddings", protocol="OpenAI")
    ids = {"model": model.name, "input": [[1, 2, 3], [1]]}
    if model.kind is Kind.EMBEDDING:
        yield embeddings(ids, '"index": 1', note=" of ids")
        if model.takes_text:
            yield embeddings({**ids, "input": "the fox", "encoding_format": "base64"}, '"index": 0', note=" of text")
            yield _rest(gateway, "/rerank", {"model": model.name, **_RANKED}, '"relevance_score": ', protocol="vLLM")
        return
    yield embeddings(ids, note=" is refused", status=400)
    if model.kind is Kind.CLASSIFICATION and model.takes_text:
        yield _rest(gateway, "/classify", {**ids, "input": "the fox"}, '"label": ', protocol="vLLM")


def _ids_and_back(gateway: Gateway, named: dict[str, str]) -> Answer:
    ids = json.loads(gateway.rest("/tokenize", {**named, "prompt": _PROMPT}).expect(200).text)["tokens"]
    return gateway.rest("/detokenize", {**named, "tokens": ids})


def _record(gateway: Gateway, request: headrace_pb2.GenerateRequest) -> Answer:
    """Generates, and polls for the record, which is written after the request."""
    request_id = f"smoke-{uuid.uuid4()}"
    named = headrace_pb2.GenerateRequest(request_id=request_id)
    named.MergeFrom(request)
    ask(gateway.text, "Generate", named).expect(200)
    for _ in range(_RECORD_POLLS):
        found = ask(gateway.log, "Query", headrace_pb2.QueryPayloadsRequest(request_id=request_id))
        if found.expect(200).pieces:
            [record, *_] = found.expect(200, f'prompt: "{_PROMPT}"', 'status: "OK"').pieces
            by_id = gateway.rest(f"/headrace/v1/payloads/{record.record_id}").expect(200)
            if json.loads(by_id.text).get("text", "") != record.text:
                raise Failed("Get by REST returns another text")
            page = gateway.rest(f"/headrace/v1/payloads?request_id={request_id}")
            return page.expect(200, f'"record_id": "{record.record_id}"')
        time.sleep(_POLL_S)
    raise Failed(f"no record within {_RECORD_POLLS * _POLL_S:g} s")


def _grpc(
    stub: Any, name: str, request: Any, *contents: str, protocol: str = "gRPC", note: str = "", **more: Any
) -> Check:
    return Check(protocol, f"{name}{note}", partial(ask, stub, name, request), contents, **more)


def _rest(
    gateway: Gateway, path: str, body: Any = None, *contents: str, protocol: str = "REST", note: str = "", **more: Any
) -> Check:
    note = f"{', streamed' if isinstance(body, dict) and body.get('stream') else ''}{note}"
    name = f"{'GET' if body is None else 'POST'} {path}{note}"
    return Check(protocol, name, partial(gateway.rest, path, body), contents, **more)


def _json_infer(
    gateway: Gateway, name: str, inputs: Sequence[Tensor], parameters: Mapping[str, Any] | None = None, **more: Any
) -> Check:
    listed = []
    for tensor in inputs:
        data = [item.decode() if isinstance(item, bytes) else item for item in tensor.array.ravel().tolist()]
        listed.append({**_head(tensor), "data": data})
    body = {"inputs": listed, "parameters": dict(parameters or {})}
    return _rest(gateway, f"/v2/models/{name}/infer", body, '"outputs"', protocol="V2 REST", note=", JSON", **more)


def _binary_infer(
    gateway: Gateway, name: str, inputs: Sequence[Tensor], parameters: Mapping[str, Any] | None = None, **more: Any
) -> Check:
    """Sends the tensors as bytes after the JSON."""
    data = [encode_raw(tensor) for tensor in inputs]
    listed = [
        {**_head(tensor), "parameters": {"binary_data_size": len(raw)}}
        for tensor, raw in zip(inputs, data, strict=True)
    ]
    head = json.dumps({"inputs": listed, "parameters": {**(parameters or {}), "binary_data_output": True}}).encode()
    path, headers = f"/v2/models/{name}/infer", {"inference-header-content-length": str(len(head))}
    call = partial(gateway.rest, path, b"".join((head, *data)), headers)
    return Check("V2 REST", f"POST {path}, binary", call, ('"outputs"',), **more)


def _stubs(gateway: Gateway, model: Model) -> dict[str, Any]:
    """The stubs that serve the model: the predictor does not know a processor."""
    inner = {} if model.kind is Kind.PROCESSOR else {"predictor": gateway.predictor}
    return {"gRPC": gateway.inference, **inner}


def _infer(name: str, inputs: Sequence[Tensor], parameters: Mapping[str, Any] | None = None) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=name, id="smoke")
    for tensor in inputs:
        add_input(request, tensor)
    set_parameters(request.parameters, parameters or {})
    return request


def _head(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.array.shape}


def _text_input() -> Tensor:
    return bytes_tensor("text_input", [_PROMPT.encode()])


def _ids(*ids: int) -> Tensor:
    return Tensor("input_ids", "INT64", np.array([ids], dtype=np.int64))


def _ones(tensor: Any) -> Tensor:
    shape = tuple(max(size, 1) if size != 0 else 0 for size in tensor.shape)
    if tensor.datatype != BYTES:
        return Tensor(tensor.name, tensor.datatype, np.ones(shape, dtype_of(tensor.name, tensor.datatype)))
    return Tensor(tensor.name, BYTES, np.full(shape, b"the fox", dtype=object))


_SHOWN = 110  # Characters of a check's result.
_BROKEN = (grpc.RpcError, httpx2.HTTPError, KeyError, IndexError, TypeError, ValueError)


def smoke(address: str, name: str = "") -> int:
    """Runs and prints the checks of one model, or of all; returns the number of failures; raises StartupError."""
    with closing(Gateway(address)) as gateway:
        names = [name] if name else gateway.ready_models()
        if not names:
            raise Failed(f"no model is ready at {address}")
        return sum([_smoke_one(gateway, each) for each in names])


def _smoke_one(gateway: Gateway, name: str) -> int:
    model = describe(gateway, name)
    print(f"{name}: {model.kind}{model.details}")
    checks = list(checks_of(gateway, model))
    failed = _run(checks)
    print(f"{name}: {len(checks) - failed} of {len(checks)} pass\n", flush=True)
    return failed


def _run(checks: Sequence[Check]) -> int:
    width = max(len(check.name) for check in checks)
    failed = 0
    for check in checks:
        error = ""
        try:
            found = check.run()
        except Failed as failure:
            error = str(failure)
        except _BROKEN as broken:
            error = f"{type(broken).__name__}: {broken}"
        failed += bool(error)
        shown = error or one_line(found, _SHOWN)
        print(f"  {'FAIL' if error else 'pass'}  {check.protocol:<9}  {check.name:<{width}}  {shown}", flush=True)
    return failed
