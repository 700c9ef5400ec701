"""Requests that are expensive to refuse: each attack sends one kind of them, over and over, for some seconds.

    python -m tests.fuzz.attacks NAME GATEWAY SECONDS

runs one attack in its own process, at the lowest priority: the attacker's own work must not count as the
stack's. It prints one JSON object: the number of requests that it began, their outcomes, and the errors of honest calls
that shared its connection. Requests are bounded in number and in time. The answers to an attacker do not matter here,
but those to its neighbours: neighbours.py. Attacks with frames and bytes are in floods.py.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
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

__all__ = ["ATTACKS", "floods", "shares"]

_LARGEST = 57 * MEGABYTE  # Just below what the gateway passes on.
_IDENTITY = "identity"
_TEXT_MODEL = "storyteller"
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_GENERATE = "/headrace.v1.TextGeneration/Generate"


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


# ----------------------------------------------------------------------- idle and unfinished calls


@attack
async def idle_streams(target: Target) -> None:
    """2,100 idle `ModelStreamInfer` calls on three connections."""

    async def silence() -> AsyncIterator[Any]:
        await asyncio.sleep(target.left_s)
        for nothing in ():
            yield nothing

    async def read(call: Any) -> None:
        try:
            async for _ in call:
                pass
            target.report.answers[(await call.code()).name] += 1
        except grpc.aio.AioRpcError as error:
            target.report.answers[error.code().name] += 1

    channels = [channel(target.gateway) for _ in range(3)]
    calls = [GRPCInferenceServiceStub(each).ModelStreamInfer(silence()) for each in channels for _ in range(700)]
    target.report.begun = len(calls)
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

    async def hold() -> None:
        target.report.begun += 1
        with suppress(OSError):
            target.report.answers[await target.post("/v1/completions", body, declared=_LARGEST)] += 1

    with suppress(TimeoutError):
        async with asyncio.timeout(target.left_s):
            await asyncio.gather(*(hold() for _ in range(24)))


# --------------------------------------------------------------------------------- records, connections


@attack
async def quick_cancels(target: Target) -> None:
    """Some 300 calls a second, cancelled at once, on the connection of 4 honest streams, which must not see it."""
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
        stream = stub.Generate(request)
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
async def large_good_tensors(target: Target) -> None:
    """Valid tensors of 48 MB, more at a time than fit."""
    request = pb.ModelInferRequest(model_name=_IDENTITY)
    values = np.zeros(12 * MEGABYTE, np.float32)
    request.inputs.add(name="x", datatype="FP32", shape=[values.size])
    request.raw_input_contents.append(values.tobytes())
    message = request.SerializeToString()
    opened = channel(target.gateway, max_bytes=64 * MEGABYTE)

    async def call() -> str:
        answer = opened.unary_unary(_INFER)(message, timeout=max(1.0, target.left_s))
        return (await answer.code()).name

    await target.repeat(3, call)
    await opened.close()


async def _main(name: str, gateway: str, seconds: float) -> None:
    lower_priority(19)
    report = Report()
    await ATTACKS[name](Target(gateway, time.monotonic() + seconds, report))
    figures = {"begun": report.begun, "answers": dict(report.answers), "honest_errors": report.honest_errors[:20]}
    print(json.dumps(figures))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
