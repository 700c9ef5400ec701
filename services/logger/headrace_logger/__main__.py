"""Starts the logger: the store, its gRPC services, retention, and health: SERVING while records can be committed.

With `export`, `backup` or `restore` as its first argument it runs that command instead.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable

from headrace.errors import NotReadyError
from headrace.rpc.server.server import Server
from headrace.rpc.server.service import run_service
from headrace_logger.gateway_calls import GatewayCalls
from headrace_logger.retention import Retention
from headrace_logger.servicer import PAYLOAD_LOG, PayloadIngestServicer, PayloadLogServicer
from headrace_logger.settings import LoggerSettings
from headrace_logger.sinks import observe_sinks, start_sinks
from headrace_logger.store.store import Store
from headrace_logger.tails import Tails
from headrace_protos import headrace_pb2_grpc

logger = logging.getLogger(__name__)

_PROBE_S = 5.0
_READS = "reads"  # Health by this name: the log can be read, even while nothing can be committed. Envoy's check.


async def serve(settings: LoggerSettings) -> None:
    """Serves the payload log until SIGTERM."""
    server = Server("logger", settings, [PAYLOAD_LOG])
    store = Store(settings.database_url or settings.database, settings.fsync)
    server.at_stop(store.close)
    tails = Tails(store)
    ingest = PayloadIngestServicer(store, server.stopping)
    PayloadLogServicer(store, tails).add_to(server.grpc)
    headrace_pb2_grpc.add_PayloadIngestServicer_to_server(ingest, server.grpc)
    GatewayCalls(store).add_to(server.grpc)
    sinks = await start_sinks(settings, store, server)
    retention = Retention(
        store, settings.retention_days, settings.max_size, tuple(sinks), usage_days=settings.usage_days
    )
    observe_sinks(sinks)
    refused = await _report_health(server, store)
    server.own("store probe", _probe(server, store, refused))
    server.own("retention", retention.run())
    server.own("end of tails", _end_tails(server, tails))
    await server.run()


async def _report_health(server: Server, store: Store, refused: str | None = None) -> str | None:
    """Sets the health by two probes; returns why nothing can be committed, if so."""
    before, refused = refused, await _refusal(store.check())
    for name in ("", PAYLOAD_LOG):
        await server.set_serving(name, refused is None)
    await server.set_serving(_READS, await _refusal(store.check_reading()) is None)
    if refused != before:
        logger.error("NOT_SERVING: %s", refused) if refused else logger.warning("SERVING again")
    return refused


async def _refusal(check: Awaitable[None]) -> str | None:
    try:
        await check
    except NotReadyError as error:
        reason = getattr(error.__cause__, "orig", None)
        return error.message + (f": {' '.join(str(reason).split())}" if reason else "")
    return None


async def _probe(server: Server, store: Store, refused: str | None) -> None:
    while True:
        await asyncio.sleep(_PROBE_S)
        refused = await _report_health(server, store, refused)


async def _end_tails(server: Server, tails: Tails) -> None:
    await server.stopping.wait()
    tails.end()


if __name__ == "__main__":
    command, *arguments = sys.argv[1:] or ("",)
    if command == "export":
        from headrace_logger.export.export import main as export

        sys.exit(export(arguments))
    if command in ("backup", "restore"):
        from headrace_logger.backup import main as copy

        sys.exit(copy(command, arguments))
    run_service("logger", LoggerSettings, serve)
