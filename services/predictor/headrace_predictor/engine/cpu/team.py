"""The threads that run passes together: the caller's and helpers that sleep while no pass comes."""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headrace_predictor.engine.cpu.decode import begin_pass, open_passes, state_of, take_part
from headrace_predictor.engine.state.cache import Array

logger = logging.getLogger(__name__)


class Team:
    """`threads` threads for a model of so many layers. Helpers are daemons: they end with the process."""

    def __init__(self, threads: int, layers: int) -> None:
        self._state = state_of(layers)
        self._model: Any = None
        self._wakes = [threading.Event() for _ in range(threads - 1)]
        for number, wake in enumerate(self._wakes, 1):
            threading.Thread(target=self._help, args=(wake,), name=f"compute-{number}", daemon=True).start()

    @contextmanager
    def awake(self, model: Any) -> Iterator[None]:
        """Wakes the helpers for the passes of a model in this block: see `take_part`."""
        self._model = model
        if self._wakes:
            open_passes(self._state, 1)
            for wake in self._wakes:
                wake.set()
        try:
            yield
        finally:
            open_passes(self._state, 0)
            self._model = None

    def run(self, kind: int, parameters: Array) -> None:
        """Runs a pass, inside `awake`."""
        self._take_part(begin_pass(self._state, kind, parameters), self._model)

    def _help(self, wake: threading.Event) -> None:
        while True:
            wake.wait()
            wake.clear()
            if (model := self._model) is not None:
                self._take_part(0, model)

    def _take_part(self, number: int, model: Any) -> None:
        """Ends the process if it fails, for lack of memory: the other threads would wait for this one's chunk."""
        try:
            take_part(self._state, number, model)
        except BaseException:
            logger.critical("a thread of the model failed", exc_info=True)
            os._exit(os.EX_SOFTWARE)
