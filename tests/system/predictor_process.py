"""A predictor in its own process, without a stack, for tests that call it directly and check its exit."""

import os
import signal
import sys
from asyncio.subprocess import Process as Running
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from headrace_runner.services import predictor_tuning
from tests.support.forkserver import spawn
from tests.support.free_ports import free_predictor_port, free_settings
from tests.system.calls import serves
from tests.waiting import until

_ROOT = Path(__file__).parents[2]


class PredictorProcess:
    """`python -m MODULE`; `end` returns its exit status."""

    def __init__(self, log: Path, target: str, running: Running) -> None:
        self.log = log
        self.target = target
        self.process = running

    async def end(self) -> int:
        """Its exit status, once it has ended."""
        return await self.process.wait()


@asynccontextmanager
async def predictor_process(
    log: Path, module: str = "headrace_predictor", address: str = "127.0.0.1", **environment: str
) -> AsyncIterator[PredictorProcess]:
    """A serving process, reached at `address`; killed at the end if it has not ended by itself."""
    port = environment.get("PREDICTOR_PORT") or free_predictor_port()
    own = {"PREDICTOR_PORT": str(port), "PREDICTOR_DEVICE": "cpu", "PREDICTOR_THREADS": "1"}
    # As in a stack: the predictors are forks of the same process.
    tuning = predictor_tuning(free_settings(log.parent))
    with log.open("wb") as output:
        running = await spawn(
            (sys.executable, "-m", module), {**tuning, **os.environ, **own, **environment}, _ROOT, output
        )
    predictor = PredictorProcess(log, f"{address}:{port}", running)
    try:
        # A connection may reach a dying process at the same port first, and break.
        await until(lambda: serves(predictor.target, "ready"))
        yield predictor
    finally:
        with suppress(ProcessLookupError):
            predictor.process.send_signal(signal.SIGKILL)
        await predictor.process.wait()
