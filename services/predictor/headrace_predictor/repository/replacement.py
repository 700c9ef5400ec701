"""Replaces the engine process of a model whenever it ends.

`watch` is the task of one served model. It ends when the model is loaded or unloaded otherwise, and with
EngineDeadError when a model that runs in the predictor's own process can serve no more.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from headrace.errors import StartupError
from headrace_predictor.engine.interface import EngineProcessError
from headrace_predictor.generation.served_engines import ServedEngines
from headrace_predictor.repository.adapters import until_served
from headrace_predictor.repository.entry import Entry, State
from headrace_predictor.repository.lease import Serving

logger = logging.getLogger(__name__)


class Repository(Protocol):
    """What a replacement needs of the models' repository (repository.py)."""

    engines: ServedEngines
    watchers: set[Callable[[], None]]

    @property
    def ending(self) -> bool: ...

    async def changed(self) -> None: ...

    async def rebuild(self, entry: Entry) -> Serving: ...

    async def serve(self, entry: Entry, serving: Serving) -> None: ...


async def watch(repository: Repository, entry: Entry) -> None:
    while entry.serving is not None:
        try:
            await entry.serving.model.died()
        except EngineProcessError as death:
            await _replace(repository, entry, death)


async def _replace(repository: Repository, entry: Entry, death: EngineProcessError) -> None:
    """Returns when another engine process serves the model, or another load or unload has begun.

    An adapter waits for the engine of its base, which is replaced by the base's own task.
    """
    name = entry.source.name
    serving, entry.serving = entry.serving, None
    entry.set(State.LOADING, f"{death}; another one is started")
    await repository.changed()
    if serving is not None:
        repository.engines.remove(serving.model)
    if entry.base is None:
        repository.engines.restarting(name)
    while not repository.ending:
        if delay_s := entry.backoff.delay_s():
            logger.warning("model %s: its engine is started again in %.1f s", name, delay_s)
            await asyncio.sleep(delay_s)
        if entry.base is not None:
            await until_served(entry.base, repository.watchers)
        async with entry.turn:
            if entry.state is State.READY:
                return
            try:
                new = await repository.rebuild(entry)
            except StartupError as error:
                entry.backoff.failed()
                logger.error("model %s: its engine cannot be started again: %s", name, error)
                entry.set(State.LOADING, f"{error}; its engine is started again")
            else:
                logger.warning("model %s: another engine serves it", name)
                await repository.serve(entry, new)
                return
