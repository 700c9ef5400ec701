"""The engines of the served models, for threads that observe them.

Totals continue across loads and unloads: a model that is loaded again continues at the totals of its name. What an
engine counted while it was warmed up is excluded.
"""

from __future__ import annotations

import threading
from operator import add, sub
from typing import NamedTuple, TypeGuard

from headrace.telemetry.picking import PickableLoad
from headrace_predictor.engine.interface import Engine, EngineLoad, EngineTotals
from headrace_predictor.generation.model import AdapterModel, GenerationModel
from headrace_predictor.models.served_model import ServedModel


class _Served(NamedTuple):
    engine: Engine
    before: EngineTotals
    device_memory: int

    @property
    def counted(self) -> EngineTotals:
        return EngineTotals(*map(sub, self.engine.load.totals, self.before))


class ServedEngines:
    """Thread-safe. Of models without an engine of their own, it has the adapters' names: their bases compute them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: dict[str, _Served] = {}
        self._ended: dict[str, EngineTotals] = {}  # Totals of engines that are no longer served, by model name.
        self._restarts: dict[str, int] = {}
        self._adapters: frozenset[str] = frozenset()

    def add(self, model: ServedModel) -> None:
        """Starts to observe a model's engine."""
        if isinstance(model, AdapterModel):
            self._adapters |= {model.name}
        if _has_engine(model):
            with self._lock:
                self._end(model.name)
                self._served[model.name] = _Served(model.engine, model.engine.load.totals, model.loaded.device_memory)
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
        """The current load of each model's engine."""
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
        """The names of the adapters that are served."""
        return self._adapters

    def totals(self) -> dict[str, EngineTotals]:
        """The totals of each model that is or was served."""
        with self._lock:
            served, totals = dict(self._served), dict(self._ended)
        for name, each in served.items():
            totals[name] = _sum(totals.get(name, EngineTotals()), each.counted)
        return totals

    def _end(self, name: str) -> None:
        served = self._served.pop(name, None)
        if served is not None:
            self._ended[name] = _sum(self._ended.get(name, EngineTotals()), served.counted)


def _has_engine(model: ServedModel) -> TypeGuard[GenerationModel]:
    return isinstance(model, GenerationModel) and not isinstance(model, AdapterModel)


def _sum(one: EngineTotals, other: EngineTotals) -> EngineTotals:
    return EngineTotals(*map(add, one, other))
