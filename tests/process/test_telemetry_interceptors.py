"""Each call is one client span and one server span below it, ended once, with the call's status, and is measured
likewise."""

import asyncio
from contextlib import nullcontext
from functools import partial

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from opentelemetry.trace import StatusCode as SpanStatus

from headrace.errors import DeadlineError, InvalidRequestError, NotReadyError, RequestFailedError
from headrace.rpc.client.channel import UnaryMethod, open_channel, open_plain_channel
from headrace.rpc.client.interceptors import ClientSpans, client_interceptors
from headrace.rpc.server.call_telemetry import ServerTelemetry
from headrace.rpc.server.handlers import Interceptor
from headrace.telemetry.identity import current_request_id, set_request_id
from headrace.telemetry.rpc import suppress_tracing
from tests.support.listening import listening
from tests.support.measured import Measured
from tests.support.methods import KINDS, METHODS, Methods, answers_of, open_call
from tests.support.status import refusal
from tests.waiting import until

# A unary call without grpc.aio's interceptors, which is no call object.
PLAIN = "plain"
PATHS = {**METHODS, PLAIN: METHODS["unary"]}
FOREVER = 3600


class Bench:
    """A server and a channel with the interceptors, and the ended spans of both."""

    def __init__(self, methods, exporter, measured, channel, target, plain):
        self.methods = methods
        self.measured = measured
        self.exporter = exporter
        self.channel = channel
        self.target = target
        self.plain = plain

    async def call(self, kind, **options):
        if kind == PLAIN:
            return [await self.plain(b"x", options.get("timeout"))]
        return await answers_of(self.channel, kind, **options)

    async def span(self):
        """The server's, where the client has none, once it has ended: later than the client has its answer."""
        [span] = await until(self.exporter.get_finished_spans)
        return span

    async def spans(self):
        """The client's span and the server's, once both have ended."""
        await until(lambda: len(self.exporter.get_finished_spans()) >= 2)
        by_kind = {span.kind: span for span in self.exporter.get_finished_spans()}
        assert len(by_kind) == 2
        return by_kind[SpanKind.CLIENT], by_kind[SpanKind.SERVER]


@pytest.fixture
async def bench(monkeypatch):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer, measured = provider.get_tracer("test"), Measured()
    observed = partial(client_interceptors, tracer=tracer, meter=measured.meter)
    monkeypatch.setattr("headrace.rpc.client.channel.client_interceptors", observed)
    methods = Methods()
    server = grpc.aio.server(
        interceptors=(Interceptor("predictor", telemetry=ServerTelemetry(tracer, measured.meter)),)
    )
    server.add_generic_rpc_handlers((methods,))
    async with (
        listening(server) as target,
        open_channel(target, "predictor") as channel,
        open_plain_channel(target) as bare,
    ):
        spans = ClientSpans(tracer, measured.meter, streams=False)
        plain = UnaryMethod(bare, f"/{PATHS[PLAIN]}", "predictor", spans)
        yield Bench(methods, exporter, measured, channel, target, plain)
    # Every call has ended by now, and no span may have ended twice.
    assert len(exporter.get_finished_spans()) <= 2
    provider.shutdown()


async def ends_well(context):
    pass


async def refuses(context):
    raise InvalidRequestError("no")


async def breaks(context):
    raise ZeroDivisionError


async def hangs(context):
    await asyncio.sleep(FOREVER)


async def check(bench, kind, code, client_error, server_error):
    client, server = await bench.spans()
    for span, in_error in ((client, client_error), (server, server_error)):
        assert span.name == PATHS[kind]
        assert span.attributes["rpc.system.name"] == "grpc"
        assert span.attributes["rpc.method"] == PATHS[kind]
        assert span.attributes.get("error.type") == (code if in_error else None)
        assert [event.name for event in span.events][-1:] == ([] if kind in ("unary", PLAIN) else ["end"])
        assert span.attributes["rpc.response.status_code"] == code
        assert span.status.status_code is (SpanStatus.ERROR if in_error else SpanStatus.UNSET)
    assert client.parent is None
    assert server.parent.span_id == client.context.span_id
    assert server.context.trace_id == client.context.trace_id
    attributes = {"rpc.system.name": "grpc", "rpc.method": PATHS[kind], "rpc.response.status_code": code}
    assert bench.measured.count("rpc.client.call.duration", attributes) == 1
    attributes["headrace.protocol"] = "grpc"
    await until(lambda: bench.measured.count("rpc.server.call.duration", attributes) == 1)


@pytest.mark.parametrize("kind", [*KINDS, PLAIN])
@pytest.mark.parametrize(
    ("then", "error", "code", "client_error", "server_error"),
    [
        (ends_well, None, "OK", False, False),
        (refuses, InvalidRequestError, "INVALID_ARGUMENT", True, False),
        (breaks, RequestFailedError, "INTERNAL", True, True),
        (hangs, DeadlineError, "DEADLINE_EXCEEDED", True, True),
    ],
)
async def test_both_spans_have_the_outcome_of_a_call(bench, kind, then, error, code, client_error, server_error):
    bench.methods.then = then
    with pytest.raises(error) if error else nullcontext():
        assert await bench.call(kind, timeout=1 if then is hangs else 30) == [b"x"]
    await check(bench, kind, code, client_error, server_error)


@pytest.mark.parametrize("kind", [*KINDS, PLAIN])
async def test_a_cancelled_task_cancels_its_call(bench, kind):
    bench.methods.then = hangs
    task = asyncio.create_task(bench.call(kind))
    await bench.methods.answered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await check(bench, kind, "CANCELLED", client_error=True, server_error=False)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_that_is_cancelled_unread_ends_both_spans(bench, kind):
    bench.methods.then = hangs
    call = open_call(bench.channel, kind)
    await bench.methods.answered.wait()
    call.cancel()
    del call
    await check(bench, kind, "CANCELLED", client_error=True, server_error=False)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_missing_hop_is_not_ready_and_gives_only_a_client_span(bench, kind):
    """No hop counts as broken: the call reached none, so it cannot have broken one."""
    async with open_channel("127.0.0.1:1", "predictor") as channel:
        bench.channel = channel
        with pytest.raises(NotReadyError, match="no predictor is ready") as caught:
            await bench.call(kind)
    assert caught.value.hop == "predictor"
    [span] = bench.exporter.get_finished_spans()
    assert span.attributes["rpc.response.status_code"] == "UNAVAILABLE"
    assert span.status.status_code is SpanStatus.ERROR


async def test_health_is_not_traced_by_the_server(bench):
    health_stub = health_pb2_grpc.HealthStub
    async with grpc.aio.insecure_channel(bench.target) as channel:
        await refusal(health_stub(channel).Check(health_pb2.HealthCheckRequest()), "is not implemented")
    assert not bench.exporter.get_finished_spans()
    assert bench.measured.names == set()


@pytest.mark.parametrize("kind", ["unary", PLAIN])
async def test_background_calls_of_a_service_are_neither_traced_nor_measured(bench, kind):
    bench.methods.then = ends_well

    async def ask():
        suppress_tracing()
        return await bench.call(kind)

    assert await asyncio.create_task(ask()) == [b"x"]
    assert not bench.exporter.get_finished_spans()
    assert bench.measured.names == set()


async def test_a_request_keeps_its_id_from_hop_to_hop(bench):
    seen = []

    async def then(context):
        seen.append(current_request_id())

    async def ask():
        set_request_id("mine é")
        await bench.call("unary")

    bench.methods.then = then
    await asyncio.create_task(ask())
    client, server = await bench.spans()
    assert seen == ["mine ?"]
    assert (client.attributes["headrace.request_id"], server.attributes["headrace.request_id"]) == ("mine é", "mine ?")


async def test_a_malformed_link_is_left_out(bench):
    bench.methods.then = ends_well
    async with grpc.aio.insecure_channel(bench.target) as channel:
        await channel.unary_unary(f"/{METHODS['unary']}")(b"x", metadata=(("x-headrace-link", "00-0-0-00"),))
    span = await bench.span()
    assert not span.links


async def test_an_undeclared_method_is_no_label(bench):
    async with grpc.aio.insecure_channel(bench.target) as channel:
        await refusal(channel.unary_unary("/some.callers/Text")(b"x"), "is not implemented")
    span = await bench.span()
    assert (span.name, span.attributes["rpc.method_original"]) == ("_OTHER", "some.callers/Text")
    attributes = {"rpc.system.name": "grpc", "rpc.method": "_OTHER", "rpc.response.status_code": "UNIMPLEMENTED"}
    assert bench.measured.count("rpc.server.call.duration", attributes | {"headrace.protocol": "grpc"}) == 1
