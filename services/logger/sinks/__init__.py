"""Sinks: receivers of every record of the store, each at its own pace.

`sink.py` defines the interface, `runner.py` delivers records to a sink, `cloud_events.py` implements one.
"""

from __future__ import annotations

from collections.abc import Mapping

from millrace.errors import StartupError
from millrace.rpc.server import Server
from services.logger.settings import LoggerSettings
from services.logger.store.store import SqliteStore
from services.logger.telemetry import Sending


async def start_sinks(settings: LoggerSettings, store: SqliteStore, server: Server) -> Mapping[str, Sending]:
    """Starts sending to every sink of the settings, until the server stops; returns the runners by sink name."""
    if not settings.sinks:
        return {}
    # These import an HTTP client, which only loggers with sinks need.
    from services.logger.sinks.cloud_events import CloudEventsSink
    from services.logger.sinks.runner import SinkRunner

    runners: dict[str, SinkRunner] = {}
    for url in settings.sinks:
        sink = CloudEventsSink(
            str(url),
            source=settings.sink_source,
            namespace=settings.sink_namespace,
            timeout_s=settings.sink_timeout_s,
            connections=settings.sink_concurrency,
        )
        if sink.name in runners:
            raise StartupError(f"LOGGER_SINKS: {sink.name} is there twice")
        from_beginning = settings.sink_from == "beginning"
        runner = SinkRunner(sink, store, concurrency=settings.sink_concurrency, from_beginning=from_beginning)
        runners[sink.name] = runner
        server.at_stop(runner.close)
        await runner.start()
        server.own(f"sink {sink.name}", runner.run())
    return runners
