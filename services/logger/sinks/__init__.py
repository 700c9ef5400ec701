"""Sinks: where every record goes on to from the store, each at its own pace.

`sink.py` says what a sink is, `runner.py` brings the records to one, `cloud_events.py` is one.
"""

from __future__ import annotations

from collections.abc import Mapping

from millrace.errors import StartupError
from millrace.rpc.server import Server
from services.logger.settings import LoggerSettings
from services.logger.store.store import Store
from services.logger.telemetry import Sending


async def start_sinks(settings: LoggerSettings, store: Store, server: Server) -> Mapping[str, Sending]:
    """Has the server send to every sink of the settings, from now on and until it stops; returns who does, by name."""
    if not settings.sinks:
        return {}
    # An HTTP client, for those who need one.
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
