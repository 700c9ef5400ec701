"""The shape of load that searches for the knee, one kind of user after another.

At each level the first seconds do not count; a level that is lost ends early. Locust calls `tick` once a second. The
search ends the test; its reports are then in `--knee-folder`.
"""

import logging
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from locust import LoadTestShape
from locust.runners import MasterRunner

from loadtest.knee.search import Knee, KneeSearch, Level, is_lost, measured, write
from loadtest.session import Session, session_of

_log = logging.getLogger(__name__)

_WARM_UP_S = 4
# Workers report every three seconds.
_WORKERS_DELAY_S = 5
_SPAWN_RATE = 100.0

Tick: TypeAlias = tuple[int, float, list[Any]]


class KneeShape(LoadTestShape):
    """`--users` is where it starts; the form's other fields are those of any test."""

    use_common_options = True

    def reset_time(self) -> None:
        """A new test begins."""
        super().reset_time()
        self._ticks = self._search_all()

    def tick(self) -> Tick | None:
        return next(self._ticks, None)

    def _search_all(self) -> Iterator[Tick]:
        """The ticks of a test, at whose end the reports are written."""
        environment: Any = self.runner.environment
        session = session_of(environment)
        session.read_options()  # The test starts after this, and reads the form then.
        options, knees = session.options, list[Knee]()
        start = max(1, min(int(environment.parsed_options.num_users or 1), options.knee_most))
        for kind in sorted(environment.user_classes, key=lambda kind: kind.__name__):
            search, levels = KneeSearch(start, options.knee_most, options.knee_precision / 100), list[Level]()
            while not search.done:
                levels.append((yield from self._measured(session, kind, search)))
                _log.info("knee of %s: %s", kind.__name__, levels[-1])
                search.record(levels[-1].held, levels[-1].lost)
            knees.append(Knee(kind.__name__, kind.row, search.knee, search.bounded, levels))
        session.knee = "; ".join(f"knee of {knee.user}: {knee.knee} users" for knee in knees)
        _log.info("%s", session.knee)
        paths = write(Path(environment.parsed_options.knee_folder), _conditions(session), knees)
        _log.info("reports: %s", ", ".join(map(str, paths)))

    def _measured(self, session: Session, kind: Any, search: KneeSearch) -> Generator[Tick, None, Level]:
        """The ticks until the search's level has been measured."""
        above = f", broke at {search.broken}" if search.broken else ""
        session.knee = f"Knee of {kind.__name__}: held {search.knee}{above}; measuring {search.level} users."
        runner, seconds, least_percent = self.runner, session.options.knee_seconds, session.options.good_percent
        delay_s = _WORKERS_DELAY_S if isinstance(runner, MasterRunner) else 0
        since: int | None = None
        while True:
            now = int(time.time())
            if runner.user_count != search.level:
                since = None
            elif since is None:
                since = now + _WARM_UP_S
            elif (until := min(now - delay_s, since + seconds)) > since:
                course = [session.measures.window(second, second + 1) for second in range(since, until)]
                lost = is_lost(course, seconds, least_percent)
                if lost or until == since + seconds:
                    found = session.measures.window(since, until)
                    return measured(found, search.level, until - since, least_percent, lost=lost)
            yield search.level, _SPAWN_RATE, [kind]


def _conditions(session: Session) -> dict[str, Any]:
    """What the reports say of the test."""
    options, given = session.options, session.environment.parsed_options
    is_open = f"open, {given.arrivals} requests/s a user"
    return {
        "objective": str(options.objective),
        "good_percent": options.good_percent,
        "model": given.model,
        "load": is_open if given.arrivals else f"closed, {given.think_time} s think time",
        "output_tokens": given.output_tokens,
        "prompts": given.prompts_file or given.prompt_words or "examples",
        "kills_per_minute": options.kills_per_minute,
        "seconds_a_level": options.knee_seconds,
    }
