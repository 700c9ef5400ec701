"""vLLM's OpenAI server on the CPU, started and ended: `async with vllm_server(folder, name, log) as server`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from bench.cases import VLLM
from bench.contenders import CONTENDERS, ROOT

_START_TIMEOUT_S = 600.0  # The first start compiles.
_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.2
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


class VllmServer(NamedTuple):
    """A running server."""

    address: str
    pid: int


@asynccontextmanager
async def vllm_server(model: Path, name: str, log: Path, *arguments: str) -> AsyncIterator[VllmServer]:
    """Starts the server of a model in bfloat16, and ends it with all its processes; output goes to `log`.

    Raises RuntimeError if it ends or does not answer in time. `arguments` are added to the command.
    """
    port = _free_port()
    command = (
        # Not `vllm serve`: that needs the metadata of a package named vllm, and this one is vllm-cpu.
        *(CONTENDERS[VLLM].python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "bfloat16", "--max-model-len", "2048", *arguments),
    )
    # Without compiled modules a start takes a minute longer.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=ROOT,
            env=environment | _ENVIRONMENT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        await _until_healthy(process, port, log)
        yield VllmServer(f"127.0.0.1:{port}", process.pid)
    finally:
        await _stop(process)


async def _until_healthy(process: asyncio.subprocess.Process, port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not await _is_healthy(port):
        if process.returncode is not None or time.monotonic() > deadline:
            raise RuntimeError(f"vLLM's server does not answer; see {log}")
        await asyncio.sleep(_POLL_S)


async def _is_healthy(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        return (await reader.readline()).split(b" ")[1:2] == [b"200"]
    except OSError:
        return False
    finally:
        writer.close()


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Ends the server; its session has no other processes."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
