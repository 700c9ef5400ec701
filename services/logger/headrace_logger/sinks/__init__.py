"""Sinks: receivers of every record of the store, each at its own pace.

`runner.py` delivers records to a sink; `cloud_events.py` and `otlp.py` implement sinks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from headrace.errors import StartupError
from headrace.rpc.server.server import Server
from headrace_logger.settings import LoggerSettings
from headrace_logger.store.store import Store

if TYPE_CHECKING:
    from headrace_logger.sinks.runner import Sink, SinkRunner

SINK = "headrace.sink"
OUTCOME = "headrace.outcome"


async def start_sinks(settings: LoggerSettings, store: Store, server: Server) -> Mapping[str, SinkRunner]:
    """Starts sending to every sink of the settings, until the server stops; returns the runners by sink name."""
    runners: dict[str, SinkRunner] = {}
    for sink in _sinks(settings):
        # These import an HTTP client, which only loggers with sinks need.
        from headrace_logger.sinks.runner import SinkRunner

        if sink.name in runners:
            raise StartupError(f"LOGGER_SINKS: {sink.name} is listed twice; remove one")
        runners[sink.name] = runner = SinkRunner(sink, store, settings)
        server.at_stop(runner.close)
        if store.database.is_shared:
            server.own(f"sink {sink.name}", runner.run_alone())
        else:
            await runner.start()
            server.own(f"sink {sink.name}", runner.run())
    return runners


def _sinks(settings: LoggerSettings) -> Iterator[Sink]:
    for url in settings.sinks:
        from headrace_logger.sinks.cloud_events import CloudEventsSink

        yield CloudEventsSink(str(url), settings)
    if settings.gen_ai_url:
        from headrace_logger.sinks.otlp import otlp_sink

        yield otlp_sink(settings)


def observe_sinks(sinks: Mapping[str, SinkRunner], meter: Meter | None = None) -> None:
    """Exports the lag of each sink, and the outcomes of its events, under its name."""

    def lags(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(sink.lag_s, {SINK: name}) for name, sink in sinks.items()]

    def outcomes(_: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(count, {SINK: name, OUTCOME: outcome})
            for name, sink in sinks.items()
            for outcome, count in sink.outcomes.items()
        ]

    meter = meter or metrics.get_meter("headrace")
    meter.create_observable_counter(
        "headrace.sink.events", [outcomes], "{event}", "Events of a sink by outcome; failed ones were abandoned."
    )
    meter.create_observable_gauge(
        "headrace.sink.lag",
        [lags],
        "s",
        "Time since the end of the oldest committed record that the sink has not accepted; 0: there is none.",
    )
