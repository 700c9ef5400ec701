"""Several processes of the transformer on the same ports, and the parent that keeps them running.

Tokenising holds the interpreter lock, so one process uses little more than one core for text. The parent reserves the
ports exclusively, which fails if one is taken, and then shares them with its workers (SO_REUSEPORT); it never listens.
A worker that ends is restarted; SIGTERM and SIGINT are passed on. If a worker's exit code means that a restart cannot
help, all end with that code.

Each worker is complete: it follows the predictor, ships its own records from its own folder in the spool and has its
own health. It listens once it can serve, so that no connection waits for a worker that is starting. Its Prometheus page
is on its own port, which the parent has reserved for it; the parent's page shows all of them.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress

from prometheus_client import CollectorRegistry

from headrace.rpc.server.listeners import RETIRE, reserved
from headrace.telemetry.page import MetricsPage, WorkerPages
from headrace_transformer.settings import TransformerSettings

logger = logging.getLogger(__name__)

_FIRST_DELAY_S, _MAX_DELAY_S, _STEADY_S = 0.2, 10.0, 30.0
_GRACE_S = 4.0  # Beyond the drain: for the records that are still to be shipped.


class _WorkerRefusedError(Exception):
    """A worker cannot run, and has logged the reason."""


async def supervise(settings: TransformerSettings) -> None:
    """Runs the workers until SIGTERM, SIGINT or RETIRE; raises StartupError, or SystemExit with a worker's refusal."""
    loop, is_shared = asyncio.get_running_loop(), settings.listen != "alone"
    with ExitStack() as held:
        port = held.enter_context(reserved(settings.host, settings.port, is_shared))
        http_port = held.enter_context(reserved(settings.host, settings.http_port, is_shared))
        environment = {**os.environ, "TRANSFORMER_PORT": str(port), "TRANSFORMER_HTTP_PORT": str(http_port)}
        pages = {str(number): held.enter_context(reserved("127.0.0.1", 0)) for number in range(settings.workers)}
        if settings.metrics_port:
            registry = CollectorRegistry()
            registry.register(WorkerPages(lambda: pages))
            page = MetricsPage(settings.host, settings.metrics_port, registry, is_shared)
            held.enter_context(closing(page))
        workers = _Workers(environment, settings.drain_s + _GRACE_S)

        def retire() -> None:
            held.close()  # The ports and the page are the successor's.
            workers.end(RETIRE)

        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, workers.end, signal.SIGTERM)
        loop.add_signal_handler(RETIRE, retire)
        try:
            async with asyncio.TaskGroup() as group:
                for worker, page_port in pages.items():
                    group.create_task(workers.keep(worker, page_port), name=f"worker-{worker}")
        except* _WorkerRefusedError:
            raise SystemExit(os.EX_CONFIG) from None


class _Workers:
    """Owned by the event loop."""

    def __init__(self, environment: Mapping[str, str], grace_s: float) -> None:
        self._environment = environment
        self._grace_s = grace_s
        self._ending = asyncio.Event()  # A worker that ends is not started again.
        self._order: signal.Signals | None = None  # The latest.
        self._processes: set[asyncio.subprocess.Process] = set()

    def end(self, order: signal.Signals) -> None:
        """Passes on SIGTERM, which has `grace_s`, or RETIRE, which lets the calls in flight end."""
        self._order = order
        self._ending.set()
        self._signal_all(order)
        if order is signal.SIGTERM:
            asyncio.get_running_loop().call_later(self._grace_s, self._signal_all, signal.SIGKILL)

    async def keep(self, worker: str, page: int) -> None:
        """One worker, started again until the parent is to end."""
        delay_s, is_first = _FIRST_DELAY_S, True
        while True:
            started = time.monotonic()
            exit_code = await self._run(page)
            if self._ending.is_set():
                return
            if exit_code == os.EX_CONFIG and is_first:
                raise _WorkerRefusedError
            is_first = False
            if time.monotonic() - started >= _STEADY_S:
                delay_s = _FIRST_DELAY_S
            logger.error("worker %s ended with exit code %d; starting it again in %.1f s", worker, exit_code, delay_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), delay_s)
                return
            delay_s = min(2 * delay_s, _MAX_DELAY_S)

    async def _run(self, page: int) -> int:
        """One life of a worker; its exit code."""
        command = (sys.executable, "-m", "headrace_transformer", str(os.getpid()), str(page))
        no_input = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*command, env=self._environment, stdin=no_input)
        self._processes.add(process)
        try:
            if self._order is not None:  # It came meanwhile.
                self._signal_all(self._order)
            return await process.wait()
        except asyncio.CancelledError:  # Another worker refused.
            self.end(signal.SIGTERM)
            await process.wait()
            raise
        finally:
            self._processes.discard(process)

    def _signal_all(self, signum: signal.Signals) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.send_signal(signum)
