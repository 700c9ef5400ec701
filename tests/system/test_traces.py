"""Each way in and each outcome: the whole tree of spans and the change of metrics, as an OTLP receiver gets them."""

import asyncio
import secrets
import socket
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.support.otlp_receiver import OtlpReceiver
from tests.system.calls import records
from tests.system.faulty_predictor import FAILS, FAILS_LATER, HOLDS_LATER
from tests.system.request_outcome import Request
from tests.system.traced_ways_in import MODEL, WAYS, TracedWay
from tests.waiting import until

PREDICT = "headrace.v1.PredictorSteps/Run"
TOKENS, PREDICTORS = 6, 2
PROCESSES = {"headrace-transformer": 1, "headrace-predictor": PREDICTORS, "headrace-logger": 1}
SERVER_FAULTS = ("INTERNAL", "DEADLINE_EXCEEDED", "UNAVAILABLE")
GENERATION_EVENTS = ["queued", "prefill", "first_token", "generation_end"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a generation.

    `code` is the call's status, `called` whether a predictor is called, `tokens` their number, `name` the label.
    """

    name: str
    code: str
    parameters: dict[str, float]
    called: bool = True
    tokens: int = TOKENS
    held: bool = False
    leaves: bool = False
    timeout_s: float = 60.0


OUTCOMES = {
    "ok": Outcome("completed", "OK", {}),
    "refused": Outcome("refused", "INVALID_ARGUMENT", {"temperature": -1.0}, called=False, tokens=0),
    "error before the first chunk": Outcome("failed", "INTERNAL", {"seed": FAILS}, tokens=0),
    "error after the first chunk": Outcome("failed", "INTERNAL", {"seed": FAILS_LATER}, tokens=3),
    "cancel": Outcome("cancelled", "CANCELLED", {"seed": HOLDS_LATER}, tokens=3, held=True, leaves=True),
    "deadline": Outcome(
        "deadline_exceeded", "DEADLINE_EXCEEDED", {"seed": HOLDS_LATER}, tokens=3, held=True, timeout_s=6.0
    ),
    "killed": Outcome("completed", "OK", {"seed": HOLDS_LATER}, held=True),
}
# Every way in with an answer, one of them with each other outcome, and a cancel over gRPC too; with FULL=1 all.
EVERY_OUTCOME = ("chat, events",)


def row(way: str, outcome: str) -> Any:
    is_usual = outcome == "ok" or way in EVERY_OUTCOME or (way, outcome) == ("Generate", "cancel")
    return pytest.param(way, outcome, marks=[] if is_usual else pytest.mark.full)


ROWS = [row(way, outcome) for way in WAYS for outcome in OUTCOMES if outcome != "killed"]
KILLED = [row(way, "killed") for way in ("Generate", "ModelStreamInfer", "chat, events")]


class TracedStack:
    """A stack whose predictors fail on request, and its exported telemetry."""

    def __init__(self, stack, receiver, folders):
        self.stack = stack
        self.receiver = receiver
        self.folders = folders

    def hold(self, held):
        for folder in self.folders:
            if held:
                (folder / "hold_later").touch()
            else:
                (folder / "hold_later").unlink(missing_ok=True)

    def admitted(self):
        """The number of requests that each predictor has accepted."""
        return [path.stat().st_size if path.exists() else 0 for path in (f / "admitted" for f in self.folders)]

    def latest(self):
        """Every series, as of its last export."""
        return {point.series: point for point in self.receiver.metric_points()}

    async def measured(self):
        """Every present series: from an export of each process that began after this call."""
        now = time.time_ns()

        def all_exported():
            fresh = {(point.service, point.instance) for point in self.receiver.metric_points() if point.time_ns > now}
            return Counter(service for service, _ in fresh) == PROCESSES

        await until(all_exported)
        return self.latest()

    async def tree(self, trace_id, caller, least):
        """The spans of a trace by their parents, once there are `least` and no more arrive."""
        await until(lambda: len(self._own(trace_id)) >= least)
        await self.measured()
        spans = self._own(trace_id)
        children = defaultdict(list)
        for span in sorted(spans, key=lambda span: span.start_ns):
            children[span.parent_id].append(span)
        assert list(children[caller]), "the caller's span has no child"
        return children

    def has_left(self, trace_id):
        """Whether a predictor's call has ended."""
        return any(span.service == "headrace-predictor" for span in self._own(trace_id))

    def commits(self, trace_id):
        """The logger's spans that link to the trace."""
        return [span for span in self.receiver.spans(trace_id) if span.trace_id != trace_id]

    def _own(self, trace_id):
        return [span for span in self.receiver.spans(trace_id) if span.trace_id == trace_id]


def flush_soon(config):
    """Envoy's tracer sends each span at once, and does not gather them for a second."""
    runtime = config["layered_runtime"]["layers"][0]["static_layer"]
    runtime["tracing"]["opentelemetry"] = {"flush_interval_ms": 100, "min_flush_spans": 1}


@pytest_asyncio.fixture(scope="module")
async def traced(stacks, tmp_path_factory):
    folders = [tmp_path_factory.mktemp("faults") for _ in range(PREDICTORS)]
    with OtlpReceiver() as receiver:
        exporting = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_METRIC_EXPORT_INTERVAL": "300",
        }
        faults = {f"predictor-{i}": {"FAULTS": str(folder)} for i, folder in enumerate(folders)}
        async with stacks.use(
            models=f"{MODEL}=models/{MODEL}",
            predictors=PREDICTORS,
            otel_exporter_otlp_endpoint=receiver.endpoint,
            commands={"predictor": (sys.executable, "-m", "tests.system.faulty_predictor")},
            environment={"transformer": exporting, "predictor": exporting, "logger": exporting} | faults,
            change_gateway=flush_soon,
        ) as stack:
            yield TracedStack(stack, receiver, folders)


async def run(traced, way, outcome):
    """Sends a request and causes the outcome; returns its ids, the answer and the metrics before it."""
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    parameters = {"max_tokens": TOKENS, "ignore_eos": True, **OUTCOMES[outcome].parameters}
    connections = []
    request = Request(
        parameters=parameters,
        timeout_s=OUTCOMES[outcome].timeout_s,
        goes_on=False,
        headers={"x-request-id": f"mine-{caller}", "traceparent": f"00-{trace_id}-{caller}-01"},
        on_connection=connections.append,
    )
    await traced.stack.wait_ready()
    before, admitted = await traced.measured(), traced.admitted()
    traced.hold(OUTCOMES[outcome].held)
    try:
        sending = asyncio.create_task(way.send(traced.stack.gateway, request))
        if OUTCOMES[outcome].held and outcome != "deadline":
            # The model waits now, and all its tokens so far have arrived.
            await until(lambda: moved(traced.latest(), before, "gen_ai.server.time_to_first_token") == 1)
            await until(lambda: moved(traced.latest(), before, "headrace.tokens", "value") == 3)
            await traced.measured()  # Since then the transformer has read them too.
        if outcome == "killed":
            [index] = [i for i, count in enumerate(traced.admitted()) if count > admitted[i]]
            await traced.stack.kill(f"predictor-{index}")
        if OUTCOMES[outcome].leaves:
            leave(sending, connections)
        if outcome == "killed":
            traced.hold(False)
        [answer] = await asyncio.gather(sending, return_exceptions=OUTCOMES[outcome].leaves)
        if OUTCOMES[outcome].held:
            await until(lambda: traced.has_left(trace_id))
    finally:
        traced.hold(False)
    return trace_id, caller, request, answer, before


def leave(sending, connections):
    """Ends a call as its caller would."""
    if connections:
        connections[0].sock.shutdown(socket.SHUT_RDWR)
    else:
        sending.cancel()


def moved(after, before, name, of="count", service="headrace-", **attributes):
    """The change of the series with this name and these attributes, over all processes of a service."""
    wanted = {key.replace("__", "."): value for key, value in attributes.items()}
    return sum(
        getattr(point, of) - (getattr(before[series], of) if series in before else 0)
        for series, point in after.items()
        if point.name == name and point.service.startswith(service) and wanted.items() <= dict(point.attributes).items()
    )


def expected_chain(way: TracedWay, outcome: Outcome):
    """The spans from the gateway's first to the predictor's: service, kind, status, and gRPC status."""
    in_band = way.has_status is False and outcome.code in ("INTERNAL", "INVALID_ARGUMENT")
    code = "OK" if in_band else outcome.code
    chain = [
        ("envoy-ingress", "SERVER", gateway_status(code), None),
        ("headrace-transformer", "SERVER", "ERROR" if outcome.code in SERVER_FAULTS else "UNSET", code),
    ]
    if outcome.called:
        chain += [
            ("headrace-transformer", "CLIENT", "UNSET" if outcome.code == "OK" else "ERROR", outcome.code),
            ("headrace-predictor", "SERVER", "ERROR" if outcome.code in SERVER_FAULTS else "UNSET", outcome.code),
        ]
    return chain


def gateway_status(code):
    """Envoy's span status for a gRPC status; None where it may see the call's end or its status first.

    For a gateway a cancel is the end of a stream without a status.
    """
    if code == "DEADLINE_EXCEEDED":
        return None
    if code in ("OK", "CANCELLED"):
        return "UNSET"
    return "ERROR" if code in SERVER_FAULTS else "UNSET"


def walk(children, caller, depth):
    """The path of a tree without branches."""
    chain, at = [], caller
    for _ in range(depth):
        [span] = children[at]
        chain.append(span)
        at = span.span_id
    assert not children[at]
    return chain


def check_chain(chain, expected):
    assert [(span.service, span.kind) for span in chain] == [(service, kind) for service, kind, _, _ in expected]
    for span, (service, _, status, code) in zip(chain, expected, strict=True):
        assert status in (None, span.status), (service, span.kind, span.status)
        assert span.attributes.get("rpc.response.status_code") == code, (service, span.kind)
        assert span.end_ns >= span.start_ns > 0


def names(span):
    return [event.name for event in span.events]


@pytest.mark.parametrize(("way", "outcome"), ROWS)
async def test_spans_and_metrics_of_each_outcome(traced, way, outcome):
    way, expected = WAYS[way], OUTCOMES[outcome]
    trace_id, caller, request, answer, before = await run(traced, way, outcome)

    chain = expected_chain(way, expected)
    spans = walk(await traced.tree(trace_id, caller, len(chain)), caller, len(chain))
    check_chain(spans, chain)
    assert {span.attributes["headrace.request_id"] for span in spans} == {request.id}
    check_transformer(way, expected, spans[1])
    if expected.called:
        client, predictor = spans[2], spans[3]
        assert client.name == predictor.name == PREDICT
        assert client.attributes["rpc.method"] == predictor.attributes["rpc.method"] == PREDICT
        assert predictor.attributes["gen_ai.request.model"] == MODEL
        assert [name for name in names(predictor) if name in GENERATION_EVENTS] == [
            name for name in GENERATION_EVENTS if name != "first_token" or expected.tokens
        ]
        assert ("first_message" in names(client)) == bool(expected.tokens)
    if not expected.leaves and answer.headers:
        assert answer.headers["x-request-id"] == request.id
        assert answer.headers["traceparent"].split("-")[1] == trace_id
    await check_commit(traced, trace_id, spans[1])
    after = await traced.measured()  # Before the query for the record, which is a call as well.
    [record] = await records(traced.stack.gateway, request_id=request.id)
    check_metrics(way, expected, sum(bool(chunk.token_ids) for chunk in record.chunks), after, before)


def check_transformer(way, expected, span):
    assert span.name == way.method
    assert span.attributes["rpc.system.name"] == "grpc"
    assert span.attributes["rpc.method"] == way.method
    assert span.attributes["headrace.protocol"] == way.protocol
    assert span.attributes["gen_ai.operation.name"] == way.operation
    assert span.attributes["gen_ai.request.model"] == MODEL
    assert span.attributes["gen_ai.usage.output_tokens"] == expected.tokens
    assert span.attributes.get("gen_ai.response.finish_reasons") == (["length"] if expected.code == "OK" else None)
    assert span.attributes.get("error.type") == (expected.code if expected.code in SERVER_FAULTS else None)
    assert names(span)[-1:] == ["end"]
    if way.streams and expected.tokens:
        assert names(span)[0] == "first_message"


async def check_commit(traced, trace_id, server):
    """The logger's commit is a trace of its own, with a link to the request's span."""
    await until(lambda: traced.commits(trace_id))
    [commit] = traced.commits(trace_id)
    assert (commit.service, commit.name, commit.kind, commit.status) == (
        "headrace-logger",
        "payload commit",
        "CONSUMER",
        "UNSET",
    )
    assert server.span_id in [link.span_id for link in commit.links if link.trace_id == trace_id]


def check_metrics(way, expected, chunks, after, before):
    labels = {"gen_ai__request__model": MODEL, "headrace__protocol": way.protocol}
    failure = {"error__type": expected.code} if expected.code != "OK" else {}

    def by(name, of="count", **attributes):
        return moved(after, before, name, of, **attributes)

    in_band = way.has_status is False and expected.code in ("INTERNAL", "INVALID_ARGUMENT")
    code = "OK" if in_band else expected.code
    called = int(expected.called)
    answered = int(expected.tokens > 0)
    own = {"rpc__method": way.method, "rpc__response__status_code": code, "headrace__protocol": way.protocol}
    theirs = {"rpc__method": PREDICT, "rpc__response__status_code": expected.code, "headrace__protocol": "grpc"}
    assert by("rpc.server.call.duration", service="headrace-transformer", **own) == 1
    assert by("rpc.server.call.duration", service="headrace-predictor", **theirs) == called
    assert by("rpc.server.call.duration") == 1 + called
    assert by("rpc.client.call.duration") == called
    assert by("rpc.client.call.duration", rpc__method=PREDICT, rpc__response__status_code=expected.code) == called
    assert by("headrace.streams", "value", headrace__outcome=expected.name, **labels) == 1
    assert by("headrace.streams", "value") == 1
    operation = {"gen_ai__operation__name": way.operation}
    assert by("gen_ai.server.request.duration", **labels, **failure, **operation) == 1
    assert by("gen_ai.server.time_to_first_token", **labels, **operation) == answered
    assert by("gen_ai.server.time_per_output_token", **labels, **operation) == answered
    assert by("gen_ai.client.token.usage", "value", gen_ai__token__type="output", **labels) == expected.tokens
    assert answered <= chunks <= expected.tokens
    assert by("headrace.inter_token_latency", **labels) == chunks - answered
    assert by("headrace.queue.duration", gen_ai__request__model=MODEL) == called
    # A caller that leaves while the model computes does not get that token.
    late = int(expected.held)
    assert by("headrace.tokens", "value") == expected.tokens + late
    assert by("headrace.tokens_after_cancel", "value") == late
    assert by("headrace.stream.resumed", "value") == 0


@pytest.mark.parametrize(("way", "outcome"), KILLED)
async def test_a_resumed_stream_stays_in_its_trace(traced, way, outcome):
    way, expected = WAYS[way], OUTCOMES[outcome]
    trace_id, caller, _, _, before = await run(traced, way, outcome)

    # The killed predictor's own span is lost with it.
    children = await traced.tree(trace_id, caller, 2 + 1 + 2)
    [ingress] = children[caller]
    [server] = children[ingress.span_id]
    check_transformer(way, expected, server)
    assert "resume" in names(server)
    first, second = children[server.span_id]
    assert (first.kind, first.name, first.status) == ("CLIENT", PREDICT, "ERROR")
    assert first.attributes["rpc.response.status_code"] == "UNAVAILABLE"
    assert "first_message" in names(first)
    assert not first.links
    assert not children[first.span_id]
    last = [second, *walk(children, second.span_id, 1)]
    check_chain(last, expected_chain(way, expected)[2:])
    # Both sides link to the span of the predictor that died, below the first attempt.
    for span in last:
        [link] = span.links
        assert link.trace_id == trace_id
        assert link.span_id not in {other.span_id for spans in children.values() for other in spans}
    after = await traced.measured()
    assert moved(after, before, "headrace.stream.resumed", "value", gen_ai__request__model=MODEL) == 1
    assert moved(after, before, "headrace.streams", "value", headrace__outcome="completed") == 1
    assert moved(after, before, "gen_ai.client.token.usage", "value", gen_ai__token__type="output") == TOKENS
    # The next test needs the predictor that was killed.
    await traced.stack.wait_ready()
