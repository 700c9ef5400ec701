"""Each generation moves the metrics by what its user experienced, exactly once, however it ends.

The outcomes of real calls are in tests/system/test_traces.py.
"""

import pytest

from headrace.deadline import NO_DEADLINE
from headrace.errors import HopBrokenError, OverloadedError
from headrace.rpc.server.call_context import CallContext
from headrace_transformer.generation.requests import TextRequest
from headrace_transformer.generation.resume_ids import ResumePoint
from headrace_transformer.generation.telemetry import GenerationTelemetry
from tests.support.measured import Measured
from tests.support.text_chunks import text_chunk

GAPS = {"gen_ai.request.model": "storyteller", "headrace.protocol": "grpc"}
ATTRIBUTES = GAPS | {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "headrace"}


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
    ) == (2, 0.25 + 0.75 / 2)
    assert measured.sum("gen_ai.server.time_per_output_token", ATTRIBUTES) == pytest.approx(1.0 / 3)
    assert measured.sum("gen_ai.client.token.usage", ATTRIBUTES | {"gen_ai.token.type": "input"}) == 7
    assert measured.sum("gen_ai.client.token.usage", ATTRIBUTES | {"gen_ai.token.type": "output"}) == 4
    assert measured.count("gen_ai.server.request.duration", ATTRIBUTES) == 1
    assert streams(measured) == only("storyteller", "grpc", "completed")


@pytest.mark.parametrize(
    ("error", "outcome", "status"),
    [
        (OverloadedError("full"), "refused", "RESOURCE_EXHAUSTED"),
        (HopBrokenError("gone"), "failed", "UNAVAILABLE"),
        (ZeroDivisionError(), "failed", "INTERNAL"),
    ],
)
async def test_an_error_counts_with_its_outcome_and_its_status(telemetry, measured, error, outcome, status):
    with pytest.raises(type(error)):
        await read(telemetry, failing(error), request())
    assert streams(measured) == only("storyteller", "grpc", outcome)
    assert measured.count("gen_ai.server.request.duration", ATTRIBUTES | {"error.type": status}) == 1
    assert "gen_ai.server.time_to_first_token" not in measured.names


async def test_a_caller_that_leaves_after_the_last_chunk_counts_as_answered(telemetry, measured):
    chunks = generation(telemetry, answer(), request())
    for _ in range(3):
        await anext(chunks)
    await chunks.aclose()
    assert streams(measured) == only("storyteller", "grpc", "completed")


async def test_reconnections_are_counted(telemetry, measured):
    await read(telemetry, answer(), request())
    await read(telemetry, answer(), request(resume=ResumePoint("f" * 32, 2, 0, "")))
    assert measured.value("headrace.stream.reconnected", {"gen_ai.request.model": "storyteller"}) == 1
