"""A predictor as a process of its own, without a stack, for tests that ask it themselves and see how it ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.logger_process import free_port

_ROOT = Path(__file__).parents[2]


class PredictorProcess:
    """`python -m MODULE`; `end` tells how it ended."""

    def __init__(self, log: Path, module: str, **environment: str) -> None:
        port = free_port()
        self.target = f"127.0.0.1:{port}"
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module],
                cwd=_ROOT,
                env=os.environ
                | {"PREDICTOR_PORT": str(port), "PREDICTOR_DEVICE": "cpu", "PREDICTOR_THREADS": "1"}
                | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    async def end(self) -> int:
        """Its exit status, once it has ended."""
        return await asyncio.to_thread(self.process.wait, 60)


@asynccontextmanager
async def predictor_process(
    log: Path, module: str = "services.predictor", **environment: str
) -> AsyncIterator[PredictorProcess]:
    """Serving; killed at the end if it has not ended by itself."""
    predictor = PredictorProcess(log, module, **environment)
    try:
        async with grpc.aio.insecure_channel(predictor.target, (("grpc.max_reconnect_backoff_ms", 100),)) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service="ready"), wait_for_ready=True, timeout=60
            )
            async for answer in watch:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    break
            watch.cancel()
        yield predictor
    finally:
        predictor.process.kill()
        predictor.process.wait()
