"""The engines behind the models that are served, for those who watch them from other threads.

Models come and go; what was counted of one stays counted: it goes on where its name left off, should it come
back. What an engine had counted before it was served, to prove that it works, is left out.
"""

from __future__ import annotations

import threading
from operator import add, sub
from typing import NamedTuple

from services.predictor.engine.interface import Engine, EngineLoad, EngineTotals
from services.predictor.generation.model import GenerationModel
from services.predictor.models.served_model import ServedModel


class _Served(NamedTuple):
    engine: Engine
    before: EngineTotals

    @property
    def counted(self) -> EngineTotals:
        return EngineTotals(*map(sub, self.engine.load.totals, self.before))


class ServedEngines:
    """Thread-safe. Models that have no engine are passed over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: dict[str, _Served] = {}
        self._ended: dict[str, EngineTotals] = {}  # Of those that are served no more, by their names.

    def add(self, model: ServedModel) -> None:
        """Watches a model's engine from now on."""
        if isinstance(model, GenerationModel):
            with self._lock:
                self._end(model.name)
                self._served[model.name] = _Served(model.engine, model.engine.load.totals)

    def remove(self, model: ServedModel) -> None:
        """Keeps of a model that has been closed what its engine counted."""
        if isinstance(model, GenerationModel):
            with self._lock:
                served = self._served.get(model.name)
                if served is not None and served.engine is model.engine:
                    self._end(model.name)

    def loads(self) -> dict[str, EngineLoad]:
        """What each model's engine has to do now."""
        with self._lock:
            served = dict(self._served)
        return {name: each.engine.load for name, each in served.items()}

    def totals(self) -> dict[str, EngineTotals]:
        """What was counted of each model that is or was served."""
        with self._lock:
            served, totals = dict(self._served), dict(self._ended)
        for name, each in served.items():
            totals[name] = _sum(totals.get(name, EngineTotals()), each.counted)
        return totals

    def _end(self, name: str) -> None:
        served = self._served.pop(name, None)
        if served is not None:
            self._ended[name] = _sum(self._ended.get(name, EngineTotals()), served.counted)


def _sum(one: EngineTotals, other: EngineTotals) -> EngineTotals:
    return EngineTotals(*map(add, one, other))
