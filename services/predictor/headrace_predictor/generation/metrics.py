"""Metrics of the engines, with the model's name as attribute.

Names and units follow OpenTelemetry's conventions. The callbacks run on the readers' threads, at each collection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from headrace.telemetry.identity import MODEL
from headrace_predictor.engine.interface import EngineLoad, EngineTotals
from headrace_predictor.generation.served_engines import ServedEngines

_GAUGES: tuple[tuple[str, str, str, Callable[[EngineLoad], float]], ...] = (
    (
        "headrace.kv_cache.utilization",
        # The convention's unit is 1, but Prometheus's exporter, unlike the collector's, appends no "ratio" to it.
        "ratio",
        "Share of the cache's blocks that running sequences hold.",
        lambda load: load.blocks_in_use,
    ),
    ("headrace.sequences.running", "{sequence}", "Sequences that are computed.", lambda load: load.running),
    ("headrace.sequences.waiting", "{sequence}", "Sequences that wait for a place.", lambda load: load.waiting),
    ("headrace.batch.size", "{sequence}", "Sequences in the latest step; 0 when idle.", lambda load: load.batch),
    (
        "headrace.sequences.oldest_age",
        "s",
        "Time since the oldest sequence was submitted; 0 if there is none.",
        lambda load: load.oldest_age_s,
    ),
)
_COUNTERS: tuple[tuple[str, str, str, Callable[[EngineTotals], int]], ...] = (
    (
        "headrace.sequences.preempted",
        "{sequence}",
        "How often a sequence lost its blocks to others and had to be computed again.",
        lambda totals: totals.preempted,
    ),
    (
        "headrace.tokens_after_cancel",
        "{token}",
        "Tokens generated after the caller had gone.",
        lambda totals: totals.tokens_after_cancel,
    ),
    ("headrace.tokens", "{token}", "Generated tokens.", lambda totals: totals.tokens),
    ("headrace.lookup.proposed", "{token}", "Tokens proposed by prompt lookup.", lambda totals: totals.proposed_tokens),
    ("headrace.lookup.accepted", "{token}", "Proposed tokens that were right.", lambda totals: totals.accepted_tokens),
)


def observe_engines(engines: ServedEngines, meter: Meter | None = None) -> None:
    meter = meter or metrics.get_meter("headrace")
    for name, unit, description, of_load in _GAUGES:
        meter.create_observable_gauge(name, [partial(_loads, engines, of_load)], unit, description)
    for name, unit, description, of_totals in _COUNTERS:
        meter.create_observable_counter(name, [partial(_totals, engines, of_totals)], unit, description)
    meter.create_observable_counter(
        "headrace.engine.restarts",
        [partial(_restarts, engines)],
        "{restart}",
        "How often an engine's process ended and was replaced.",
    )
    meter.create_observable_gauge(
        "headrace.prefix_cache.hit_ratio",
        [partial(_hit_ratios, engines)],
        "1",
        "Share of the prompts' tokens that were found in the cache, since the start.",
    )


def _loads(engines: ServedEngines, value: Callable[[EngineLoad], float], _: CallbackOptions) -> Iterable[Observation]:
    return [Observation(value(load), {MODEL: name}) for name, load in engines.loads().items()]


def _totals(engines: ServedEngines, value: Callable[[EngineTotals], int], _: CallbackOptions) -> Iterable[Observation]:
    return [Observation(value(totals), {MODEL: name}) for name, totals in engines.totals().items()]


def _restarts(engines: ServedEngines, _: CallbackOptions) -> Iterable[Observation]:
    return [Observation(count, {MODEL: name}) for name, count in engines.restarts().items()]


def _hit_ratios(engines: ServedEngines, _: CallbackOptions) -> Iterable[Observation]:
    served = engines.loads()
    return [
        Observation(totals.cached_tokens / max(1, totals.prompt_tokens), {MODEL: name})
        for name, totals in engines.totals().items()
        if name in served
    ]
