"""Each generation moves the metrics by what its user experienced, exactly once, however it ends."""

import asyncio

import pytest

from headrace.deadline import NO_DEADLINE, Deadline
from headrace.errors import HopBrokenError, InvalidRequestError, OverloadedError
from headrace.rpc.server.call_context import CallContext
from headrace_transformer.generation.requests import TextRequest
from headrace_transformer.generation.resume_ids import ResumePoint
from headrace_transformer.generation.telemetry import GenerationTelemetry
from tests.support.measured import Measured
from tests.support.text_chunks import text_chunk

GAPS = {"gen_ai.request.model": "storyteller", "headrace.protocol": "grpc"}
ATTRIBUTES = GAPS | {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "headrace"}
REST = (("x-envoy-original-path", "/v1/completions"),)


@pytest.fixture
def measured():
    return Measured()


@pytest.fixture
def telemetry(measured):
    return GenerationTelemetry(lambda model: model == "storyteller", measured.meter)


def request(metadata=(), deadline=NO_DEADLINE, model="storyteller", **fields):
    return TextRequest(CallContext("a.Service/Method", "id", metadata, deadline), model, **fields)


def chunk(tokens, elapsed_s, finish_reason=None, resumed=False):
    return text_chunk("", [1] * tokens, finish_reason, prompt_ids=range(7), elapsed_s=elapsed_s, resumed=resumed)


async def answer(finish_reason="length"):
    """Four tokens in three chunks: after 0.5, 0.75 and 1.5 s."""
    yield chunk(1, 0.5)
    yield chunk(1, 0.75)
    yield chunk(2, 1.5, finish_reason)


async def failing(error):
    raise error
    yield


async def generation(telemetry, chunks, message):
    """The chunks of a generation that is observed, as the pipeline passes them on."""
    with telemetry.observed(message) as observed:
        async for each in chunks:
            observed.chunk(each)
            yield each


async def read(telemetry, chunks, message):
    async for _ in generation(telemetry, chunks, message):
        pass


def streams(measured):
    """How many streams ended, by model, protocol and outcome."""
    return {tuple(sorted(dict(key).items())): point.value for key, point in measured.points("headrace.streams").items()}


def only(model, protocol, outcome):
    key = (("gen_ai.request.model", model), ("headrace.outcome", outcome), ("headrace.protocol", protocol))
    return {key: 1}


async def test_a_whole_answer(telemetry, measured):
    await read(telemetry, answer(), request())
    assert measured.sum("gen_ai.server.time_to_first_token", ATTRIBUTES) == 0.5
    assert (
        measured.count("headrace.inter_token_latency", GAPS),
        measured.sum("headrace.inter_token_latency", GAPS),
    ) == (
        2,
        0.25 + 0.75 / 2,
    )
    assert measured.sum("gen_ai.server.time_per_output_token", ATTRIBUTES) == pytest.approx(1.0 / 3)
    assert measured.sum("gen_ai.client.token.usage", ATTRIBUTES | {"gen_ai.token.type": "input"}) == 7
    assert measured.sum("gen_ai.client.token.usage", ATTRIBUTES | {"gen_ai.token.type": "output"}) == 4
    assert measured.count("gen_ai.server.request.duration", ATTRIBUTES) == 1
    assert streams(measured) == only("storyteller", "grpc", "completed")


async def test_chat_over_rest_and_text_over_grpc_have_different_attributes(telemetry, measured):
    await read(telemetry, answer(), request(REST, messages=[("user", "Hello")]))
    attributes = ATTRIBUTES | {"gen_ai.operation.name": "chat", "headrace.protocol": "http"}
    assert measured.count("gen_ai.server.time_to_first_token", attributes) == 1
    assert streams(measured) == only("storyteller", "http", "completed")


@pytest.mark.parametrize(
    ("error", "outcome", "status"),
    [
        (InvalidRequestError("no"), "refused", "INVALID_ARGUMENT"),
        (OverloadedError("full"), "refused", "RESOURCE_EXHAUSTED"),
        (HopBrokenError("gone"), "failed", "UNAVAILABLE"),
        (ZeroDivisionError(), "failed", "INTERNAL"),
        (asyncio.CancelledError(), "cancelled", "CANCELLED"),
    ],
)
async def test_an_error_counts_with_its_outcome_and_its_status(telemetry, measured, error, outcome, status):
    with pytest.raises(type(error)):
        await read(telemetry, failing(error), request())
    assert streams(measured) == only("storyteller", "grpc", outcome)
    assert measured.count("gen_ai.server.request.duration", ATTRIBUTES | {"error.type": status}) == 1
    assert "gen_ai.server.time_to_first_token" not in measured.names


async def test_a_caller_that_leaves_counts_as_a_cancel(telemetry, measured):
    chunks = generation(telemetry, answer(), request())
    await anext(chunks)
    await chunks.aclose()
    assert streams(measured) == only("storyteller", "grpc", "cancelled")


async def test_a_deadline_does_not_count_as_a_cancel(telemetry, measured):
    with pytest.raises(asyncio.CancelledError):
        await read(telemetry, failing(asyncio.CancelledError()), request(deadline=Deadline.after(0.0)))
    assert streams(measured) == only("storyteller", "grpc", "deadline_exceeded")


async def test_a_caller_that_leaves_after_the_last_chunk_counts_as_answered(telemetry, measured):
    chunks = generation(telemetry, answer(), request())
    for _ in range(3):
        await anext(chunks)
    await chunks.aclose()
    assert streams(measured) == only("storyteller", "grpc", "completed")


async def test_an_unknown_model_is_no_label(telemetry, measured):
    with pytest.raises(InvalidRequestError):
        await read(telemetry, failing(InvalidRequestError("no such model")), request(model="what"))
    assert streams(measured) == only("_OTHER", "grpc", "refused")


async def test_resumes_are_counted(telemetry, measured):
    async def resumed_answer():
        yield chunk(1, 0.5)
        yield chunk(1, 0.75, "length", resumed=True)

    await read(telemetry, resumed_answer(), request())
    assert measured.value("headrace.stream.resumed", {"gen_ai.request.model": "storyteller"}) == 1


async def test_reconnections_are_counted(telemetry, measured):
    await read(telemetry, answer(), request())
    await read(telemetry, answer(), request(resume=ResumePoint("f" * 32, 2, 0, "")))
    assert measured.value("headrace.stream.reconnected", {"gen_ai.request.model": "storyteller"}) == 1
