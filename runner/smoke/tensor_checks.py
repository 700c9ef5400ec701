"""The checks of a model that takes tensors: embeddings, classes, a user's own code, and a processor before one.

What a user's code takes is not known beyond datatypes and shapes: it is asked with ones, every open size
being 1, and it may refuse them by itself with INVALID_ARGUMENT.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np

from millrace.oip.tensors import BYTES, RawTensor, Tensor, add_input, decode_outputs, dtype_of, raw_inputs
from millrace_protos import inference_pb2 as pb
from millrace_protos import millrace_pb2
from runner.smoke.checks import Check, Run
from runner.smoke.facts import Kind, ModelFacts, TensorFacts
from runner.smoke.gateway import TIMEOUT_S, Failed, Gateway, collected, expect, refused_call

_TEXT = "the fox"
_OUTPUTS = {Kind.EMBEDDING: "embedding", Kind.CLASSIFICATION: "logits"}
_UNDECLARED = TensorFacts("x", "INT64", (1, 3))  # For a model that takes whatever comes.
_OPTIONAL = ("attention_mask", "token_type_ids")
_HEADER_LENGTH = "inference-header-content-length"


def of_tensors(gateway: Gateway, model: ModelFacts) -> Iterator[Check]:
    request = _request(model)
    stubs = {"gRPC": gateway.inference}
    if model.kind is not Kind.PROCESSOR:  # Which the predictor does not know.
        stubs["predictor"] = gateway.predictor
    for protocol, stub in stubs.items():
        if not model.decoupled:
            yield Check(protocol, "ModelInfer", partial(_own, model, partial(_infer, stub, model, request)))
        yield Check(protocol, "ModelStreamInfer", partial(_stream, stub, model, request))
        for what, wrong in _wrong(model):
            yield Check(
                protocol,
                f"ModelInfer, {what}",
                partial(_refused, stub, wrong),
            )
    if not model.decoupled:
        yield Check("V2 REST", "POST …/infer, binary", partial(_own, model, partial(_binary, gateway, model, request)))
        if all(tensor.datatype not in ("FP16", "BF16") for tensor in (*model.inputs, *model.outputs)):
            yield Check("V2 REST", "POST …/infer, JSON", partial(_own, model, partial(_json, gateway, model, request)))
    broken: dict[str, Any] = {"inputs": [{"name": "x", "datatype": "INT64", "shape": [2, 2], "data": [1]}]}
    yield Check(
        "V2 REST", "POST …/infer, wrong shape", partial(gateway.refused, f"/v2/models/{model.name}/infer", broken)
    )
    yield from _text_endpoints(gateway, model)


def _text_endpoints(gateway: Gateway, model: ModelFacts) -> Iterator[Check]:
    asked = millrace_pb2.GenerateRequest(model=model.name, prompt=_TEXT)
    yield Check("gRPC", "Generate is refused", lambda: refused_call(gateway.text.Generate(asked, timeout=TIMEOUT_S)))
    chat = {"model": model.name, "messages": [{"role": "user", "content": _TEXT}]}
    for path, body in (
        ("/v1/completions", {"model": model.name, "prompt": _TEXT}),
        ("/v1/chat/completions", chat),
        ("/millrace/v1/generate", {"model": model.name, "prompt": _TEXT}),
    ):
        yield Check("REST", f"POST {path} is refused", partial(gateway.refused, path, body))
    path, inputs = "/v1/embeddings", {"model": model.name, "input": [[1, 2, 3], [1]]}
    if model.kind is not Kind.EMBEDDING:
        yield Check("OpenAI", f"POST {path} is refused", partial(gateway.refused, path, inputs))
        return
    yield Check("OpenAI", f"POST {path}, ids", partial(_embeddings, gateway, inputs, 2))
    if model.embeds_text:
        text = {"model": model.name, "input": _TEXT, "encoding_format": "base64"}
        yield Check("OpenAI", f"POST {path}, text", partial(_embeddings, gateway, text, 1))


async def _own(model: ModelFacts, ask: Run) -> str:
    """What was answered; a user's own code may also refuse."""
    if model.kind not in (Kind.TENSORS, Kind.PROCESSOR):
        return await ask()
    try:
        return await ask()
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
            raise
        return f"the model's own refusal: {error.details()}"
    except Failed as failure:
        if "not 400" not in str(failure):
            raise
        return f"the model's own refusal: {failure}"


async def _infer(stub: Any, model: ModelFacts, request: pb.ModelInferRequest) -> str:
    return _told(model, await stub.ModelInfer(request, timeout=TIMEOUT_S))


async def _stream(stub: Any, model: ModelFacts, request: pb.ModelInferRequest) -> str:
    async def requests() -> AsyncIterator[pb.ModelInferRequest]:
        yield request

    stream = await collected(stub.ModelStreamInfer(requests(), timeout=TIMEOUT_S))
    expect(stream.pieces, "no response")
    errors = [message.error_message for message in stream.pieces if message.error_message]
    if errors:
        expect(model.kind in (Kind.TENSORS, Kind.PROCESSOR), errors[0])
        return f"the model's own refusal: {errors[0]}"
    last = stream.pieces[-1].infer_response
    expect(last.parameters["triton_final_response"].bool_param, "the last response is not marked")
    return f"{len(stream.pieces)} responses; {_told(model, stream.pieces[0].infer_response)}"


async def _refused(stub: Any, request: pb.ModelInferRequest) -> str:
    return await refused_call(stub.ModelInfer(request, timeout=TIMEOUT_S))


async def _binary(gateway: Gateway, model: ModelFacts, request: pb.ModelInferRequest) -> str:
    tensors = raw_inputs(request)
    described = [
        {**_described(name, tensor), "parameters": {"binary_data_size": len(tensor.data)}}
        for name, tensor in tensors.items()
    ]
    head = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
    body = head + b"".join(tensor.data for tensor in tensors.values())
    answer = await gateway.post(f"/v2/models/{model.name}/infer", body, {_HEADER_LENGTH: str(len(head))})
    length = int(answer.headers.get(_HEADER_LENGTH, len(answer.content)))
    outputs = json.loads(answer.content[:length])["outputs"]
    sizes = [output["parameters"]["binary_data_size"] for output in outputs if "parameters" in output]
    expect(len(answer.content) == length + sum(sizes), "the sizes do not add up")
    return f"{len(outputs)} outputs, {sum(sizes)} bytes"


async def _json(gateway: Gateway, model: ModelFacts, request: pb.ModelInferRequest) -> str:
    inputs = []
    for name, tensor in raw_inputs(request).items():
        array = _array(TensorFacts(name, tensor.datatype, tensor.shape))
        data = [item.decode() for item in array.ravel()] if tensor.datatype == BYTES else array.ravel().tolist()
        inputs.append({**_described(name, tensor), "data": data})
    answer = (await gateway.post(f"/v2/models/{model.name}/infer", {"inputs": inputs})).json()
    return f"{len(answer['outputs'])} outputs"


async def _embeddings(gateway: Gateway, body: Any, count: int) -> str:
    answer = (await gateway.post("/v1/embeddings", body)).json()
    expect(len(answer["data"]) == count, f"{len(answer['data'])} vectors, {count} were asked for")
    return f"{count} vectors, {answer['usage']['prompt_tokens']} tokens"


def _told(model: ModelFacts, response: pb.ModelInferResponse) -> str:
    """The outputs; Failed where they are not those of the model's kind."""
    arrays = {name: tensor.array for name, tensor in decode_outputs(response).items()}
    wanted = _OUTPUTS.get(model.kind)
    if wanted is not None:
        expect(wanted in arrays, f"no output {wanted!r} among {list(arrays)}")
        expect(np.isfinite(arrays[wanted].astype(np.float64)).all(), f"{wanted} is not finite")
    return ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items()) or "no outputs"


def _wrong(model: ModelFacts) -> Iterator[tuple[str, pb.ModelInferRequest]]:
    short = _request(model)
    short.raw_input_contents[0] += b"\0"
    yield "a byte too many", short
    unknown = _request(model)
    unknown.inputs[0].datatype = "NO_SUCH_TYPE"
    yield "no such datatype", unknown
    if model.inputs:
        other = _request(model)
        other.inputs[0].name = "no-such-input"
        yield "no such input", other
    if model.kind in _OUTPUTS:
        outside = pb.ModelInferRequest(model_name=model.name)
        add_input(outside, Tensor("input_ids", "INT64", np.array([[2**40]], dtype=np.int64)))
        yield "token id outside", outside


def _request(model: ModelFacts) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model.name, id="smoke")
    for tensor in model.inputs or (_UNDECLARED,):
        if tensor.name not in _OPTIONAL:
            add_input(request, Tensor(tensor.name, tensor.datatype, _array(tensor)))
    return request


def _array(tensor: TensorFacts) -> Any:
    shape = tuple(max(size, 1) if size != 0 else 0 for size in tensor.shape)
    if tensor.datatype == BYTES:
        array = np.empty(shape, dtype=object)
        array.fill(_TEXT.encode())
        return array
    return np.ones(shape, dtype=dtype_of(tensor.name, tensor.datatype))


def _described(name: str, tensor: RawTensor) -> dict[str, Any]:
    return {"name": name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
