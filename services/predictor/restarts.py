"""How often this predictor was started again without having been asked to end, counted over its lives.

A small file says whether a life goes on and how many ended by a kill, a crash or a watchdog. It belongs to one
predictor; what cannot be read counts as a first life. Where it cannot be written, the count is of what is known, and a
warning says so once.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Meter, Observation

logger = logging.getLogger(__name__)

_RUNS, _RESTARTS = "runs", "restarts"


class Restarts:
    """A life begins when this is made; without a `path` nothing is kept, and the count is 0.

    One that `takes_over` begins while the life before it goes on.
    """

    def __init__(self, path: Path | None, meter: Meter | None = None, takes_over: bool = False) -> None:
        self._path = path
        self._takes_over = takes_over
        self._has_warned = False
        self.count = self._read()
        self._write(runs=True)
        (meter or metrics.get_meter("millrace")).create_observable_counter(
            "millrace.engine.restarts",
            [self._observe],
            "{restart}",
            "How often this predictor was started again after it had ended without having been asked to.",
        )

    def end(self) -> None:
        """Notes that this life ends as it was asked to."""
        self._write(runs=False)

    def _read(self) -> int:
        """Of all lives before this one."""
        if self._path is None:
            return 0
        try:
            known = json.loads(self._path.read_bytes())
            return int(known[_RESTARTS]) + bool(known[_RUNS] and not self._takes_over)
        except FileNotFoundError:
            return 0
        except (OSError, ArithmeticError, ValueError, TypeError, KeyError) as error:
            self._warn(error)
            return 0

    def _write(self, runs: bool) -> None:
        if self._path is None:
            return
        new = self._path.with_name(self._path.name + ".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with new.open("w") as file:
                json.dump({_RUNS: runs, _RESTARTS: self.count}, file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("restarts may not be counted: %s: %s", self._path, error)

    def _observe(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(self.count)]
