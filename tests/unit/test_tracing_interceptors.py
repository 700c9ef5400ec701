"""Each call is one client span and one server span below it, ended once, with the status that it had."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, get_current_span
from opentelemetry.trace import StatusCode as SpanStatus

from millrace.channel import open_channel
from millrace.errors import DeadlineError, InvalidRequestError, RequestFailedError
from millrace.interceptors import ErrorServerInterceptor
from millrace.telemetry import interceptors
from millrace.telemetry.interceptors import TracingServerInterceptor
from millrace.telemetry.tracing import current_trace_id

KINDS = ("unary", "stream", "bidi", "written")
FOREVER = 3600


class Methods(grpc.GenericRpcHandler):
    """`/test/<kind>` for every kind; each answers once and then does what `then` says."""

    def __init__(self):
        self.then = None
        self.answered = asyncio.Event()

    def service(self, handler_call_details):
        async def unary(request, context):
            self.answered.set()
            await self.then(context)
            return request

        async def stream(request, context):
            yield request
            self.answered.set()
            await self.then(context)

        async def bidi(requests, context):
            async for request in requests:
                yield request
                self.answered.set()
                await self.then(context)

        async def written(request, context):
            await context.write(request)
            self.answered.set()
            await self.then(context)

        return {
            "/test/unary": grpc.unary_unary_rpc_method_handler(unary),
            "/test/stream": grpc.unary_stream_rpc_method_handler(stream),
            "/test/bidi": grpc.stream_stream_rpc_method_handler(bidi),
            "/test/written": grpc.unary_stream_rpc_method_handler(written),
        }.get(handler_call_details.method)


class Bench:
    """A server and a channel with the interceptors, and the spans that both ended."""

    def __init__(self, methods, exporter, channel, target):
        self.methods = methods
        self.exporter = exporter
        self.channel = channel
        self.target = target

    def open(self, kind, **options):
        """The call object of a call just begun."""
        if kind == "unary":
            return self.channel.unary_unary("/test/unary")(b"x", **options)
        if kind == "bidi":
            return self.channel.stream_stream("/test/bidi")(iter([b"x"]), **options)
        return self.channel.unary_stream(f"/test/{kind}")(b"x", **options)

    async def call(self, kind, **options):
        call = self.open(kind, **options)
        return [await call] if kind == "unary" else [response async for response in call]

    async def spans(self):
        """The client's span and the server's, once both have ended."""
        async with asyncio.timeout(10):
            while len(self.exporter.get_finished_spans()) < 2:  # noqa: ASYNC110  (spans end without telling)
                await asyncio.sleep(0.005)
        by_kind = {span.kind: span for span in self.exporter.get_finished_spans()}
        assert len(by_kind) == 2
        return by_kind[SpanKind.CLIENT], by_kind[SpanKind.SERVER]


@asynccontextmanager
async def served(methods):
    server = grpc.aio.server(interceptors=(TracingServerInterceptor(), ErrorServerInterceptor("predictor")))
    server.add_generic_rpc_handlers((methods,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield server, f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture
async def bench(monkeypatch):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(interceptors, "_tracer", provider.get_tracer("test"))
    methods = Methods()
    async with served(methods) as (_, target), open_channel(target, "predictor") as channel:
        yield Bench(methods, exporter, channel, target)
    # Whatever was still running has been ended by now, and nothing may have ended twice.
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
        assert span.name == f"test/{kind}"
        assert span.attributes["rpc.system.name"] == "grpc"
        assert span.attributes["rpc.method"] == f"test/{kind}"
        assert span.attributes["rpc.response.status_code"] == code
        assert span.status.status_code is (SpanStatus.ERROR if in_error else SpanStatus.UNSET)
    assert client.parent is None
    assert server.parent.span_id == client.context.span_id
    assert server.context.trace_id == client.context.trace_id


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_that_goes_well(bench, kind):
    bench.methods.then = ends_well
    assert await bench.call(kind) == [b"x"]
    await check(bench, kind, "OK", client_error=False, server_error=False)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_refused_call_is_the_clients_error_and_not_the_servers(bench, kind):
    bench.methods.then = refuses
    with pytest.raises(InvalidRequestError):
        await bench.call(kind)
    await check(bench, kind, "INVALID_ARGUMENT", client_error=True, server_error=False)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_exception_is_an_error_on_both_sides(bench, kind):
    bench.methods.then = breaks
    with pytest.raises(RequestFailedError):
        await bench.call(kind)
    await check(bench, kind, "INTERNAL", client_error=True, server_error=True)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_task_cancels_its_call(bench, kind):
    bench.methods.then = hangs
    task = asyncio.create_task(bench.call(kind))
    await bench.methods.answered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await check(bench, kind, "CANCELLED", client_error=True, server_error=False)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_call_object(bench, kind):
    bench.methods.then = hangs
    call = bench.open(kind)
    if kind != "unary":
        assert await anext(aiter(call)) == b"x"
    await bench.methods.answered.wait()
    call.cancel()
    await check(bench, kind, "CANCELLED", client_error=True, server_error=False)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_cancelled_before_anything_of_it_was_read(bench, kind):
    bench.methods.then = hangs
    call = bench.open(kind)
    await bench.methods.answered.wait()
    call.cancel()
    del call
    await check(bench, kind, "CANCELLED", client_error=True, server_error=False)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_deadline_that_passes(bench, kind):
    bench.methods.then = hangs
    with pytest.raises(DeadlineError):
        await bench.call(kind, timeout=0.2)
    await check(bench, kind, "DEADLINE_EXCEEDED", client_error=True, server_error=True)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_hop_that_is_not_there_is_a_client_span_alone(bench, kind):
    async with open_channel("127.0.0.1:1", "predictor") as channel:
        bench.channel = channel
        with pytest.raises(Exception, match="no predictor is ready"):
            await bench.call(kind)
    [span] = bench.exporter.get_finished_spans()
    assert span.attributes["rpc.response.status_code"] == "UNAVAILABLE"
    assert span.status.status_code is SpanStatus.ERROR


@pytest.mark.parametrize("kind", KINDS)
async def test_the_handler_runs_in_the_servers_span(bench, kind):
    seen = []

    async def then(context):
        seen.append((current_trace_id(), get_current_span().get_span_context().span_id))

    bench.methods.then = then
    await bench.call(kind)
    _, server = await bench.spans()
    assert seen == [(format(server.context.trace_id, "032x"), server.context.span_id)]


async def test_a_callers_own_trace_is_continued(bench):
    bench.methods.then = ends_well
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with grpc.aio.insecure_channel(bench.target) as channel:
        await channel.unary_unary("/test/unary")(b"x", metadata=(("traceparent", parent),))
    [span] = bench.exporter.get_finished_spans()
    assert format(span.context.trace_id, "032x") == "0af7651916cd43dd8448eb211c80319c"
    assert format(span.parent.span_id, "016x") == "b7ad6b7169203331"


async def test_outside_of_a_trace_there_is_no_trace_id():
    assert current_trace_id() == ""


async def test_health_is_not_traced_by_the_server(bench):
    health_stub = health_pb2_grpc.HealthStub
    async with grpc.aio.insecure_channel(bench.target) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="is not implemented"):
            await health_stub(channel).Check(health_pb2.HealthCheckRequest())
    assert not bench.exporter.get_finished_spans()
