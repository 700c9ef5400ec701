"""The checks of a model that generates text: every front end, whole and streamed, and its records."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import numpy as np

from millrace.oip.parameters import set_parameters
from millrace.oip.tensors import Tensor, add_input, bytes_tensor, decode_outputs
from millrace_protos import inference_pb2 as pb
from millrace_protos import millrace_pb2
from runner.smoke.checks import Check
from runner.smoke.facts import ModelFacts
from runner.smoke.gateway import TIMEOUT_S, Failed, Gateway, collected, expect, refused_call

_PROMPT = "Once upon a time"
_MESSAGES = [{"role": "user", "content": "Tell me a story."}]
_TOKENS = 16
_SAMPLING: dict[str, Any] = {"max_tokens": _TOKENS, "ignore_eos": True}
_RECORDED_WITHIN_S = 10.0
_WEB = {"content-type": "application/grpc-web+proto"}


def of_text(gateway: Gateway, model: ModelFacts) -> Iterator[Check]:
    yield from _by_grpc(gateway, model)
    yield from _by_openai(gateway, model)
    yield from _by_v2(gateway, model)
    yield from _by_millrace(gateway, model)


def _by_grpc(gateway: Gateway, model: ModelFacts) -> Iterator[Check]:
    name = model.name

    async def generate() -> str:
        stream = await collected(gateway.text.Generate(_request(name), timeout=TIMEOUT_S))
        _check_end(stream.pieces[-1])
        return stream.told(any(piece.text for piece in stream.pieces))

    async def whole() -> str:
        answer = await gateway.inference.ModelInfer(_text_request(name), timeout=TIMEOUT_S)
        return _text(decode_outputs(answer)["text_output"].array[0])

    async def streamed() -> str:
        async def requests() -> AsyncIterator[pb.ModelInferRequest]:
            yield _text_request(name)

        stream = await collected(gateway.inference.ModelStreamInfer(requests(), timeout=TIMEOUT_S))
        errors = [message.error_message for message in stream.pieces if message.error_message]
        expect(not errors, f"{errors}")
        last = stream.pieces[-1].infer_response.parameters["triton_final_response"]
        expect(last.bool_param, "the last response is not marked")
        texts = [decode_outputs(message.infer_response).get("text_output") for message in stream.pieces]
        return stream.told(any(text.array[0] for text in texts if text is not None))

    async def ids() -> str:
        request = pb.ModelInferRequest(model_name=name)
        add_input(request, Tensor("input_ids", "INT64", np.array([1, 2, 3], dtype=np.int64)))
        set_parameters(request.parameters, _SAMPLING)
        answer = await gateway.predictor.ModelInfer(request, timeout=TIMEOUT_S)
        made = decode_outputs(answer)["output_ids"].array
        expect(len(made) == _TOKENS, f"{len(made)} ids, {_TOKENS} were asked for")
        return f"{len(made)} ids"

    async def outside() -> str:
        request = pb.ModelInferRequest(model_name=name)
        add_input(request, Tensor("input_ids", "INT64", np.array([2**40], dtype=np.int64)))
        return await refused_call(gateway.predictor.ModelInfer(request, timeout=TIMEOUT_S))

    yield Check("gRPC", "Generate", generate)
    yield Check("gRPC", "ModelInfer", whole)
    yield Check("gRPC", "ModelStreamInfer", streamed)
    yield Check("predictor", "ModelInfer", ids)
    yield Check("predictor", "ModelInfer of an id outside", outside)
    for field, value in (("temperature", -1.0), ("prompt", ""), ("max_tokens", 2**31)):
        wrong = _request(name)
        setattr(wrong, field, value)
        yield Check("gRPC", f"Generate, {field}={value!r}", partial(_refused, gateway, wrong))


def _by_openai(gateway: Gateway, model: ModelFacts) -> Iterator[Check]:
    prompt = {"model": model.name, "prompt": _PROMPT, **_SAMPLING}
    chat = {"model": model.name, "messages": _MESSAGES, **_SAMPLING}

    async def whole(path: str, body: dict[str, Any]) -> str:
        answer = (await gateway.post(path, body)).json()
        choice = answer["choices"][0]
        expect(choice["finish_reason"] == "length", f"it ended by {choice['finish_reason']!r}")
        expect(answer["usage"]["completion_tokens"] == _TOKENS, f"usage is {answer['usage']}")
        return _text(choice["message"]["content"] if "message" in choice else choice["text"])

    async def streamed(path: str, body: dict[str, Any]) -> str:
        stream = await gateway.streamed(path, {**body, "stream": True})
        expect(stream.pieces[-1] == "data: [DONE]", f"the last line is {stream.pieces[-1]!r}")
        return stream.told(_check_events(stream.pieces[:-1]))

    async def listed() -> str:
        answer = await gateway.get(f"/v1/models/{model.name}")
        expect(answer.json()["id"] == model.name, answer.text)
        return answer.json()["object"]  # type: ignore[no-any-return]

    async def tokenized() -> str:
        ids = (await gateway.post("/tokenize", {"model": model.name, "prompt": _PROMPT})).json()["tokens"]
        text = (await gateway.post("/detokenize", {"model": model.name, "tokens": ids})).json()["prompt"]
        expect(_PROMPT in text, f"the ids are {text!r}")
        info = (await gateway.get(f"/tokenizer_info?model={model.name}")).json()
        expect("eos_token" in info, f"it says {info}")
        return f"{len(ids)} ids"

    yield Check("OpenAI", "GET /v1/models/{model}", listed)
    yield Check("vLLM", "/tokenize, /detokenize, /tokenizer_info", tokenized)
    for path in ("/v1/completions", "/openai/v1/completions"):
        yield Check("OpenAI", f"POST {path}", partial(whole, path, prompt))
    yield Check("OpenAI", "POST /v1/completions, streamed", partial(streamed, "/v1/completions", prompt))
    path = "/v1/chat/completions"
    if model.has_chat_template:
        yield Check("OpenAI", f"POST {path}", partial(whole, path, chat))
        yield Check("OpenAI", f"POST {path}, streamed", partial(streamed, path, chat))
    else:
        yield Check("OpenAI", f"POST {path} is refused", partial(gateway.refused, path, chat))
        wrong = {**chat, "stream": True}
        yield Check("OpenAI", f"POST {path}, streamed, is refused", partial(gateway.refused, path, wrong))
    inputs = {"model": model.name, "input": _PROMPT}
    yield Check("OpenAI", "POST /v1/embeddings is refused", partial(gateway.refused, "/v1/embeddings", inputs))
    hot = {**prompt, "temperature": "hot"}
    yield Check("OpenAI", "POST /v1/completions, temperature='hot'", partial(gateway.refused, "/v1/completions", hot))


def _by_v2(gateway: Gateway, model: ModelFacts) -> Iterator[Check]:
    own = f"/v2/models/{model.name}"
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [_PROMPT]}
    asked = {"text_input": _PROMPT, "parameters": _SAMPLING}

    async def in_json() -> str:
        answer = (await gateway.post(f"{own}/infer", {"inputs": [tensor], "parameters": _SAMPLING})).json()
        return _text({output["name"]: output for output in answer["outputs"]}["text_output"]["data"][0])

    async def in_binary() -> str:
        data = len(_PROMPT).to_bytes(4, "little") + _PROMPT.encode()
        described = {**tensor, "parameters": {"binary_data_size": len(data)}}
        del described["data"]
        head = json.dumps({"inputs": [described], "parameters": {**_SAMPLING, "binary_data_output": True}}).encode()
        answer = await gateway.post(f"{own}/infer", head + data, {"inference-header-content-length": str(len(head))})
        length = int(answer.headers["inference-header-content-length"])
        size = json.loads(answer.content[:length])["outputs"][0]["parameters"]["binary_data_size"]
        expect(len(answer.content) == length + size, "the sizes do not add up")
        return f"{size} bytes"

    async def generate() -> str:
        return _text((await gateway.post(f"{own}/generate", asked)).json()["text_output"])

    async def streamed() -> str:
        stream = await gateway.streamed(f"{own}/generate_stream", asked)
        return stream.told(_check_events(stream.pieces))

    yield Check("V2 REST", "POST …/infer, JSON", in_json)
    yield Check("V2 REST", "POST …/infer, binary", in_binary)
    yield Check("V2 REST", "POST …/generate", generate)
    yield Check("V2 REST", "POST …/generate_stream", streamed)
    wrong = {**asked, "parameters": {"max_tokens": 0}}
    for path in (f"{own}/generate", f"{own}/generate_stream"):
        yield Check("V2 REST", f"POST …{path[len(own) :]}, max_tokens=0", partial(gateway.refused, path, wrong))


def _by_millrace(gateway: Gateway, model: ModelFacts) -> Iterator[Check]:
    body = {"model": model.name, "prompt": _PROMPT, **_SAMPLING}

    async def lines() -> str:
        stream = await gateway.streamed("/millrace/v1/generate", body)
        expect(json.loads(stream.pieces[-1]).get("finish_reason") == "length", f"the last line is {stream.pieces[-1]}")
        return stream.told(any(json.loads(piece).get("text") for piece in stream.pieces))

    async def web() -> str:
        message = _request(model.name).SerializeToString()
        framed = b"\0" + len(message).to_bytes(4, "big") + message
        stream = await gateway.streamed_bytes("/millrace.v1.TextGeneration/Generate", framed, _WEB)
        expect(b"grpc-status:0" in b"".join(stream.pieces).replace(b" ", b""), "no grpc-status 0 in the trailers")
        return stream.told()

    async def recorded() -> str:
        request = _request(model.name)
        request.request_id = f"smoke-{uuid.uuid4()}"
        await collected(gateway.text.Generate(request, timeout=TIMEOUT_S))
        record = await _record(gateway, request.request_id)
        expect((record.model, record.prompt, record.status) == (model.name, _PROMPT, "OK"), f"it says {record}")
        answer = (await gateway.get(f"/millrace/v1/payloads/{record.record_id}")).json()
        expect(answer.get("text", "") == record.text, "Get by REST says another text")
        found = await gateway.get(f"/millrace/v1/payloads?request_id={request.request_id}")
        expect(json.loads(found.text)["record_id"] == record.record_id, "Query by REST finds another record")
        return record.record_id  # type: ignore[no-any-return]

    yield Check("REST", "POST /millrace/v1/generate", lines)
    yield Check(
        "REST",
        "POST /millrace/v1/generate, prompt=''",
        partial(gateway.refused, "/millrace/v1/generate", {**body, "prompt": ""}),
    )
    yield Check("gRPC-Web", "Generate", web)
    yield Check("log", "Query, Get, /millrace/v1/payloads", recorded)


async def _record(gateway: Gateway, request_id: str) -> Any:
    """The record of a request, which comes after its end."""
    asked = millrace_pb2.QueryPayloadsRequest(request_id=request_id)
    until = time.monotonic() + _RECORDED_WITHIN_S
    while time.monotonic() < until:
        async for record in gateway.log.Query(asked, timeout=TIMEOUT_S):
            return record
        await asyncio.sleep(0.1)
    raise Failed(f"no record within {_RECORDED_WITHIN_S:g} s")


async def _refused(gateway: Gateway, request: millrace_pb2.GenerateRequest) -> str:
    return await refused_call(gateway.text.Generate(request, timeout=TIMEOUT_S))


def _request(name: str) -> millrace_pb2.GenerateRequest:
    return millrace_pb2.GenerateRequest(model=name, prompt=_PROMPT, **_SAMPLING)


def _text_request(name: str) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=name, id="smoke")
    add_input(request, bytes_tensor("text_input", [_PROMPT.encode()]))
    set_parameters(request.parameters, _SAMPLING)
    return request


def _check_end(last: millrace_pb2.GenerateResponse) -> None:
    expect(last.finish_reason == "length", f"it ended by {last.finish_reason!r}")
    expect(last.usage.completion_tokens == _TOKENS, f"usage is {last.usage}")


def _check_events(lines: list[str]) -> bool:
    """Whether some event has text; Failed where one is none or an error."""
    has_text = False
    for line in lines:
        if line.startswith(":"):
            continue  # A comment: the stream was silent for long.
        expect(line.startswith("data: {"), f"no event: {line[:100]!r}")
        event = json.loads(line.removeprefix("data: "))
        expect("error" not in event, line)
        (choice, *_) = event.get("choices") or [{}]
        delta = choice.get("delta") or {}
        has_text = has_text or bool(event.get("text_output") or choice.get("text") or delta.get("content"))
    return has_text


def _text(value: Any) -> str:
    """What the table says of a text, which may be empty: a model may give nothing but special tokens."""
    expect(isinstance(value, str | bytes), f"the text is {type(value).__name__}")
    return repr(value.decode() if isinstance(value, bytes) else value)[:60]
