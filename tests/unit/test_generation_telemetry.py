"""Each generation moves the metrics by what its user felt, once, whatever it ends with."""

import asyncio

import pytest

from millrace.errors import HopBrokenError, InvalidRequestError, OverloadedError
from millrace.payload.call import Origin
from services.transformer.generation.telemetry import GenerationTelemetry
from tests.support.measured import Measured

GAPS = {"gen_ai.request.model": "storyteller", "millrace.protocol": "grpc"}
TOLD = GAPS | {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "millrace"}
REST = (("x-envoy-original-path", "/v1/completions"),)


@pytest.fixture
def measured():
    return Measured()


@pytest.fixture
def telemetry(measured):
    return GenerationTelemetry(measured.meter)


def origin(metadata=()):
    return Origin("a.Service/Method", "id", metadata)


def answer(course, finish_reason="length"):
    """Four tokens in three chunks: after 0.5, 0.75 and 1.5 s."""
    course.found("storyteller")
    course.chunk(1, 0.5, 7, None)
    course.chunk(1, 0.75, 7, None)
    course.chunk(2, 1.5, 7, finish_reason)


def streams(measured):
    """How many streams ended, by model, protocol and outcome."""
    return {tuple(sorted(dict(key).items())): point.value for key, point in measured.points("millrace.streams").items()}


def only(model, protocol, outcome):
    key = (("gen_ai.request.model", model), ("millrace.outcome", outcome), ("millrace.protocol", protocol))
    return {key: 1}


def test_a_whole_answer(telemetry, measured):
    with telemetry.generation(origin(), False, None) as course:
        answer(course)
    assert measured.sum("gen_ai.server.time_to_first_token", TOLD) == 0.5
    assert (
        measured.count("millrace.inter_token_latency", GAPS),
        measured.sum("millrace.inter_token_latency", GAPS),
    ) == (
        2,
        0.25 + 0.75 / 2,
    )
    assert measured.sum("gen_ai.server.time_per_output_token", TOLD) == pytest.approx(1.0 / 3)
    assert measured.sum("gen_ai.client.token.usage", TOLD | {"gen_ai.token.type": "input"}) == 7
    assert measured.sum("gen_ai.client.token.usage", TOLD | {"gen_ai.token.type": "output"}) == 4
    assert measured.count("gen_ai.server.request.duration", TOLD) == 1
    assert streams(measured) == only("storyteller", "grpc", "completed")


def test_chat_over_rest_is_told_from_text_over_grpc(telemetry, measured):
    with telemetry.generation(origin(REST), True, None) as course:
        answer(course)
    told = TOLD | {"gen_ai.operation.name": "chat", "millrace.protocol": "http"}
    assert measured.count("gen_ai.server.time_to_first_token", told) == 1
    assert streams(measured) == only("storyteller", "http", "completed")


@pytest.mark.parametrize(
    ("error", "outcome", "status"),
    [
        (InvalidRequestError("no"), "refused", "INVALID_ARGUMENT"),
        (OverloadedError("full"), "refused", "RESOURCE_EXHAUSTED"),
        (HopBrokenError("gone"), "failed", "UNAVAILABLE"),
        (ZeroDivisionError(), "failed", "INTERNAL"),
        (asyncio.CancelledError(), "cancelled", "CANCELLED"),
        (GeneratorExit(), "cancelled", "CANCELLED"),
    ],
)
def test_every_other_end(telemetry, measured, error, outcome, status):
    def fail():
        with telemetry.generation(origin(), False, None) as course:
            course.found("storyteller")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert streams(measured) == only("storyteller", "grpc", outcome)
    assert measured.count("gen_ai.server.request.duration", TOLD | {"error.type": status}) == 1
    assert "gen_ai.server.time_to_first_token" not in measured.names


def test_a_deadline_is_told_from_a_cancel(telemetry, measured):
    def fail():
        with telemetry.generation(origin(), False, 0.0) as course:
            course.found("storyteller")
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        fail()
    assert streams(measured) == only("storyteller", "grpc", "deadline_exceeded")


def test_who_leaves_after_the_last_chunk_has_a_whole_answer(telemetry, measured):
    def leave():
        with telemetry.generation(origin(), False, None) as course:
            answer(course)
            raise GeneratorExit

    with pytest.raises(GeneratorExit):
        leave()
    assert streams(measured) == only("storyteller", "grpc", "completed")


def test_a_model_that_nobody_serves_is_no_label(telemetry, measured):
    def fail():
        with telemetry.generation(origin(), False, None):
            raise InvalidRequestError("no such model")

    with pytest.raises(InvalidRequestError):
        fail()
    assert streams(measured) == only("_OTHER", "grpc", "refused")


def test_resumes_are_counted(telemetry, measured):
    with telemetry.generation(origin(), False, None) as course:
        course.found("storyteller")
        course.resumed()
        answer(course)
    assert measured.value("millrace.stream.resumed", {"gen_ai.request.model": "storyteller"}) == 1
