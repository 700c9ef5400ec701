"""The gRPC server that every service runs: start, health, reflection, orderly stop.

Life of a service: `Server(...)`, register servicers, perhaps `add_port` for another protocol, `await run()`. `run`
returns after SIGTERM or SIGINT: health is NOT_SERVING, the drain has ended, calls in flight have ended or used up the
drain time, and every background task has been cancelled and awaited. After RETIRE (listeners.py) it accepts no new
calls, and returns when those in flight have ended, however long they take. If the event loop does not answer for
`loop_timeout_s`, the process ends with every thread's traceback.
"""

import asyncio
import gc
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Protocol

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection as reflection_v1alpha
from grpc_reflection.v1alpha import reflection_pb2 as reflection_v1alpha_pb2
from grpc_reflection.v1alpha import reflection_pb2_grpc as reflection_v1alpha_grpc

from headrace.rpc.limits.admission import Admission
from headrace.rpc.limits.byte_budget import MESSAGE_OPTIONS
from headrace.rpc.server.call_telemetry import ServerTelemetry
from headrace.rpc.server.handlers import Interceptor
from headrace.rpc.server.listeners import RETIRE, Listeners, report_listening
from headrace.rpc.server.watchdog import LoopWatchdog, watch_loop_lag
from headrace.settings import ServiceSettings
from headrace.telemetry.page import MetricsPage
from headrace_protos import reflection_v1_pb2

logger = logging.getLogger(__name__)

MAX_METADATA_BYTES = 64 * 1024  # Of one call's headers.
_LEAST_S = 0.5  # What was ended at the end of the drain must still be sent.
_CALLS_SHARE = 0.9  # Of that time.
_NEVER_S = 10.0**6  # Who retires a process bounds that.

_LISTENERS = 8  # See listeners.py.
_STREAM_WINDOW_BYTES = 512 * 1024  # What gRPC buffers of a message before it is read; as Envoy's.
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *MESSAGE_OPTIONS,
    ("grpc.http2.lookahead_bytes", _STREAM_WINDOW_BYTES),
    # Envoy's pings on idle connections must not be taken for abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Calls of strangers come by one connection, and gRPC keeps a header that it could not parse in the table that they
    # share: every later call with a header of that name would fail. So there is no table.
    ("grpc.http2.hpack_table_size.decoder", 0),
    # Above what the gateway lets pass, which is 16 KiB and what it adds. One limit, for between a soft and a hard one
    # gRPC refuses by chance.
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
)


class OtherPort(Protocol):
    """A server of another protocol, which starts and stops with this one; see headrace/rpc/http2/server.py."""

    async def start(self, host: str, port: int) -> int: ...

    async def stop(self, grace_s: float) -> None: ...


class Server:
    """gRPC on one port with health, reflection, error mapping and telemetry.

    `hop` signs the errors; reflection lists `public_services`, health and itself. A port that is taken is an error,
    unless the settings say that others may listen on it: then a parent has reserved the port. `admission` limits the
    calls in flight; by default these are not counted.
    """

    def __init__(
        self,
        hop: str,
        settings: ServiceSettings,
        public_services: Iterable[str] = (),
        admission: Admission | None = None,
    ) -> None:
        self._host = settings.host
        self._address = f"{settings.host}:{settings.port}"
        self._metrics_port = settings.metrics_port
        self._drain_s = settings.drain_s
        self._loop_timeout_s = settings.loop_timeout
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        # Set when the stop begins; a call that has no end of its own ends on it, or it would use up the drain.
        self.stopping = asyncio.Event()
        self._ends_soon = asyncio.Event()  # Not set by RETIRE.
        self._retiring: asyncio.Task[None] | None = None
        self._page: MetricsPage | None = None
        self._shares_port = settings.listen != "alone"
        self._at_drain: list[Callable[[float], Awaitable[None]]] = []
        self._at_stop: list[Callable[[], Awaitable[None]]] = []
        self._admission = admission or Admission.of(settings)
        self.limits = self._admission.limits  # What clients may do in a minute, as this process counts it.
        self.interceptor = Interceptor(hop, self._admission, ServerTelemetry())
        self.grpc = Listeners(_LISTENERS, (self.interceptor,), SERVER_OPTIONS, self._shares_port)
        self._others: list[tuple[OtherPort, int]] = []
        self.health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        add_reflection(self.grpc, public_services)

    async def set_serving(self, name: str, serving: bool) -> None:
        """Sets the health status of `name`; ignored after the stop has begun."""
        status = health_pb2.HealthCheckResponse
        await self.health.set(name, status.SERVING if serving else status.NOT_SERVING)

    def own(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Runs a background task until the stop; if it fails, the process ends non-zero."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def add_port(self, other: OtherPort, port: int) -> None:
        """Has another server listen on a port of its own, for as long as this one does."""
        self._others.append((other, port))

    def at_drain(self, drain: Callable[[float], Awaitable[None]]) -> None:
        """Registers a step that runs after health reports NOT_SERVING and before the server stops: it has so many
        seconds, in which calls are still accepted."""
        self._at_drain.append(drain)

    def at_stop(self, close: Callable[[], Awaitable[None]]) -> None:
        """Registers what is closed after the last call, in reverse order."""
        self._at_stop.append(close)

    async def run(self) -> None:
        """Serves until SIGTERM, SIGINT or RETIRE; raises what ended a background task."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._end_soon)
        loop.add_signal_handler(RETIRE, self.stopping.set)
        port = self.grpc.add_insecure_port(self._address)
        # What was imported stays: a collection that looks at all of it holds up every stream for a tenth of a second.
        gc.collect()
        gc.freeze()
        if self._metrics_port:
            self._page = MetricsPage(self._host, self._metrics_port, shares_port=self._shares_port)
        watchdog = LoopWatchdog(loop, self._loop_timeout_s)
        self.own("loop-lag", watch_loop_lag())
        try:
            for other, other_port in self._others:
                await other.start(self._host, other_port)
            await self.grpc.start()
            logger.info("listening on %s", self._address.rsplit(":", 1)[0] + f":{port}")
            report_listening()
            await self.stopping.wait()
            if not self._ends_soon.is_set():
                await self._close_page()  # The successor's is the one to read.
                await self._retire()
            await self._shut_down()
        finally:
            watchdog.close()
            await self._close_page()
        if self._failure is not None:
            raise self._failure

    async def _close_page(self) -> None:
        page, self._page = self._page, None
        if page is not None:
            await asyncio.to_thread(page.close)

    def _end_soon(self) -> None:
        self._ends_soon.set()
        self.stopping.set()

    async def _retire(self) -> None:
        """Accepts no new call; returns when those in flight have ended or SIGTERM requests the ordinary stop.

        Health does not change: a probe on an old connection is about the port, which the successor serves.
        """
        logger.info("a successor has taken over: calls in flight may end")
        # Where it has not ended by then, the drain's own stop shortens it.
        stopped = self._retiring = asyncio.create_task(self._stop_calls(_NEVER_S), name="calls in flight")
        shortened = asyncio.create_task(self._ends_soon.wait(), name="a stop")
        await asyncio.wait((stopped, shortened), return_when=asyncio.FIRST_COMPLETED)
        shortened.cancel()

    async def _shut_down(self) -> None:
        logger.info("stopping: calls in flight have %.0f s", self._drain_s)
        await self.health.enter_graceful_shutdown()
        ends_at = time.monotonic() + self._drain_s
        for drain in self._at_drain:
            try:
                await drain(self._drain_s)
            except Exception:
                # The stop goes on, whatever happens.
                logger.exception("draining failed")
        left_s = max(_LEAST_S, ends_at - time.monotonic())
        stopped = asyncio.create_task(self._stop_calls(left_s))
        # The remaining calls end with the reason, and have the rest of the time to send it.
        await asyncio.wait((stopped,), timeout=_CALLS_SHARE * left_s)
        self._admission.cut_off()
        await stopped
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for close in reversed(self._at_stop):
            await close()
        logger.info("stopped")

    async def _stop_calls(self, grace_s: float) -> None:
        await asyncio.gather(self.grpc.stop(grace_s), *(other.stop(grace_s) for other, _ in self._others))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() and task.cancelling():
            return  # Somebody wanted it.
        # A call that is cancelled from elsewhere ends the task that awaits it as cancelled too, without a word.
        error = RuntimeError(f"task {task.get_name()} was cancelled") if task.cancelled() else task.exception()
        if error is not None:
            logger.critical("task %s failed", task.get_name(), exc_info=error)
            self._failure = error
            self._end_soon()


class HealthServicer(health.aio.HealthServicer):
    """grpcio-health-checking's, with the method that it lacks."""

    async def List(self, request: Any, context: Any) -> Any:  # noqa: N802  # The method's name.
        """Every name that Check knows, with its status."""
        answer = health_pb2.HealthCheckResponse
        statuses = {name: answer(status=status) for name, status in self._server_status.items()}  # type: ignore[attr-defined]
        return health_pb2.HealthListResponse(statuses=statuses)  # type: ignore[attr-defined]


class _SymbolPool:
    """The default pool of descriptors, which also finds the files of methods: clients look these up by name."""

    def __init__(self) -> None:
        self._pool = descriptor_pool.Default()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:  # noqa: N802
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._pool.FindMethodByName(symbol).containing_service.file


def add_reflection(server: Listeners, public_services: Iterable[str]) -> None:
    """Serves reflection v1alpha and v1, whose messages are the same under two package names."""
    v1 = reflection_v1_pb2.DESCRIPTOR.services_by_name["ServerReflection"].full_name
    names = (*public_services, health.SERVICE_NAME, reflection_v1alpha.SERVICE_NAME, v1)
    servicer = reflection_v1alpha.aio.ReflectionServicer(names, _SymbolPool())
    reflection_v1alpha_grpc.add_ServerReflectionServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_v1alpha_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_v1alpha_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(v1, {"ServerReflectionInfo": method}),))
