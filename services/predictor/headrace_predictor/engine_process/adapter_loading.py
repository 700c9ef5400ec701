"""Loads and unloads the adapters of an engine process's model, on a thread of its own: files are read for seconds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.errors import StartupError
from headrace_predictor.generation.loaded_model import LoadedGeneration
from headrace_predictor.models.fingerprint import fingerprint_of
from headrace_predictor.models.startup_errors import as_startup_error
from headrace_protos import engine_pb2

logger = logging.getLogger(__name__)


class AdapterLoading:
    """Obeys the front's commands in their order."""

    def __init__(self, base: LoadedGeneration, send: Callable[[engine_pb2.EngineFrame], None]) -> None:
        self._base = base
        self._send = send
        self._thread = ThreadPoolExecutor(1, "adapters")

    def obey(self, commands: engine_pb2.EngineCommands) -> None:
        for adapter in commands.adapters:
            self._thread.submit(self._load, adapter)
        for number in commands.unloaded_adapters:
            self._thread.submit(self._unload, number)

    def _load(self, adapter: engine_pb2.AdapterToLoad) -> None:
        result = engine_pb2.AdapterLoaded(number=adapter.number)
        try:
            with as_startup_error(adapter.name):
                result.fingerprint = self._fingerprint(adapter)
        except StartupError as error:
            result.error, result.is_fault = str(error), error.is_fault
        self._send(engine_pb2.EngineFrame(adapters=[result]))

    def _fingerprint(self, adapter: engine_pb2.AdapterToLoad) -> str:
        """Loads an adapter; returns the fingerprint of the base with it; raises any error."""
        base, adapters = self._base, self._base.engine.adapters
        if adapters is None:
            runner = base.engine.description["runner"]
            raise ValueError(f"its base {base.name} has the runner {runner}, which supports no adapters; paged does")
        folder = Path(adapter.folder)
        adapters.load(adapter.number, folder)
        logger.info("model %s: an adapter of %s", adapter.name, base.name)
        return fingerprint_of(folder, base.dtype, adapter.is_local, base.fingerprint)

    def _unload(self, number: int) -> None:
        if self._base.engine.adapters is not None:
            self._base.engine.adapters.unload(number)
