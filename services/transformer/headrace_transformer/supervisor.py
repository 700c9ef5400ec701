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


class _Orders:
    """The orders by signals: `stop` soon, or `retire` once the calls in flight have ended."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.retire = asyncio.Event()

    def end(self) -> bool:
        """Whether a worker that ends is not started again."""
        return self.stop.is_set() or self.retire.is_set()


async def supervise(settings: TransformerSettings) -> None:
    """Runs the workers until SIGTERM, SIGINT or RETIRE; raises StartupError, or SystemExit with a worker's refusal."""
    orders = _Orders()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, orders.stop.set)
    grace_s, is_shared = settings.drain_s + _GRACE_S, settings.listen != "alone"
    workers = [str(number) for number in range(settings.workers)]
    with ExitStack() as held:
        port = held.enter_context(reserved(settings.host, settings.port, is_shared))
        http_port = held.enter_context(reserved(settings.host, settings.http_port, is_shared))
        environment = {**os.environ, "TRANSFORMER_PORT": str(port), "TRANSFORMER_HTTP_PORT": str(http_port)}
        pages = {worker: held.enter_context(reserved("127.0.0.1", 0)) for worker in workers}
        if settings.metrics_port:
            registry = CollectorRegistry()
            registry.register(WorkerPages(lambda: pages))
            page = MetricsPage(settings.host, settings.metrics_port, registry, is_shared)
            held.enter_context(closing(page))

        def retire() -> None:
            held.close()  # The ports and the page are the successor's.
            orders.retire.set()

        loop.add_signal_handler(RETIRE, retire)
        try:
            async with asyncio.TaskGroup() as group:
                for worker in workers:
                    work = _keep(worker, pages[worker], environment, orders, grace_s)
                    group.create_task(work, name=f"worker-{worker}")
        except* _WorkerRefusedError:
            raise SystemExit(os.EX_CONFIG) from None


async def _keep(worker: str, page: int, environment: Mapping[str, str], orders: _Orders, grace_s: float) -> None:
    """One worker, started again until the parent is to end."""
    delay_s, is_first = _FIRST_DELAY_S, True
    while not orders.end():
        started = time.monotonic()
        exit_code = await _run(page, environment, orders, grace_s)
        if orders.end():
            return
        if exit_code == os.EX_CONFIG and is_first:
            raise _WorkerRefusedError
        is_first = False
        if time.monotonic() - started >= _STEADY_S:
            delay_s = _FIRST_DELAY_S
        logger.error("worker %s ended with exit code %d; starting it again in %.1f s", worker, exit_code, delay_s)
        with suppress(TimeoutError):
            await asyncio.wait_for(orders.stop.wait(), delay_s)
        delay_s = min(2 * delay_s, _MAX_DELAY_S)


async def _run(page: int, environment: Mapping[str, str], orders: _Orders, grace_s: float) -> int:
    """One life of a worker; its exit code."""
    command = (sys.executable, "-m", "headrace_transformer", str(os.getpid()), str(page))
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdin=asyncio.subprocess.DEVNULL)
    ended = asyncio.create_task(process.wait(), name="worker's end")
    stopping = asyncio.create_task(orders.stop.wait(), name="stop")
    retiring = asyncio.create_task(orders.retire.wait(), name="retirement")
    try:
        await asyncio.wait({ended, stopping, retiring}, return_when=asyncio.FIRST_COMPLETED)
        if retiring.done() and not ended.done() and not stopping.done():
            _signal(process, RETIRE)
            await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return await ended if ended.done() else await _stop(process, grace_s)
    finally:
        stopping.cancel()
        retiring.cancel()
        if not ended.done():  # Cancelled, since another worker refused.
            await _stop(process, grace_s)
        await asyncio.gather(ended, stopping, retiring, return_exceptions=True)


def _signal(process: asyncio.subprocess.Process, signum: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(signum)


async def _stop(process: asyncio.subprocess.Process, grace_s: float) -> int:
    _signal(process, signal.SIGTERM)
    try:
        return await asyncio.wait_for(process.wait(), grace_s)
    except TimeoutError:
        _signal(process, signal.SIGKILL)
        return await process.wait()
