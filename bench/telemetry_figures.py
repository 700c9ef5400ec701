"""The figures of a stack under load: what Prometheus is asked for, and how it is drawn. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bench.line_charts import Line, Mark, Panel, line_charts

STEP_S = 2.0
_OVER = "10s"
_BLUE, _ORANGE, _GREEN, _VIOLET, _RED, _GREY = "#1f6f8b", "#d9822b", "#4c9a58", "#7a54c7", "#c2253c", "#8a9199"
_P95 = "5 3"

Labels = Mapping[str, str]


def _quantile(share: float, histogram: str) -> str:
    """Of a histogram in seconds, by protocol, in milliseconds."""
    by_bucket = f"sum by (le, millrace_protocol) (rate({histogram}_bucket[{_OVER}]))"
    return f"1000 * histogram_quantile({share}, {by_bucket})"


# Name of a figure → PromQL.
FIGURES = {
    "first token p50": _quantile(0.5, "gen_ai_server_time_to_first_token_seconds"),
    "first token p95": _quantile(0.95, "gen_ai_server_time_to_first_token_seconds"),
    "between tokens p50": _quantile(0.5, "millrace_inter_token_latency_seconds"),
    "between tokens p95": _quantile(0.95, "millrace_inter_token_latency_seconds"),
    "tokens": f"sum(rate(millrace_tokens_total[{_OVER}]))",
    "running": "sum(millrace_sequences_running)",
    "waiting": "sum(millrace_sequences_waiting)",
    "kv cache": "max by (instance) (millrace_kv_cache_utilization_ratio)",
    "streams": f"sum by (millrace_outcome) (rate(millrace_streams_total[{_OVER}]))",
}

_PROTOCOLS = {"grpc": ("gRPC", _BLUE), "http": ("HTTP", _ORANGE)}
_OUTCOMES = {
    "completed": _GREEN,
    "cancelled": _GREY,
    "deadline_exceeded": _ORANGE,
    "refused": _VIOLET,
    "failed": _RED,
}


class _Style(NamedTuple):
    label: str
    colour: str
    dashes: str = ""


class _Drawn(NamedTuple):
    """A figure, and how each of its series is drawn: by its labels and its place among the others."""

    figure: str
    style: Callable[[Labels, int], _Style]


def _by_protocol(quantile: str, dashes: str = "") -> Callable[[Labels, int], _Style]:
    def style(labels: Labels, place: int) -> _Style:
        name, colour = _PROTOCOLS.get(labels.get("millrace_protocol", ""), (labels.get("millrace_protocol", ""), _GREY))
        return _Style(f"{name} {quantile}".strip(), colour, dashes)

    return style


def _as(label: str, colour: str) -> Callable[[Labels, int], _Style]:
    return lambda labels, place: _Style(label, colour)


def _by_outcome(labels: Labels, place: int) -> _Style:
    outcome = labels.get("millrace_outcome", "")
    return _Style(outcome.replace("_", " "), _OUTCOMES.get(outcome, _VIOLET))


def _by_replica(labels: Labels, place: int) -> _Style:
    return _Style(f"predictor-{place}", (_BLUE, _ORANGE, _GREEN, _VIOLET)[place % 4])


_PANELS: tuple[tuple[str, tuple[_Drawn, ...], Mapping[str, bool]], ...] = (
    (
        "Time to the first token, ms",
        (_Drawn("first token p50", _by_protocol("p50")), _Drawn("first token p95", _by_protocol("p95", _P95))),
        {"log": True},
    ),
    (
        "Time between two tokens, ms",
        (_Drawn("between tokens p50", _by_protocol("p50")), _Drawn("between tokens p95", _by_protocol("p95", _P95))),
        {"log": True},
    ),
    ("Tokens a second", (_Drawn("tokens", _as("all predictors", _BLUE)),), {}),
    ("Sequences", (_Drawn("running", _as("running", _BLUE)), _Drawn("waiting", _as("waiting", _ORANGE))), {}),
    ("KV cache in use", (_Drawn("kv cache", _by_replica),), {"percent": True}),
    ("Streams ended a second, by outcome", (_Drawn("streams", _by_outcome),), {}),
)


def draw_figures(told: Mapping[str, Any]) -> str:
    """The picture of a recording (telemetry_recording.py)."""
    panels = [
        Panel(title, tuple(line for figure in drawn for line in _lines(told, figure)), **more)
        for title, drawn, more in _PANELS
    ]
    marks = [Mark(**mark) for mark in told["marks"]]
    return line_charts("A stack under load, as Prometheus has it", panels, told["seconds"], marks)


def _lines(told: Mapping[str, Any], drawn: _Drawn) -> list[Line]:
    """Those of one figure, ordered by their labels."""
    lines = []
    for place, series in enumerate(
        sorted(told["figures"][drawn.figure], key=lambda each: sorted(each["labels"].items()))
    ):
        points = [(told["step_s"] * step, value) for step, value in enumerate(series["values"]) if value is not None]
        style = drawn.style(series["labels"], place)
        lines.append(Line(style.label, points, style.colour, style.dashes))
    return lines
