"""Sinks: where every record goes on to from the store, each at its own pace.

`sink.py` says what a sink is, `runner.py` brings the records to one, `cloud_events.py` is one.
"""

from __future__ import annotations

from millrace.errors import StartupError
from millrace.server import Server
from services.logger.settings import LoggerSettings
from services.logger.store import Store


async def start_sinks(settings: LoggerSettings, store: Store, server: Server) -> tuple[str, ...]:
    """Has the server send to every sink of the settings, from now on and until it stops; returns their names."""
    if not settings.sinks:
        return ()
    # An HTTP client, for those who need one.
    from services.logger.sinks.cloud_events import CloudEventsSink
    from services.logger.sinks.runner import SinkRunner

    names: set[str] = set()
    for url in settings.sinks:
        sink = CloudEventsSink(
            str(url),
            source=settings.sink_source,
            namespace=settings.sink_namespace,
            timeout_s=settings.sink_timeout_s,
            connections=settings.sink_concurrency,
        )
        if sink.name in names:
            raise StartupError(f"LOGGER_SINKS: {sink.name} is there twice")
        names.add(sink.name)
        from_beginning = settings.sink_from == "beginning"
        runner = SinkRunner(sink, store, concurrency=settings.sink_concurrency, from_beginning=from_beginning)
        server.at_stop(runner.close)
        await runner.start()
        server.own(f"sink {sink.name}", runner.run())
    return tuple(names)
