"""The engines of the served models, for threads that observe them, and their metrics by model.

Totals continue across loads and unloads: a model that is loaded again continues at the totals of its name. What an
engine counted while it was warmed up is excluded. Names and units of the metrics follow OpenTelemetry's conventions.
The callbacks run on the readers' threads, at each collection.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeGuard

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from headrace.telemetry.identity import MODEL
from headrace.telemetry.page import PickableLoad
from headrace_predictor.engine.interface import EngineLoad
from headrace_predictor.generation.loaded_model import Engine
from headrace_predictor.generation.model import GenerationModel
from headrace_predictor.models.served_model import ServedModel

# Of EngineStatistics: what is summed up over all engines of a model.
_SUMMED = (
    *("prompt_tokens", "cached_tokens", "tokens", "tokens_after_cancel"),
    *("preempted", "proposed_tokens", "accepted_tokens"),
)
# Name, unit, description, and the field of EngineLoad.
_GAUGES = (
    (
        "headrace.kv_cache.utilization",
        # The convention's unit is 1, but Prometheus's exporter, unlike the collector's, appends no "ratio" to it.
        "ratio",
        "Share of the cache's blocks that running sequences hold.",
        "blocks_in_use",
    ),
    ("headrace.sequences.running", "{sequence}", "Sequences that are computed.", "running"),
    ("headrace.sequences.waiting", "{sequence}", "Sequences that wait for a place.", "waiting"),
    ("headrace.batch.size", "{sequence}", "Sequences in the latest step; 0 when idle.", "batch"),
    (
        "headrace.sequences.oldest_age",
        "s",
        "Time since the oldest sequence was submitted; 0 if there is none.",
        "oldest_age_s",
    ),
)
# The same, with a field of EngineStatistics.
_COUNTERS = (
    (
        "headrace.sequences.preempted",
        "{sequence}",
        "How often a sequence lost its blocks to others and had to be computed again.",
        "preempted",
    ),
    (
        "headrace.tokens_after_cancel",
        "{token}",
        "Tokens generated after the caller had gone.",
        "tokens_after_cancel",
    ),
    ("headrace.tokens", "{token}", "Generated tokens.", "tokens"),
    ("headrace.lookup.proposed", "{token}", "Tokens proposed by prompt lookup.", "proposed_tokens"),
    ("headrace.lookup.accepted", "{token}", "Proposed tokens that were right.", "accepted_tokens"),
)


class _Served(NamedTuple):
    engine: Engine
    before: Counter[str]
    device_memory: int

    @property
    def counted(self) -> Counter[str]:
        return _counted(self.engine) - self.before


class ServedEngines:
    """Thread-safe. Of models without an engine of their own, it has the adapters' names: their bases compute them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: dict[str, _Served] = {}
        # Totals of engines that are no longer served, by model name.
        self._ended: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._restarts: dict[str, int] = {}
        self._adapters: frozenset[str] = frozenset()

    def add(self, model: ServedModel) -> None:
        if isinstance(model, GenerationModel) and model.loaded.adapter:
            self._adapters |= {model.name}
        if _has_engine(model):
            with self._lock:
                self._end(model.name)
                self._served[model.name] = _Served(model.engine, _counted(model.engine), model.loaded.device_memory)
                self._restarts.setdefault(model.name, 0)

    def remove(self, model: ServedModel) -> None:
        """Keeps the totals of a model that has been closed."""
        self._adapters -= {model.name}
        if _has_engine(model):
            with self._lock:
                served = self._served.get(model.name)
                if served is not None and served.engine is model.engine:
                    self._end(model.name)

    def restarting(self, name: str) -> None:
        """Counts an engine whose process has ended and is replaced."""
        with self._lock:
            self._restarts[name] = self._restarts.get(name, 0) + 1

    def restarts(self) -> dict[str, int]:
        """How often the engine of each model was replaced."""
        with self._lock:
            return dict(self._restarts)

    @property
    def device_memory(self) -> int:
        """Bytes that the served engines hold on a GPU."""
        with self._lock:
            return sum(each.device_memory for each in self._served.values())

    def loads(self) -> dict[str, EngineLoad]:
        with self._lock:
            served = dict(self._served)
        return {name: each.engine.load for name, each in served.items()}

    def pickable(self) -> dict[str, PickableLoad]:
        """The load of each model's engine, as an inference gateway reads it."""
        with self._lock:
            sizes = {name: each.engine.description for name, each in self._served.items()}
        return {
            name: PickableLoad(load.running, load.waiting, load.blocks_in_use, sizes[name])
            for name, load in self.loads().items()
            if name in sizes
        }

    def adapters(self) -> frozenset[str]:
        return self._adapters

    def totals(self) -> dict[str, Counter[str]]:
        """The totals of each model that is or was served, by the names of its statistics."""
        with self._lock:
            served, totals = dict(self._served), dict(self._ended)
        return totals | {name: totals.get(name, Counter()) + each.counted for name, each in served.items()}

    def _end(self, name: str) -> None:
        served = self._served.pop(name, None)
        if served is not None:
            self._ended[name] = self._ended[name] + served.counted  # Observers may have the earlier one.


def _has_engine(model: ServedModel) -> TypeGuard[GenerationModel]:
    return isinstance(model, GenerationModel) and not model.loaded.adapter


def _counted(engine: Engine) -> Counter[str]:
    return Counter({name: getattr(engine.statistics, name) for name in _SUMMED})


def observe_engines(engines: ServedEngines, meter: Meter | None = None) -> None:
    meter = meter or metrics.get_meter("headrace")
    for name, unit, description, field in _GAUGES:
        meter.create_observable_gauge(name, _callbacks(partial(_loads, engines, field)), unit, description)
    for name, unit, description, field in _COUNTERS:
        meter.create_observable_counter(name, _callbacks(partial(_totals, engines, field)), unit, description)
    meter.create_observable_counter(
        "headrace.engine.restarts",
        _callbacks(engines.restarts),
        "{restart}",
        "How often an engine's process ended and was replaced.",
    )
    meter.create_observable_gauge(
        "headrace.prefix_cache.hit_ratio",
        _callbacks(partial(_hit_ratios, engines)),
        "1",
        "Share of the prompts' tokens that were found in the cache, since the start.",
    )


def _callbacks(
    values: Callable[[], Mapping[str, float]],
) -> Sequence[Callable[[CallbackOptions], Iterable[Observation]]]:
    """Observes values by model."""
    return [lambda _: [Observation(value, {MODEL: name}) for name, value in values().items()]]


def _loads(engines: ServedEngines, field: str) -> dict[str, float]:
    return {name: getattr(load, field) for name, load in engines.loads().items()}


def _totals(engines: ServedEngines, field: str) -> dict[str, float]:
    return {name: totals[field] for name, totals in engines.totals().items()}


def _hit_ratios(engines: ServedEngines) -> dict[str, float]:
    served = engines.loads()
    return {
        name: totals["cached_tokens"] / max(1, totals["prompt_tokens"])
        for name, totals in engines.totals().items()
        if name in served
    }
