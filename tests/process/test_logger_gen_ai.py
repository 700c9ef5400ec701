"""Every generation arrives once as a span of the GenAI conventions, over gRPC and HTTP, and delays nobody."""

import asyncio
import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from headrace_logger.sinks.gen_ai import span_of
from headrace_protos import headrace_pb2_grpc
from headrace_protos.headrace_pb2 import AppendRequest, PayloadChunk, PayloadRecord, Usage
from tests.support.logger_process import LoggerProcess, free_port
from tests.waiting import until

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wer da?"}]


def generation(number, **fields):
    own = {
        "record_id": str(uuid.UUID(int=number)),
        "request_id": f"request-{number}",
        "model": "storyteller",
        "prompt": json.dumps(CHAT),
        "prompt_kind": "messages",
        "text": "Fünf Füchse.",
        "chunks": [PayloadChunk(text="Fünf Füchse.", token_ids=[1, 2, 3])],
        "status": "OK",
        "finish_reason": "stop",
        "usage": Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=3),
        "sampling": json.dumps({"temperature": 0.5, "max_tokens": 16, "seed": 7, "stop": ["\n"]}),
        "ttft_ms": 30.0,
        "duration_ms": 250.0,
        "trace_id": TRACE_ID,
        "span_id": SPAN_ID,
        "client": "ann",
    }
    record = PayloadRecord(**own | fields)
    record.time.FromMilliseconds(1_700_000_000_000)
    return AppendRequest(source="s", sequence=number, record=record)


def plain(span):
    """The span's attributes as plain values."""
    values = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        values[one.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return values


class Receiver:
    """Keeps the spans that it accepts over gRPC; `refuse` is the status of all others."""

    def __init__(self, port):
        self.spans, self.headers, self.refuse = [], {}, None
        self._server = grpc.server(ThreadPoolExecutor(2))
        service = trace_grpc.TraceServiceServicer()
        service.Export = self._export
        trace_grpc.add_TraceServiceServicer_to_server(service, self._server)
        self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    def _export(self, request, context):
        self.headers = dict(context.invocation_metadata())
        if self.refuse:
            context.abort(self.refuse, "no")
        self.spans += [s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]
        return trace_pb2.ExportTraceServiceResponse()

    def stop(self):
        self._server.stop(None).wait()


async def append(target, *requests):
    async with grpc.aio.insecure_channel(target) as channel:
        async for _ in headrace_pb2_grpc.PayloadIngestStub(channel).Append(iter(requests)):
            pass


def test_a_chat_has_the_attributes_of_the_conventions():
    span = span_of(generation(1).record)
    values = plain(span)
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("chat storyteller", TRACE_ID, SPAN_ID)
    assert span.end_time_unix_nano - span.start_time_unix_nano == 250_000_000
    assert json.loads(values.pop("gen_ai.input.messages")) == [
        {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
        {"role": "user", "parts": [{"type": "text", "content": "Wer da?"}]},
    ]
    assert json.loads(values.pop("gen_ai.output.messages")) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "Fünf Füchse."}], "finish_reason": "stop"}
    ]
    assert values == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": "storyteller",
        "gen_ai.response.model": "storyteller",
        "gen_ai.response.id": "request-1",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": 0.03,
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 16,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stop_sequences": ["\n"],
        "user.id": "ann",
        "headrace.record_id": str(uuid.UUID(int=1)),
        "headrace.protocol": "",
    }


def test_all_names_are_those_of_the_installed_conventions():
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI")}
    names = {name for name in plain(span_of(generation(1).record)) if name.startswith("gen_ai.")}
    assert names <= known


def test_a_failed_completion_without_a_trace_is_an_error_in_a_trace_of_its_own():
    fields = {"prompt": "Once", "prompt_kind": "text", "text": "", "chunks": [], "status": "INTERNAL", "message": "why"}
    span = span_of(generation(5, trace_id="", span_id="x", finish_reason="", sampling='{"temp', **fields).record)
    values = plain(span)
    assert span.name == "text_completion storyteller"
    assert (span.status.message, values["error.type"]) == ("why", "INTERNAL")
    assert (span.trace_id, span.parent_span_id) == (uuid.UUID(int=5).bytes, b"")
    assert json.loads(values["gen_ai.input.messages"])[0]["parts"] == [{"type": "text", "content": "Once"}]
    assert "gen_ai.output.messages" not in values
    assert span.span_id == span_of(generation(5).record).span_id


async def test_every_generation_arrives_though_receiver_and_logger_die(tmp_path):
    port = free_port()
    async with LoggerProcess(tmp_path) as logger:
        logger.environment |= {
            "LOGGER_GEN_AI_URL": f"grpc://127.0.0.1:{port}",
            "LOGGER_GEN_AI_HEADERS": "Authorization=Basic%20YTpi,x-scope=team",
        }
        await logger.start()
        # Nobody listens yet: the log takes no notice.
        await append(logger.target, *map(generation, range(1, 51)))
        await logger.kill()
        await logger.start()
        tensor = AppendRequest(source="s", sequence=51, record=PayloadRecord(record_id=str(uuid.UUID(int=51))))
        receiver = Receiver(port)
        try:
            receiver.refuse = grpc.StatusCode.UNAUTHENTICATED  # Tried again: it may be corrected.
            await append(logger.target, tensor, generation(52))
            await until(lambda: receiver.headers.get("authorization") == "Basic YTpi")
            receiver.refuse = None
            expected = {str(uuid.UUID(int=number)) for number in (*range(1, 51), 52)}
            await until(lambda: {plain(span)["headrace.record_id"] for span in receiver.spans} == expected)
            assert len({span.span_id for span in receiver.spans}) == 51
        finally:
            receiver.stop()


async def test_http_receivers_get_the_same_spans(tmp_path):
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, self.headers["content-type"], self.headers["authorization"], body))
            self.send_response(503 if len(received) == 1 else 200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever).start()
    try:
        async with LoggerProcess(tmp_path) as logger:
            logger.environment |= {
                "LOGGER_GEN_AI_URL": f"http://127.0.0.1:{server.server_port}/api/public/otel/v1/traces",
                "LOGGER_GEN_AI_HEADERS": "authorization=Basic abc",
            }
            await logger.start()
            await append(logger.target, generation(1))
            await until(lambda: len(received) == 2)
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
    path, kind, key, body = received[1]
    assert (path, kind, key) == ("/api/public/otel/v1/traces", "application/x-protobuf", "Basic abc")
    (span,) = trace_pb2.ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans
    assert span == span_of(generation(1).record)


@pytest.mark.parametrize("url", ["ftp://host", "grpc://", "host:4317"])
async def test_a_malformed_url_is_refused(tmp_path, url):
    async with LoggerProcess(tmp_path) as logger:
        logger.environment["LOGGER_GEN_AI_URL"] = url
        assert f"LOGGER_GEN_AI_URL={url}" in await logger.refuses()
