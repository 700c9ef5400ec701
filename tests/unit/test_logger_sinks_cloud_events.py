"""A record's CloudEvents: KServe's types and extensions, one event for each part, readable by every receiver."""

import math
from urllib.parse import unquote

import orjson
import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from cloudevents.v1.http import from_http as from_http_1

from headrace_logger.settings import LoggerSettings
from headrace_logger.sinks.cloud_events import REQUEST_TYPE, RESPONSE_TYPE, CloudEventsSink
from headrace_protos.headrace_pb2 import PayloadRecord

ID = "01980000-0000-7000-8000-000000000001"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
async def sink():
    sink = CloudEventsSink(
        "http://127.0.0.1:9/", LoggerSettings.model_construct(sink_source="/log/", sink_namespace="ns")
    )
    yield sink
    await sink.close()


def record(**fields):
    record = PayloadRecord(record_id=ID, **({"status": "OK"} | fields))
    record.time.FromJsonString("2026-01-31T12:00:00.250Z")
    return record


def parsed(events):
    return [from_http_event(HTTPMessage(dict(event.headers), event.body)) for event in events]


async def test_a_record_is_a_request_and_a_response_of_kserves_types_with_one_id(sink):
    full = record(
        request_id="req-1",
        model="storyteller",
        protocol="headrace.v1.TextGeneration/Generate",
        prompt="où?",
        parameters='{"max_tokens": 2}',
        text="là",
        finish_reason="stop",
        ttft_ms=3.5,
        duration_ms=1500,
        metadata={"x-team": "a"},
        trace_id=TRACE,
        span_id=SPAN,
    )
    full.chunks.add(offset_ms=3.5, text="là", token_ids=[7, 8], logprobs=[-0.5, -math.inf])
    full.usage.completion_tokens = 2
    full.inputs.add(name="x", datatype="FP32", shape=[1, 2], digest="sha256:00", data=b"\x00\xff")
    request, response = parsed(sink.events(full))
    assert (request.get_type(), response.get_type()) == (REQUEST_TYPE, RESPONSE_TYPE)
    assert request.get_id() == response.get_id() == ID
    assert (request.get_source(), response.get_source()) == ("/log/request", "/log/response")
    for event in (request, response):
        assert event.get_specversion() == "1.0"
        assert event.get_subject() == "req-1"
        assert event.get_datacontenttype() == "application/json"
        extensions = {name: event.get_extension(name) for name in ("inferenceservicename", "namespace", "component")}
        assert extensions == {"inferenceservicename": "storyteller", "namespace": "ns", "component": "transformer"}
        assert event.get_extension("endpoint") == "default"
        assert event.get_extension("traceparent") == f"00-{TRACE}-{SPAN}-01"
        assert event.get_data()["metadata"] == {"x-team": "a"}
    assert request.get_time().isoformat() == "2026-01-31T12:00:00.250000+00:00"
    assert response.get_time().isoformat() == "2026-01-31T12:00:01.750000+00:00"
    request_data = request.get_data()
    assert (request_data["prompt"], request_data["parameters"], request_data["time"]) == (
        "où?",
        {"max_tokens": 2},
        "2026-01-31T12:00:00.250000Z",
    )
    assert request_data["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [1, 2], "digest": "sha256:00", "size": None, "data": "AP8="}
    ]
    answered = response.get_data()
    # JSON has no infinity.
    assert answered["chunks"] == [
        {"offset_ms": 3.5, "text": "là", "token_ids": [7, 8], "logprobs": [-0.5, None], "outputs": []}
    ]
    assert (answered["text"], answered["finish_reason"], answered["completion_tokens"]) == ("là", "stop", 2)
    assert not {"text", "chunks", "status"} & request_data.keys()
    assert not {"prompt", "parameters", "inputs"} & answered.keys()


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"prompt": "p", "text": "t"}, [REQUEST_TYPE, RESPONSE_TYPE]),
        ({"prompt": "p"}, [REQUEST_TYPE]),
        ({"text": "t"}, [RESPONSE_TYPE]),
        ({}, [RESPONSE_TYPE]),
        ({"prompt": "p", "status": "CANCELLED"}, [REQUEST_TYPE, RESPONSE_TYPE]),
    ],
    ids=["all", "request", "response", "metadata", "failed"],
)
async def test_a_part_that_was_not_recorded_is_no_event(sink, fields, kinds):
    assert [event.get_type() for event in parsed(sink.events(record(**fields)))] == kinds


async def test_a_record_has_the_same_events_every_time(sink):
    one = record(prompt="p", text="t")
    assert list(sink.events(one)) == list(sink.events(one))


async def test_headers_are_escaped_as_the_http_binding_requires_and_no_further(sink):
    (event,) = sink.events(record(text="t", model='a "b" 100% é😀', request_id="https://x/y?z=1:2"))
    assert event.headers["ce-inferenceservicename"] == "a%20%22b%22%20100%25%20%C3%A9%F0%9F%98%80"
    assert event.headers["ce-subject"] == "https://x/y?z=1:2"
    assert event.headers["ce-time"] == "2026-01-31T12:00:00.250000Z"


async def test_values_of_the_caller_cannot_make_a_header_long(sink):
    (event,) = sink.events(record(text="t", model="m" * 10_000, request_id="r" * 10_000))
    assert len(unquote(event.headers["ce-inferenceservicename"])) == 256
    assert "ce-subject" not in event.headers
    assert orjson.loads(event.body)["request_id"] == "r" * 10_000


@pytest.mark.parametrize("parameters", ["{", "[" * 100_000, '{"a": ' * 900 + "1" + "}" * 900, '{"a": 1e999}', "NaN"])
async def test_parameters_of_any_kind_make_valid_json(sink, parameters):
    (event, *_) = sink.events(record(prompt="p", parameters=parameters))
    assert "parameters" in from_http_event(HTTPMessage(dict(event.headers), event.body)).get_data()


async def test_a_time_outside_the_calendar_is_left_out(sink):
    strange = record(text="t", duration_ms=math.nan)
    strange.time.seconds = 2**62
    (event,) = sink.events(strange)
    assert "ce-time" not in event.headers
    assert orjson.loads(event.body)["time"] is None


async def test_the_name_of_a_sink_holds_no_password():
    sink = CloudEventsSink("http://u:secret@h:1/p?q=1", LoggerSettings.model_construct())
    assert sink.name == "http://h:1/p?q=1"
    await sink.close()


async def test_receivers_that_unescape_nothing_read_the_attributes_as_well(sink):
    """The SDK's first generation, which KServe's own receivers use."""
    (event,) = sink.events(record(text="t", model="storyteller", request_id="a/b:c"))
    read = from_http_1(dict(event.headers), event.body)
    assert (read["source"], read["subject"], read["time"]) == ("/log/response", "a/b:c", "2026-01-31T12:00:00.250000Z")
    assert read["inferenceservicename"] == "storyteller"
    assert read.data["text"] == "t"
