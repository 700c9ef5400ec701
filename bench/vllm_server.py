"""vLLM's OpenAI server on the CPU, started and ended: `async with vllm_server(folder, name, log) as server`."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from bench.cases import VLLM
from bench.contenders import CONTENDERS
from bench.server_process import LOOPBACK, answers, free_port, server_process, until

_START_TIMEOUT_S = 600.0  # The first start compiles.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": LOOPBACK,
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
async def vllm_server(
    model: Path,
    name: str,
    log: Path,
    *arguments: str,
    dtype: str = "bfloat16",
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[VllmServer]:
    """Starts the server of a model, and ends it with all its processes; output goes to `log`.

    Raises RuntimeError if it ends or does not answer in time. `arguments` are added to the command, and
    `environment` to its environment.
    """
    port = free_port()
    command = (
        # Not `vllm serve`: that needs the metadata of a package named vllm, and this one is vllm-cpu.
        *(CONTENDERS[VLLM].python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", name, "--host", LOOPBACK, "--port", str(port)),
        *("--dtype", dtype, "--max-model-len", "2048", *arguments),
    )
    async with server_process("vLLM's server", command, log, ENVIRONMENT | dict(environment or {})) as process:
        await until(lambda: answers(port, "/health"), process, _START_TIMEOUT_S)
        yield VllmServer(f"{LOOPBACK}:{port}", process.pid)
