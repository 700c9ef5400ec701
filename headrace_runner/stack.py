"""A whole stack as local processes; used by `make up` and by the system tests.

    async with Stack(StackSettings(...)) as stack:
        ...  # ready: stack.gateway answers

They start one after the other, because they share the processors: the predictors first, which takes longest, each next
one when the one before listens. Each can wait for those that it needs. They are stopped in order, the gateway first
and the logger last, within ten seconds. None outlives this process, however it ends.
"""

import asyncio
import errno
import json
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import grpc

from headrace.endpoints import DIRECT
from headrace.errors import StartupError
from headrace.rpc.server.listeners import READY
from headrace_runner import envoy_config, services
from headrace_runner.process import Process, Say
from headrace_runner.run_folder import RunFolder
from headrace_runner.settings import HOME, LOOPBACK, PROGRAM, StackSettings
from headrace_runner.terminal import short

_POLL_S = 0.1
_REPORT_S = 10.0
_HEAD_START_S = 2.0  # At most.
# All other settings are also Envoy's or of the places of processes.
_ROLLED = ("models", "device", "roll_patience_s", "locust_port")


class Stack:
    """Logger, predictors, transformer and Envoy, supervised.

    `commands` and `environment` are those of `services.plan`; `say` prints one line for the user; `change_gateway` is a
    test's change of Envoy's configuration.
    """

    def __init__(
        self,
        settings: StackSettings,
        *,
        commands: Mapping[str, tuple[str, ...]] | None = None,
        environment: Mapping[str, Mapping[str, str]] | None = None,
        change_gateway: envoy_config.Change | None = None,
        say: Say = print,
    ) -> None:
        self.settings = settings
        self.gateway = settings.gateway
        self.folder = RunFolder(settings.run_folder)
        self._say = say
        self._change_gateway = change_gateway
        self._commands, self._environment = commands or {}, environment or {}
        plan = self._plan()
        self._processes = {
            spec.name: Process(spec, self.folder.logs, HOME, say) for stage in plan.stages() for spec in stage
        }
        self._stages = [[self._processes[spec.name] for spec in stage] for stage in plan.stages()]
        self._supervisions: list[asyncio.Task[None]] = []

    @property
    def addresses(self) -> dict[str, str]:
        """The address of each process by name; "inner" is Envoy's inner listener."""
        own = {name: f"{LOOPBACK}:{process.spec.port}" for name, process in self._processes.items() if name != "envoy"}
        inner = f"{LOOPBACK}:{self.settings.gateway_inner_port}"
        return {"gateway": self.gateway, "inner": inner, **own}

    @property
    def metrics_pages(self) -> dict[str, list[tuple[str, int, str]]]:
        """The Prometheus pages of each kind of process: host, port and path."""
        settings = self.settings
        ports = {
            "predictor": settings.predictor_metrics_ports,
            "transformer": (settings.transformer_metrics_port,),
            "logger": (settings.logger_metrics_port,),
        }
        pages = {kind: [(LOOPBACK, port, "/metrics") for port in numbers if port] for kind, numbers in ports.items()}
        return pages | {"envoy": [(LOOPBACK, settings.gateway_inner_port, "/stats/prometheus")]}

    async def start(self) -> None:
        """Starts every process; raises StartupError if the folder is held or not writable, or if a port is taken."""
        self.folder.claim()
        try:
            check_ports(self.settings)
            envoy_config.write(self.settings, self.folder.envoy_config, self._change_gateway)
            for process in self._processes.values():
                process.log.write_bytes(b"")
        except BaseException as error:
            self.folder.release()
            if isinstance(error, OSError):
                raise self.folder.unusable(error) from None
            raise
        self._say(f"starting; logs are in {short(self.folder.logs)}")
        predictors = [name for name in self._processes if name.startswith("predictor")]
        order = (*predictors[:1], "transformer", "logger", "envoy")
        self._supervisions = [self._processes[name].start() for name in predictors or order[:1]]
        for before, name in pairwise(order):
            await self._until_listening(before)
            self._supervisions.append(self._processes[name].start())

    async def _until_listening(self, name: str) -> None:
        """Waits until a process listens or one cannot run, at most for its head start."""
        give_up_at = time.monotonic() + _HEAD_START_S
        while not any(task.done() for task in self._supervisions) and time.monotonic() < give_up_at:
            with socket.socket() as probe:
                if not probe.connect_ex((LOOPBACK, self._processes[name].spec.port)):
                    return
            await asyncio.sleep(_POLL_S / 4)

    async def roll(self, settings: StackSettings, environment: Mapping[str, Mapping[str, str]] | None = None) -> None:
        """Replaces every service by one with `settings` and the current code, one after the other; no call is lost.

        Predictors first: each new one is loaded before the old one retires, and the old one has ended before the next
        is replaced, so memory is needed for only one predictor more. Then the transformer and the logger. Envoy goes
        on. `environment` replaces that of the constructor. Raises StartupError with one line for a changed setting that
        needs a start, and if a process does not start: it and all after it continue as before.
        """
        _check_rolled(self.settings, settings)
        if environment is not None:
            self._environment = environment
        before, self.settings = self.settings, settings
        try:
            plan = self._plan()
            for spec in (*plan.predictors, plan.transformer, plan.logger):
                self._say(f"rolling {spec.name}")
                kind = spec.name.partition("-")[0].upper()
                await self._processes[spec.name].replace(spec, f"{kind}_LISTEN", settings.roll_patience_s)
                if spec in plan.predictors:
                    await self._processes[spec.name].predecessor_ended()
        except BaseException:
            self.settings = before
            raise

    def _plan(self) -> services.StackPlan:
        return services.plan(self.settings, self.folder.envoy_config, self._commands, self._environment)

    async def wait_ready(self, timeout_s: float | None = None, on_ready: Callable[[str], None] | None = None) -> None:
        """Returns when a generation would work; raises StartupError if that is impossible, TimeoutError after the
        timeout.

        `on_ready` gets the name of each process when it is ready, Envoy's last: then the whole stack is ready.
        """
        health = {name: process.spec.port for name, process in self._processes.items() if name != "envoy"}
        readiness = Readiness(self.settings, health)
        try:
            async with asyncio.timeout(timeout_s):
                await self._become_ready(readiness, set(health), on_ready or (lambda _: None))
        finally:
            await readiness.close()

    async def ended(self) -> None:
        """Returns when the stack has been stopped; raises StartupError when a process cannot run."""
        done, _ = await asyncio.wait(self._supervisions, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task

    async def stop(self) -> None:
        """Stops every process and releases the folder."""
        for stage in self._stages:
            await asyncio.gather(*(process.stop() for process in stage))
        self.folder.release()

    async def _become_ready(
        self, readiness: "Readiness", waited_for: set[str], on_ready: Callable[[str], None]
    ) -> None:
        report_at = time.monotonic() + _REPORT_S
        said: set[str] = set()
        while missing := await readiness.missing():
            if any(task.done() for task in self._supervisions):
                await self.ended()
                return
            for name in sorted(waited_for - {*missing}):
                waited_for.remove(name)
                self._processes[name].has_served = True
                on_ready(name)
            if time.monotonic() >= report_at:
                report_at += _REPORT_S
                for name in missing:
                    line = self._processes[name].last_line() if name in self._processes else ""
                    # That it listens is no reason why it is not ready; each other reason is said once.
                    reason = "" if line.startswith("listening on ") else line
                    if (text := f"waiting for {name}{reason and f': {reason}'}") not in said:
                        said.add(text)
                        self._say(text)
            await asyncio.sleep(_POLL_S)
        for name in (*sorted(waited_for), "envoy"):
            self._processes[name].has_served = True
            on_ready(name)


def _check_rolled(before: StackSettings, after: StackSettings) -> None:
    """Raises StartupError for a changed setting that needs a start: a gateway's, a port, the number of processes."""
    for name in StackSettings.model_fields:
        new = getattr(after, name)
        if name not in _ROLLED and new != getattr(before, name):
            raise StartupError(f"{name.upper()}={new}: cannot change while the stack runs; `{PROGRAM} down` first")


def check_ports(settings: StackSettings) -> None:
    """Raises StartupError with the settings' names if ports are taken or chosen twice."""
    taken: dict[str, int] = {}
    with ExitStack() as held:  # All at the same time: that finds a port chosen twice.
        for setting, ports in settings.ports().items():
            for port in ports:
                binds = {"GATEWAY_PORT": settings.gateway_plain_bind, "GATEWAY_TLS_PORT": settings.gateway_bind}
                host = str(binds.get(setting, LOOPBACK))
                probe = held.enter_context(socket.socket())
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, port))
                    probe.listen()
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        reason = f"port {port} of {host} cannot be used ({error.strerror})"
                        raise StartupError(f"{reason}; set {setting}=… to another") from None
                    taken[setting] = port
    if len(taken) > 1:
        raise StartupError(
            f"ports {', '.join(map(str, taken.values()))} are taken; set PORT_OFFSET=1000, which moves all ports,"
            f" or {', '.join(taken)} to others"
        )
    for setting, port in taken.items():
        raise StartupError(f"port {port} is taken; set {setting}=… to another")


_TIMEOUT_S = 1.0
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),  # Another stack of this process may have used the address.
    ("grpc.enable_http_proxy", 0),
)


class Readiness:
    """Checks each service, then Envoy's view of them, then the whole chain through the gateway."""

    def __init__(self, settings: StackSettings, services: dict[str, int]) -> None:
        """`services`: name → port of processes with a gRPC health service."""
        self._admin = f"http://{LOOPBACK}:{settings.gateway_admin_port}"
        self._channels = {name: _channel(f"{LOOPBACK}:{port}") for name, port in services.items()}
        self._gateway = _channel(settings.gateway)
        self._has_remote_predictors = bool(settings.predictor_endpoints)

    async def missing(self) -> tuple[str, ...]:
        """Names of what is not ready, processes most of all; empty once a generation through the gateway would work."""
        serving = await asyncio.gather(*(_serves(channel, "") for channel in self._channels.values()))
        if not all(serving):
            return tuple(name for name, serves in zip(self._channels, serving, strict=True) if not serves)
        if late := await asyncio.to_thread(self._late_by_envoy):
            return (late,)
        return () if await _serves(self._gateway, READY) else ("transformer",)

    async def close(self) -> None:
        for channel in (*self._channels.values(), self._gateway):
            await channel.close()

    def _late_by_envoy(self) -> str:
        """What does not pass Envoy's health checks: "" if every host of every cluster does.

        Of predictors of which some are elsewhere, one is enough.
        """
        try:
            with DIRECT.open(f"{self._admin}/clusters?format=json", timeout=_TIMEOUT_S) as answer:
                clusters: Iterable[dict[str, Any]] = json.load(answer)["cluster_statuses"]
        except (OSError, ValueError):
            return "envoy"
        healthy = {
            cluster["name"]: [
                host["health_status"] == {"eds_health_status": "HEALTHY"} for host in cluster.get("host_statuses", ())
            ]
            for cluster in clusters
        }
        if self._has_remote_predictors and not any(healthy.pop("predictor", ())):
            return "a predictor of PREDICTOR_ENDPOINTS"
        return "" if any(healthy.values()) and all(map(all, healthy.values())) else "envoy"


def _channel(target: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(target, options=_OPTIONS)


async def _serves(channel: grpc.aio.Channel, name: str) -> bool:
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # The start of processes does not wait for it.

    request = health_pb2.HealthCheckRequest(service=name)
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=_TIMEOUT_S)  # type: ignore[attr-defined]
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
