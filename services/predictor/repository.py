"""The models that are served, and the state of each: loading, ready, or gone with what runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import torch

from millrace.errors import NotFoundError, NotReadyError
from millrace.model_sources import ModelSource
from millrace.threads import run_in_daemon_thread
from services.predictor.loading import load
from services.predictor.served_model import VERSION, ServedModel
from services.predictor.settings import PredictorSettings
from services.predictor.weights import choose_device


class ModelRepository:
    """Owned by the event loop; loading runs on a thread of its own."""

    def __init__(self, settings: PredictorSettings) -> None:
        self._settings = settings
        self._models: dict[str, ServedModel] = {}
        self._progress = {source.name: "waiting to be loaded" for source in settings.models}
        self.sources: Sequence[ModelSource] = settings.models

    async def load_all(self) -> None:
        """Loads every model and tries each once; raises StartupError."""
        torch.set_num_threads(self._settings.threads or max(1, torch.get_num_threads() - 1))
        device = choose_device(self._settings.device)
        for source in self.sources:
            report = partial(self._progress.__setitem__, source.name)
            loading = partial(load, source, self._settings, device, report)
            model = await run_in_daemon_thread(f"load-{source.name}", loading)
            await model.warm_up()
            self._models[source.name] = model

    async def engine_death(self) -> None:
        """Waits until one of the models can serve no more, then raises a group with its EngineDeadError."""
        async with asyncio.TaskGroup() as group:
            for model in self._models.values():
                group.create_task(model.died())

    @property
    def ready(self) -> bool:
        return len(self._models) == len(self.sources)

    def is_ready(self, name: str, version: str = "") -> bool:
        return name in self._models and version in ("", VERSION)

    def progress(self, name: str) -> str:
        """How far the loading of a model is; empty once it is ready."""
        return "" if name in self._models else self._progress[name]

    def get(self, name: str, version: str = "") -> ServedModel:
        """The model; raises NotFoundError, or NotReadyError while it loads."""
        if not any(source.name == name for source in self.sources):
            raise NotFoundError(f"no model {name!r}")
        if version not in ("", VERSION):
            raise NotFoundError(f"model {name!r} has no version {version!r}, only {VERSION}")
        if name not in self._models:
            raise NotReadyError(f"model {name!r} is not ready: {self.progress(name)}")
        return self._models[name]

    async def close(self) -> None:
        for model in self._models.values():
            await asyncio.to_thread(model.close)
