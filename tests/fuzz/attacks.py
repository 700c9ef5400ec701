"""Requests that are expensive to refuse: each attack sends one kind of them, over and over, for some seconds.

    python -m tests.fuzz.attacks NAME GATEWAY SECONDS

runs one attack in its own process, at the lowest priority: the attacker's own work must not count as the
stack's. It prints one JSON object: the number of requests that it began, their outcomes, and the errors of honest calls
that shared its connection. Requests are bounded in number and in time. The answers to an attacker do not matter here,
but those to its neighbours: neighbours.py. Attacks with frames and bytes are in floods.py.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import numpy as np

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from headrace_protos import inference_pb2 as pb
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from headrace_transformer.processes.body_worker import lower_priority
from tests.fuzz import floods, shares
from tests.fuzz.target import ATTACKS, MEGABYTE, Report, Target, attack
from tests.system.calls import channel, text_request

__all__ = ["ATTACKS", "UNREADABLE", "floods", "shares"]

UNREADABLE = "unreadable"  # A model in the repository with a malformed tokenizer.
_LARGEST = 57 * MEGABYTE  # Just below what the gateway passes on.
_IDENTITY = "identity"
_TEXT_MODEL = "storyteller"
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_GENERATE = "/headrace.v1.TextGeneration/Generate"
_FRAME_HEAD = 5


# ---------------------------------------------------------------------------------------------- headers


@attack
async def malformed_timeouts(target: Target) -> None:
    """`grpc-timeout` that gRPC cannot read, on connections to the services, which all callers share."""
    values = ["abc", "-1S", "12345678901S", "", "1", "S", "1 S", "99999999H9", "0x1S", "१S".encode().decode("latin-1")]
    message = text_request(_TEXT_MODEL, "Once", max_tokens=1).SerializeToString()
    turn = iter(range(sys.maxsize))

    async def call() -> str:
        number = next(turn)
        value, host = values[number % len(values)], "predictor" if number % 3 == 0 else "gateway"
        headers = {"grpc_timeout": value} if number % 2 else {"x_timeout_ms": value, "x_first_token_timeout_ms": value}
        return await target.grpc_post(_INFER, message, host=host, **headers)

    await target.repeat(8, call)


@attack
async def large_headers(target: Target) -> None:
    """16 to 60 KB of headers, some of them binary ones that are not base64."""
    sizes = iter(range(sys.maxsize))

    async def call() -> str:
        size = 16_000 + next(sizes) * 977 % 44_000
        return await target.grpc_post(_GENERATE, b"", x_padding="a" * size, x_foo_bin="***not base64***")

    await target.repeat(8, call)


# ---------------------------------------------------------------------------------- the event loop


@attack
async def long_lists_for_many_choices(target: Target) -> None:
    """8 MB of stop strings, stop ids and template variables for 4 prompts of 16 choices each."""
    body = {
        "model": _TEXT_MODEL,
        "prompt": ["Once"] * 4,
        "n": 16,
        "max_tokens": 1,
        "stop": ["x" * 1000] * 1500,
        "stop_token_ids": list(range(300_000)),
        "chat_template_kwargs": {"a": "y" * 4_000_000},
    }
    encoded = json.dumps(body).encode()
    await target.repeat(8, lambda: target.post("/v1/completions", encoded))


@attack
async def long_chats(target: Target) -> None:
    """Chats of thousands of short messages, and of few long ones."""
    many = [{"role": "user", "content": "a"}] * 150_000
    long = [{"role": "user", "content": "word " * 700_000}]
    bodies = [json.dumps({"model": _TEXT_MODEL, "messages": messages}).encode() for messages in (many, long)]
    turn = iter(range(sys.maxsize))
    await target.repeat(8, lambda: target.post("/v1/chat/completions", bodies[next(turn) % 2]))


@attack
async def huge_json_documents(target: Target) -> None:
    """57 MB of JSON to each endpoint for small documents."""
    entries = b'"k":"v",' * (_LARGEST // 8)
    body = b"{" + entries + b'"a":1}'
    nested = b'{"parameters":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}"
    numbers = (
        b'{"inputs":[{"name":"x","datatype":"INT64","shape":[1],"data":[' + b"1," * (_LARGEST // 2 - 100) + b"1]}]}"
    )
    requests = [
        ("/v2/repository/index", body),
        (f"/v2/repository/models/{_TEXT_MODEL}/load", body),
        ("/v2/trace/setting", body),
        ("/v2/logging", body),
        (f"/v2/models/{_IDENTITY}/infer", numbers),
        (f"/v2/models/{_TEXT_MODEL}/generate", body),
        ("/v1/completions", body),
        ("/v1/embeddings", numbers),
        ("/headrace/v1/generate", body),
        (f"/v2/models/{_TEXT_MODEL}/infer", nested),
    ]
    turn = iter(range(sys.maxsize))

    async def call() -> str:
        path, document = requests[next(turn) % len(requests)]
        return await target.post(path, document)

    await target.repeat(3, call)


@attack
async def stop_strings_that_almost_match(target: Target) -> None:
    """Stop strings that equal the answer, always the same one, up to their last character."""
    fields = {"model": _TEXT_MODEL, "prompt": "Once", "temperature": 0, "ignore_eos": True}
    request = headrace_pb2.GenerateRequest(**fields, max_tokens=min(200, int(20 * target.left_s)))
    opened = channel(target.gateway)
    stub = headrace_pb2_grpc.TextGenerationStub(opened)
    text = "".join([response.text async for response in stub.Generate(request)])[:1000]
    request.stop.extend(text + chr(ord("a") + number) for number in range(16))

    async def call() -> str:
        stream = stub.Generate(request, timeout=max(1.0, target.left_s))
        async for _ in stream:
            pass
        return (await stream.code()).name

    await target.repeat(8, call)
    await opened.close()


# ------------------------------------------------------------------------------------ message bombs


@attack
async def empty_strings(target: Target) -> None:
    """A BYTES tensor of 14 million empty strings, for a text model and for one that is relayed."""
    requests = []
    for model, name in ((_TEXT_MODEL, "text_input"), (_IDENTITY, "x")):
        request = pb.ModelInferRequest(model_name=model)
        request.inputs.add(name=name, datatype="BYTES", shape=[_LARGEST // 4])
        request.raw_input_contents.append(bytes(_LARGEST))
        requests.append(request.SerializeToString())
    await _send_large(target, [(_INFER, request, "") for request in requests] + [(_INFER, requests[1], "predictor")])


@attack
async def empty_fields(target: Target) -> None:
    """Messages of 29 million empty fields, to the transformer, the predictor and the logger."""
    field_7, field_5, field_8 = b"\x3a\x00", b"\x2a\x00", b"\x42\x00"
    count = _LARGEST // 2
    generate = headrace_pb2.GenerateRequest.DESCRIPTOR.fields_by_name["stop"].number
    typed = pb.ModelInferRequest(model_name=_IDENTITY)
    contents = field_8 * (count - 100)
    typed.inputs.add(name="x", datatype="BYTES", shape=[count - 100])
    inputs = typed.inputs[0].SerializeToString() + b"\x2a" + _varint(len(contents)) + contents
    typed_bytes = b"\x0a\x08identity" + b"\x2a" + _varint(len(inputs)) + inputs
    await _send_large(
        target,
        [
            (_INFER, field_7 * count, ""),
            (_INFER, field_5 * count, ""),
            (_INFER, field_7 * count, "predictor"),
            (_INFER, typed_bytes, "predictor"),
            (_GENERATE, bytes([generate << 3 | 2, 0]) * count, ""),
            ("/inference.GRPCInferenceService/TraceSetting", b"\x0a\x00" * count, ""),
            ("/headrace.v1.PayloadLog/Query", b"\x0a\x00" * count, ""),
        ],
    )


@attack
async def packed_numbers(target: Target) -> None:
    """57 MB of packed one-byte numbers, which become eight times as large when they are parsed."""
    packed = bytes([1]) * (_LARGEST - 200)
    contents = b"\x1a" + _varint(len(packed)) + packed
    tensor = b"\x0a\x01x\x12\x05INT64\x1a\x01\x01\x2a" + _varint(len(contents)) + contents
    request = b"\x0a\x08identity" + b"\x2a" + _varint(len(tensor)) + tensor
    await _send_large(target, [(_INFER, request, ""), (_INFER, request, "predictor")])


async def _send_large(target: Target, requests: list[tuple[str, bytes, str]]) -> None:
    turn = iter(range(sys.maxsize))
    plain, predictor = (channel(target.gateway, name, max_bytes=64 * MEGABYTE) for name in (None, "predictor"))

    async def call() -> str:
        path, message, authority = requests[next(turn) % len(requests)]
        opened = predictor if authority else plain
        stream = opened.unary_stream(path)(message, timeout=max(1.0, target.left_s))
        async for _ in stream:
            pass
        return (await stream.code()).name

    await target.repeat(3, call)
    await asyncio.gather(plain.close(), predictor.close())


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


# ----------------------------------------------------------------------- idle and unfinished calls


@attack
async def idle_streams(target: Target) -> None:
    """2,100 idle `ModelStreamInfer` calls on three connections."""
    await _hold_open(target, 700, lambda opened: GRPCInferenceServiceStub(opened).ModelStreamInfer(_silence(target)))


@attack
async def idle_tails(target: Target) -> None:
    """Tails of the payload log without matches, more than the limit."""
    request = headrace_pb2.TailPayloadsRequest(model="none")
    await _hold_open(target, 100, lambda opened: headrace_pb2_grpc.PayloadLogStub(opened).Tail(request))


@attack
async def idle_watches(target: Target) -> None:
    """2,100 watches of health."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    request = health_pb2.HealthCheckRequest()
    await _hold_open(target, 700, lambda opened: health_pb2_grpc.HealthStub(opened).Watch(request))


async def _silence(target: Target) -> AsyncIterator[Any]:
    await asyncio.sleep(target.left_s)
    for nothing in ():
        yield nothing


async def _hold_open(target: Target, each: int, begin: Callable[[grpc.aio.Channel], Any]) -> None:
    channels = [channel(target.gateway) for _ in range(3)]
    calls = [begin(opened) for opened in channels for _ in range(each)]
    target.report.begun = len(calls)

    async def read(call: Any) -> None:
        try:
            async for _ in call:
                pass
            target.report.answers[(await call.code()).name] += 1
        except grpc.aio.AioRpcError as error:
            target.report.answers[error.code().name] += 1

    readers = [asyncio.create_task(read(call)) for call in calls]
    await asyncio.sleep(target.left_s)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    for opened in channels:
        await opened.close()


@attack
async def unfinished_bodies(target: Target) -> None:
    """24 REST bodies of 57 MB whose last byte is never sent."""
    body = b'{"model":"' + b"a" * (_LARGEST - 20)
    await _hold_unfinished(target, lambda: target.post("/v1/completions", body, declared=_LARGEST))


@attack
async def unfinished_messages(target: Target) -> None:
    """24 gRPC messages of 57 MB whose last byte is never sent."""
    body = b"\0" + _LARGEST.to_bytes(4, "big") + bytes(_LARGEST - 1)
    declared = _LARGEST + _FRAME_HEAD
    await _hold_unfinished(
        target, lambda: target.post(_INFER, body, "application/grpc", declared=declared, te="trailers")
    )


async def _hold_unfinished(target: Target, call: Callable[[], Awaitable[str]]) -> None:
    async def hold() -> None:
        target.report.begun += 1
        with suppress(OSError):
            target.report.answers[await call()] += 1

    with suppress(TimeoutError):
        async with asyncio.timeout(target.left_s):
            await asyncio.gather(*(hold() for _ in range(24)))


@attack
async def readers_that_do_not_read(target: Target) -> None:
    """14 readers of the whole payload log, each of which reads its first kilobyte."""
    host, _, port = target.gateway.rpartition(":")

    async def call() -> str:
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        try:
            writer.write(b"GET /headrace/v1/payloads?page_size=1000 HTTP/1.1\r\nhost: gateway\r\n\r\n")
            await reader.read(1024)
            await asyncio.sleep(target.left_s)
            return "held"
        finally:
            writer.close()

    await target.repeat(14, call)


# --------------------------------------------------------------------------------- records, connections


@attack
async def refused_requests_of_megabytes(target: Target) -> None:
    """Requests that are refused and would fill the payload log: 4 MB each."""
    body = json.dumps({"model": _TEXT_MODEL, "prompt": "word " * 800_000, "max_tokens": 1}).encode()
    await target.repeat(8, lambda: target.post("/v1/completions", body))


@attack
async def quick_cancels(target: Target) -> None:
    """Calls cancelled as soon as they are sent, on the connection of honest streams."""
    await _disturb(target, deadline_s=None)


@attack
async def short_deadlines(target: Target) -> None:
    """Calls whose deadline passes at once, on the connection of honest streams."""
    await _disturb(target, deadline_s=0.002)


async def _disturb(target: Target, deadline_s: float | None) -> None:
    """Ends some 300 calls a second; 4 honest streams on the same connection must not see it."""
    opened = channel(target.gateway)
    stub = headrace_pb2_grpc.TextGenerationStub(opened)
    request = headrace_pb2.GenerateRequest(model=_TEXT_MODEL, prompt="Once", max_tokens=24, ignore_eos=True)

    async def honest() -> None:
        while target.left_s:
            try:
                last = [response async for response in stub.Generate(request, timeout=60)][-1]
                if last.usage.completion_tokens != request.max_tokens:
                    target.report.honest_errors.append(f"{last.usage.completion_tokens} tokens")
            except grpc.aio.AioRpcError as error:
                target.report.honest_errors.append(f"{error.code().name}: {error.details()}")

    async def call() -> str:
        stream = stub.Generate(request, timeout=deadline_s)
        try:
            await asyncio.wait_for(stream.read(), 0.005)
            return "answered"
        except TimeoutError:
            return "left"
        finally:
            stream.cancel()
            await asyncio.sleep(0.05)

    honest_calls = [asyncio.create_task(honest()) for _ in range(4)]
    await target.repeat(16, call)
    await asyncio.gather(*honest_calls)
    await opened.close()


@attack
async def unreadable_models(target: Target) -> None:
    """Loads of a model with an unreadable tokenizer and of a missing one, beside unloads of the same."""
    requests = iter(range(sys.maxsize))

    async def call() -> str:
        number = next(requests)
        verb, model = "unload" if number % 3 == 0 else "load", UNREADABLE if number % 2 else "none"
        return await target.post(f"/v2/repository/models/{model}/{verb}", b"{}")

    await target.repeat(1, call)  # A load of a loaded model would show in readiness.
    await target.post(f"/v2/repository/models/{UNREADABLE}/unload", b"{}")  # A loaded model keeps memory.


@attack
async def large_good_tensors(target: Target) -> None:
    """Valid tensors of 48 MB, more at a time than fit."""
    request = pb.ModelInferRequest(model_name=_IDENTITY)
    values = np.zeros(12 * MEGABYTE, np.float32)
    request.inputs.add(name="x", datatype="FP32", shape=[values.size])
    request.raw_input_contents.append(values.tobytes())
    await _send_large(target, [(_INFER, request.SerializeToString(), "")])


async def _main(name: str, gateway: str, seconds: float) -> None:
    lower_priority(19)
    report = Report()
    await ATTACKS[name](Target(gateway, time.monotonic() + seconds, report))
    figures = {"begun": report.begun, "answers": dict(report.answers), "honest_errors": report.honest_errors[:20]}
    print(json.dumps(figures))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
