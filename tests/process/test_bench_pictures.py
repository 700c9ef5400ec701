"""What telemetry tells is drawn whole and in its place, and what an exporter sends is what is kept."""

from __future__ import annotations

import json
import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Link as SdkLink
from opentelemetry.trace import SpanKind, StatusCode

from bench.line_charts import Line, Mark, Panel, line_charts
from bench.otlp_receiver import Counts, OtlpReceiver, receiver_process
from bench.plot import plot
from bench.spans import Event, Link, Span
from bench.svg import seconds, text_width, ticks
from bench.telemetry_figures import FIGURES, STEP_S, draw_figures
from bench.telemetry_pictures import DRAWN, RESULTS, draw_traces
from bench.waterfall import Trace, in_order, short_name, waterfall

SVG = "{http://www.w3.org/2000/svg}"
TRACE = "ab" * 16
MS = 1_000_000


def span(name: str, parent: str, start: float, end: float, **more: Any) -> Span:
    """Milliseconds; the name is its id too."""
    service = {"c": "client", "t": "millrace-transformer", "p": "millrace-predictor"}.get(name[0], "somebody")
    told: dict[str, Any] = {
        "service": service,
        "name": f"pkg.v1.Service/{name}",
        "kind": "SERVER",
        "trace_id": TRACE,
        "span_id": name,
    }
    return Span(**{**told, "parent_id": parent, "start_ns": int(start * MS), "end_ns": int(end * MS), **more})


def events(*names_and_times: tuple[str, float]) -> tuple[Event, ...]:
    return tuple(Event(name, int(time * MS)) for name, time in names_and_times)


RESUMED = (
    span("c", "caller", 0, 905),
    span("t1", "c", 5, 900, events=events(("first_message", 60), ("end", 899))),
    span("t2", "t1", 9, 400, status="ERROR", attributes={"rpc.response.status_code": "UNAVAILABLE"}),
    span("t3", "t1", 410, 900, links=(Link(TRACE, "lost"),)),
    span(
        "p2",
        "t3",
        413,
        898,
        events=(
            *events(
                ("queued", 413.2), ("prefill", 413.2), ("first_token", 430), ("preempted", 890), ("preempted", 895)
            ),
            Event("generation_end", 898 * MS, {"gen_ai.usage.output_tokens": 42}),
        ),
    ),
    span("x <&> commit", "", 950, 951, trace_id="cd" * 16, links=(Link(TRACE, "t1"),)),
)


class Drawn:
    """A picture, read back."""

    def __init__(self, picture: str) -> None:
        self.root = ElementTree.fromstring(picture)
        self.width, self.height = float(self.root.get("width", "")), float(self.root.get("height", ""))
        self.boxes: list[tuple[str, float, float, float, float]] = []
        self._read(self.root, 0.0, 0.0)

    @property
    def words(self) -> str:
        return " ".join(element.text or "" for element in self.root.iter(f"{SVG}text"))

    def count(self, tag: str) -> int:
        return sum(1 for _ in self.root.iter(f"{SVG}{tag}"))

    def outside(self) -> list[tuple[str, float, float, float, float]]:
        return [
            box
            for box in self.boxes
            if box[1] < 0 or box[2] < 0 or box[3] > self.width + 0.5 or box[4] > self.height + 0.5
        ]

    def _read(self, element: ElementTree.Element, x: float, y: float) -> None:
        if moved := re.fullmatch(r"translate\(([-\d.]+) ([-\d.]+)\)", element.get("transform", "")):
            x, y = x + float(moved[1]), y + float(moved[2])
        tag = element.tag.removeprefix(SVG)
        at = {name: float(value) for name, value in element.attrib.items() if re.fullmatch(r"-?[\d.]+", value)}
        if tag == "rect":
            left, top = at.get("x", 0.0), at.get("y", 0.0)
            self._add(tag, x, y, left, top, left + at["width"], top + at["height"])
        elif tag == "line":
            xs, ys = sorted((at["x1"], at["x2"])), sorted((at["y1"], at["y2"]))
            self._add(tag, x, y, xs[0], ys[0], xs[1], ys[1])
        elif tag == "polyline":
            places = [tuple(map(float, place.split(","))) for place in element.get("points", "").split()]
            xs, ys = sorted(place[0] for place in places), sorted(place[1] for place in places)
            self._add(tag, x, y, xs[0], ys[0], xs[-1], ys[-1])
        elif tag == "text":
            width = text_width(element.text or "", int(at["font-size"]))
            left = at["x"] - {"start": 0, "middle": width / 2, "end": width}[element.get("text-anchor", "start")]
            self._add(element.text or "", x, y, left, at["y"] - at["font-size"], left + width, at["y"])
        for child in element:
            self._read(child, x, y)

    def _add(self, what: str, x: float, y: float, left: float, top: float, right: float, bottom: float) -> None:
        assert all(map(math.isfinite, (left, top, right, bottom)))
        self.boxes.append((what, x + left, y + top, x + right, y + bottom))


def drawn_whole(picture: str) -> Drawn:
    drawn = Drawn(picture)
    assert drawn.outside() == []
    assert all(int(element.get("font-size", 0)) >= 11 for element in drawn.root.iter(f"{SVG}text"))
    background = drawn.root.find(f"{SVG}rect")
    assert background is not None
    assert (background.get("fill"), background.get("width")) == ("white", drawn.root.get("width"))
    return drawn


def test_a_waterfall_has_a_row_for_each_span_and_words_for_each_event() -> None:
    drawn = drawn_whole(waterfall([Trace("One & all", RESUMED), Trace("None", ())]))
    bars = [title.text or "" for title in drawn.root.iter(f"{SVG}title")]
    assert sorted(bar.split(": ")[1].split(",")[0] for bar in bars) == sorted(each.name for each in RESUMED)
    for words in (
        "queued",
        "prefill",
        "first_token",
        "preempted",
        "generation_end",
        "42 tokens",
        "UNAVAILABLE",
        "lost",
    ):
        assert words in drawn.words
    assert "Service/t1" in drawn.words
    assert drawn.count("polyline") == 1  # The link to a span that is there.


def test_words_below_a_bar_are_never_over_one_another() -> None:
    crowded = span("p", "", 0, 1000, events=events(*((f"event {at}", at) for at in (0, 0, 1, 2, 500, 998, 999, 1000))))
    drawn = drawn_whole(waterfall([Trace("Crowded", (crowded,))]))
    labels = [box for box in drawn.boxes if box[0].startswith("event ")]
    assert len(labels) == 8
    for index, (_, left, top, right, bottom) in enumerate(labels):
        for _, other_left, other_top, other_right, other_bottom in labels[index + 1 :]:
            assert right <= other_left or other_right <= left or bottom <= other_top + 2 or other_bottom <= top + 2


def test_spans_stand_below_their_callers_in_the_order_of_time() -> None:
    depths = [(each.span_id, depth) for each, depth in in_order(RESUMED[::-1])]
    assert depths == [("c", 0), ("t1", 1), ("t2", 2), ("t3", 2), ("p2", 3), ("x <&> commit", 0)]


def test_charts_have_a_line_for_each_series_and_none_where_nothing_was_measured() -> None:
    steady = [(2.0 * step, 5.0 + step) for step in range(31)]
    interrupted = [(at, math.nan if 20 < at < 30 else value) for at, value in steady]
    panels = [
        Panel("Log", (Line("a", steady, "blue"), Line("zeros", [(at, 0.0) for at, _ in steady], "red")), log=True),
        Panel("Linear", (Line("b", interrupted, "blue", "5 3"),), percent=True),
        Panel("Empty", (Line("c", [], "blue"),)),
    ]
    drawn = drawn_whole(line_charts("All", panels, 60, [Mark(30, "killed"), Mark(40, "and again")]))
    assert drawn.count("polyline") == 1 + 2
    for words in ("All", "Log", "Linear", "Empty", "zeros", "nothing measured", "killed", "and again"):
        assert words in drawn.words


def test_a_recording_is_drawn_with_each_of_its_figures_and_again_the_same() -> None:
    labels = [{"millrace_protocol": "grpc", "millrace_outcome": "completed", "instance": "h:1"}]
    values = [None, *[float(step) for step in range(1, 31)]]
    figures = {name: [{"labels": each, "values": values} for each in labels] for name in FIGURES}
    told = {"seconds": 60, "step_s": STEP_S, "marks": [{"at_s": 36, "words": "killed"}], "figures": figures}
    drawn = drawn_whole(draw_figures(told))
    assert drawn.count("polyline") == len(FIGURES)
    assert draw_figures(told) == draw_figures(json.loads(json.dumps(told)))


def test_spans_survive_being_recorded() -> None:
    recorded = json.loads(json.dumps([each.as_json() for each in RESUMED]))
    assert tuple(Span.from_json(each) for each in recorded) == RESUMED
    assert draw_traces({"traces": {"T": recorded}}) == waterfall([Trace("T", RESUMED)])


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_in_the_results_is_that_of_its_recording(name: str) -> None:
    recording = RESULTS / f"{name}.json"
    if not recording.exists():
        pytest.skip(f"{name} is not recorded")
    picture = DRAWN[name](json.loads(recording.read_text()))
    drawn_whole(picture)
    assert recording.with_suffix(".svg").read_text() == picture


def test_the_plot_in_the_results_is_that_of_its_figures() -> None:
    assert (RESULTS / "engine.svg").read_text() == plot(json.loads((RESULTS / "engine.json").read_text())["cases"])


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("inference.GRPCInferenceService/ModelStreamInfer", "GRPCInferenceService/ModelStreamInfer"),
        ("predictor /inference.GRPCInferenceService/ModelInfer", "predictor GRPCInferenceService/ModelInfer"),
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("payload commit", "payload commit"),
    ],
)
def test_a_name_is_shortened_by_its_packages_alone(name: str, short: str) -> None:
    assert short_name(name) == short


def test_durations_and_ticks_are_round() -> None:
    assert [seconds(value) for value in (0.00085, 0.0123, 1.237)] == ["850 µs", "12.3 ms", "1.24 s"]
    assert ticks(0.97, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(0, 5) == [0, 1]


def export_one_trace(endpoint: str) -> Span:
    """A span with all that a span can have, exported by OpenTelemetry's SDK; as it is to be kept."""
    provider = TracerProvider(resource=Resource({"service.name": "exporting"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint, insecure=True)))
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("above", kind=SpanKind.CLIENT) as above:
        link = SdkLink(above.get_span_context(), {"why": "resumed"})
        below = tracer.start_span(
            "below", kind=SpanKind.SERVER, links=[link], start_time=5, attributes={"n": 1, "ids": [1, 2], "x": 0.5}
        )
        below.add_event("queued", {"is": True}, timestamp=7)
        below.set_status(StatusCode.ERROR)
        below.end(9)
    provider.shutdown()
    context, parent = below.get_span_context(), above.get_span_context()
    trace_id = f"{context.trace_id:032x}"
    return Span(
        service="exporting",
        name="below",
        kind="SERVER",
        trace_id=trace_id,
        span_id=f"{context.span_id:016x}",
        parent_id=f"{parent.span_id:016x}",
        start_ns=5,
        end_ns=9,
        status="ERROR",
        attributes={"n": 1, "ids": [1, 2], "x": 0.5},
        events=(Event("queued", 7, {"is": True}),),
        links=(Link(trace_id, f"{parent.span_id:016x}", {"why": "resumed"}),),
    )


def test_the_receiver_keeps_what_the_sdk_exports() -> None:
    with OtlpReceiver() as receiver:
        exported = export_one_trace(receiver.endpoint)
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(receiver.endpoint, insecure=True), math.inf)
        meters = MeterProvider([reader], Resource({"service.name": "exporting"}), shutdown_on_exit=False)
        meter = meters.get_meter("test")
        meter.create_counter("asked", "{request}").add(3, {"way": "grpc"})
        histogram = meter.create_histogram("took", "s")
        histogram.record(0.5)
        histogram.record(1.5)
        meters.force_flush()
        meters.shutdown()
        assert exported in receiver.spans(exported.trace_id)
        assert receiver.spans("0" * 32) == []
        points = {point.name: point for point in receiver.metric_points()}
        assert receiver.counts() == Counts(exports=3, spans=2, metric_points=2)
    assert (points["asked"].value, points["asked"].unit, points["asked"].attributes) == (
        3,
        "{request}",
        {"way": "grpc"},
    )
    assert (points["took"].value, points["took"].count, points["took"].service) == (2.0, 2, "exporting")


def test_the_receiver_keeps_no_more_than_it_may() -> None:
    with OtlpReceiver(kept=1) as receiver:
        export_one_trace(receiver.endpoint)
        assert [kept.name for kept in receiver.spans()] == ["above"]
        assert receiver.counts().spans == 2


@pytest.mark.parametrize("sink", [False, True])
async def test_the_receiver_in_a_process_of_its_own_tells_what_it_got(sink: bool) -> None:
    async with receiver_process(sink=sink) as receiver:
        exported = export_one_trace(receiver.endpoint)
        assert await receiver.counts() == Counts(exports=2, spans=2, metric_points=0)
        assert (exported in await receiver.spans(exported.trace_id)) is not sink
