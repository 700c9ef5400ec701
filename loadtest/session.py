"""What one process of the load test shares among its users: options, figures, models, requests in flight.

`session_of` gives the one of a Locust environment. Options are read anew at each start of a test. Everything runs in
gevent's greenlets of one thread.
"""

# ruff: noqa: S311  (random numbers here are not secrets)
import logging
import random
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import gevent
from gevent.lock import BoundedSemaphore
from locust.runners import WorkerRunner

from loadtest.figures import GAP, PROCESSOR_FULL, TTFT, Figures
from loadtest.gateway import Gateway, GatewayError, PredictorState, parse_address
from loadtest.measures import Measures
from loadtest.options import Options, parse
from loadtest.prompts import Prompt, replayed

_log = logging.getLogger(__name__)

DEFAULT_HOST = "http://127.0.0.1:8080"
WORKERS_DELAY_S = 4  # They report every three seconds.
_COURSE_S = 12 * 3600
_PROCESSOR_INTERVAL_S = 2.0
_PREDICTORS_INTERVAL_S, _KEPT_READINGS = 1.0, 900
_REPLAYED_RECORDS = 1000
_RECORDS_TIMEOUT_S = 15.0
_SHOWN = 1000
_ATTRIBUTE = "headrace_session"


class Session:
    """`in_flight`: ids of the requests that stream now. `course`: the points of the page's charts, by second.

    `predictors`: what the predictors reported in a second of the clock, oldest first, without seconds in which the
    gateway did not answer. `shown`: ids of the slow requests on the page. `knee`: the state of the search for it, in
    words.
    """

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.measures = Measures()
        self.in_flight: set[str] = set()
        self.options: Options = parse(environment.parsed_options)
        self.predictors: deque[tuple[int, dict[str, PredictorState]]] = deque(maxlen=_KEPT_READINGS)
        self.course: dict[int, dict[str, Any]] = {}
        self.shown: deque[str] = deque(maxlen=_SHOWN)
        self.knee = ""
        self.trace_page = ""
        self._names: dict[bool, str] = {}
        self._schedule: list[tuple[float, Prompt]] = []
        self._schedule_lock = BoundedSemaphore()
        self._background: list[gevent.Greenlet] = []

    @property
    def gateway(self) -> Gateway:
        return Gateway(parse_address(self.host), self.options.key)

    @property
    def host(self) -> str:
        host: str = self.environment.host or DEFAULT_HOST
        return host

    def start(self) -> None:
        """At the start of a test, before its users; raises ValueError for a malformed option."""
        self.stop()
        self.read_options()
        self.measures.reset()
        self.in_flight.clear()
        self.predictors.clear()
        self.course.clear()
        self._names.clear()
        self._schedule.clear()
        if not isinstance(self.environment.runner, WorkerRunner):
            self._background.append(gevent.spawn(self._watch_predictors))
        self._background.append(gevent.spawn(self._watch_processor))
        if self.options.kills_per_minute and getattr(self.environment.runner, "worker_index", 0) == 0:
            self._background.append(gevent.spawn(self._kill_predictors))

    def read_options(self) -> None:
        """As the form has them now; raises ValueError for a malformed one."""
        self.options = parse(self.environment.parsed_options)

    def stop(self) -> None:
        gevent.killall(self._background)
        self._background.clear()

    def model_name(self, *, text: bool) -> str:
        """The form's model; without one the first that takes prompts, or else the last one of the stack.

        Raises GatewayError without a model that fits.
        """
        if self.options.model:
            return self.options.model
        if text not in self._names:
            gateway = self.gateway
            names = gateway.generation_models() if text else gateway.models()
            if not names:
                raise GatewayError("the stack has no model that takes prompts" if text else "the stack has no model")
            self._names[text] = names[0] if text else names[-1]
        return self._names[text]

    def schedule(self) -> list[tuple[float, Prompt]]:
        """The newest requests of the payload log, oldest first, with their seconds since the first one.

        Raises GatewayError if the log cannot be read or has none.
        """
        with self._schedule_lock:
            if not self._schedule:
                gateway = Gateway(parse_address(self.host), self.options.key, _RECORDS_TIMEOUT_S)
                self._schedule = replayed(gateway.records(page_size=str(_REPLAYED_RECORDS)))
        if not self._schedule:
            raise GatewayError("the payload log has no request with a prompt")
        return self._schedule

    def _watch_processor(self) -> None:
        """Notes how much of the time this process computes, or waits to compute."""
        warned = False
        while True:
            began, used = time.perf_counter(), processor_demand_s()
            gevent.sleep(_PROCESSOR_INTERVAL_S)
            share = (processor_demand_s() - used) / (time.perf_counter() - began)
            figures: Figures = self.measures.current()
            figures.processor = max(figures.processor, share)
            if share >= PROCESSOR_FULL and not warned:
                warned = True
                _log.warning(
                    "this Locust process has no processor time left: its own delay is part of what it measures"
                )

    def _watch_predictors(self) -> None:
        try:
            self.trace_page = self.gateway.trace_page()
        except (GatewayError, ValueError):
            self.trace_page = ""
        while True:
            second = int(time.time())
            with suppress(GatewayError):
                if states := self.gateway.predictors():
                    self.predictors.append((second, states))
            self.note_course()
            gevent.sleep(_PREDICTORS_INTERVAL_S)

    def note_course(self) -> None:
        """Adds the finished seconds to the course, which outlives their figures; late reports change the newest."""
        states = {second: states.values() for second, states in self.predictors}
        changing = int(time.time()) - 2 * WORKERS_DELAY_S
        for second, found in self.measures.seconds.items():
            if second in self.course and second < changing:
                continue
            now = states.get(second)
            self.course[second] = {
                "second": second,
                "ttft": found.of(TTFT).quantiles((0.5, 0.99)),
                "gap": found.of(GAP).quantiles((0.5, 0.99)),
                **found.rates(1),
                "running": sum(state.running for state in now) if now else None,
                "waiting": sum(state.waiting for state in now) if now else None,
                "cache": 100 * max(state.cache for state in now) if now else None,
            }
        while len(self.course) > _COURSE_S:
            del self.course[min(self.course)]

    def _kill_predictors(self) -> None:
        """Kills the predictor of a random stream, at random times."""
        while True:
            gevent.sleep(random.expovariate(self.options.kills_per_minute / 60))
            if not self.in_flight:
                continue
            try:
                self.gateway.kill_predictor_of(random.choice(tuple(self.in_flight)))
                _log.info("killed a predictor")
            except GatewayError as error:
                _log.warning("no predictor was killed: %s", error)


def processor_demand_s() -> float:
    """The seconds for which this process's main thread has run, or was ready to run; elsewhere than on Linux it ran."""
    try:
        running, ready, _ = Path("/proc/self/schedstat").read_text().split()
    except (OSError, ValueError):
        return time.process_time()
    return (int(running) + int(ready)) / 1e9


def session_of(environment: Any) -> Session:
    """The session of this process; the first call makes it."""
    session = getattr(environment, _ATTRIBUTE, None)
    if session is None:
        session = Session(environment)
        setattr(environment, _ATTRIBUTE, session)
    return session
