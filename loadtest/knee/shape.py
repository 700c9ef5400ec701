"""The shape of load that searches for the knee, one kind of user after another.

At each level the first seconds do not count. Locust calls `tick` once a second. The search ends the test; its reports
are then in `--knee-folder`.
"""

import logging
import time
from pathlib import Path
from typing import Any, TypeAlias

from locust import LoadTestShape
from locust.runners import MasterRunner

from loadtest.knee.search import Knee, KneeSearch, Level, measured, write
from loadtest.session import Session, session_of

_log = logging.getLogger(__name__)

_WARM_UP_S = 4
# Workers report every three seconds.
_WORKERS_DELAY_S = 5
_SPAWN_RATE = 100.0

Tick: TypeAlias = tuple[int, float, list[Any]] | None


class KneeShape(LoadTestShape):
    """`--users` is where it starts; the form's other fields are those of any test."""

    use_common_options = True

    def reset_time(self) -> None:
        """A new test begins."""
        super().reset_time()
        self._waiting: list[Any] | None = None
        self._knees: list[Knee] = []
        self._search: KneeSearch | None = None

    def tick(self) -> Tick:
        if self._waiting is None:
            # The test starts after this, and reads the form then.
            self._session.read_options()
            self._waiting = sorted(self._environment.user_classes, key=lambda kind: kind.__name__)
        if self._search is None and not self._next_kind():
            self._finish()
            return None
        search = self._search
        if search is not None:
            self._continue(search)
            if search.done:
                self._knees.append(Knee(self._kind.__name__, self._kind.row, search.knee, search.bounded, self._levels))
                self._search = None
                return self.tick()
            return search.level, _SPAWN_RATE, [self._kind]
        return None

    @property
    def _environment(self) -> Any:
        return self.runner.environment if self.runner is not None else None

    @property
    def _session(self) -> Session:
        return session_of(self._environment)

    def _next_kind(self) -> bool:
        if not self._waiting:
            return False
        self._kind = self._waiting.pop(0)
        options = self._session.options
        start = min(int(self._environment.parsed_options.num_users or 1), options.knee_most)
        self._search = KneeSearch(max(1, start), options.knee_most, options.knee_precision / 100)
        self._levels: list[Level] = []
        self._began: int | None = None
        return True

    def _continue(self, search: KneeSearch) -> None:
        """Ends the level if it has been measured."""
        runner = self.runner
        if runner is None or runner.user_count != search.level:
            self._began = None
            self._say(search)
            return
        now = int(time.time())
        if self._began is None:
            self._began = now
        options = self._session.options
        since = self._began + _WARM_UP_S
        until = since + options.knee_seconds
        if now < until + (_WORKERS_DELAY_S if isinstance(runner, MasterRunner) else 0):
            return
        level = measured(self._session.measures.window(since, until), search.level, until - since, options.good_percent)
        self._levels.append(level)
        _log.info("knee of %s: %s", self._kind.__name__, level)
        search.record(level.held)
        self._began = None
        self._say(search)

    def _say(self, search: KneeSearch) -> None:
        above = f", broke at {search.broken}" if search.broken else ""
        self._session.knee = (
            f"Knee of {self._kind.__name__}: held {search.knee}{above}; measuring {search.level} users."
        )

    def _finish(self) -> None:
        session, given = self._session, self._environment.parsed_options
        options = session.options
        load = (
            f"open, {given.arrivals} requests/s a user"
            if given.arrivals
            else f"closed, {given.think_time} s think time"
        )
        conditions = {
            "objective": str(options.objective),
            "good_percent": options.good_percent,
            "model": given.model,
            "load": load,
            "output_tokens": given.output_tokens,
            "prompts": given.prompts_file or given.prompt_words or "examples",
            "kills_per_minute": options.kills_per_minute,
            "seconds_a_level": options.knee_seconds,
        }
        paths = write(Path(given.knee_folder), conditions, self._knees)
        session.knee = "; ".join(f"knee of {knee.user}: {knee.knee} users" for knee in self._knees)
        _log.info("%s", session.knee)
        _log.info("reports: %s", ", ".join(map(str, paths)))
