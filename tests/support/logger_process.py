"""A payload logger in its own process, for tests that stop and kill it."""

import os
import signal
import socket
import sys
from asyncio.subprocess import Process as Running
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.forkserver import spawn


def free_port() -> int:
    """A port of 127.0.0.1 on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LoggerProcess:
    """`python -m headrace_logger` on a port and database that outlive restarts; killed at the end of the block."""

    ROOT = Path(__file__).parents[2]
    COMMAND = (sys.executable, "-m", "headrace_logger")

    def __init__(self, folder: Path) -> None:
        self.database = folder / "payloads.sqlite3"
        self.target = f"127.0.0.1:{free_port()}"
        port = self.target.rsplit(":", 1)[1]
        self.environment = os.environ | {"LOGGER_PORT": port, "LOGGER_DATABASE": str(self.database)}
        self._log = folder / "logger.log"
        self._process: Running | None = None

    async def start(self) -> None:
        """Waits until the logger's health is SERVING."""
        await self.spawn()
        async with grpc.aio.insecure_channel(self.target, (("grpc.max_reconnect_backoff_ms", 100),)) as channel:
            request = health_pb2.HealthCheckRequest(service="headrace.v1.PayloadLog")
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, wait_for_ready=True)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING

    async def refuses(self) -> str:
        """Starts the logger, which must end because of a wrong setting; returns its output."""
        await self.spawn()
        assert await self.wait() == os.EX_CONFIG
        return self._log.read_text()

    def send(self, signum: int) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        assert self._process is not None
        code = await self._process.wait()
        self._process = None
        return code

    async def kill(self) -> None:
        """Kills it like a crash."""
        self.send(signal.SIGKILL)
        await self.wait()

    async def spawn(self) -> None:
        """Starts it without waiting for it."""
        with self._log.open("ab") as log:
            self._process = await spawn(self.COMMAND, self.environment, self.ROOT, log)

    async def __aenter__(self) -> "LoggerProcess":
        return self

    async def __aexit__(self, *_: Any) -> None:
        if self._process is not None:
            await self.kill()
