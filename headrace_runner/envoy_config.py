"""Derives the local Envoy's configuration from `envoy/envoy.yaml`.

It replaces the addresses of listeners, clusters and the admin page, adds one endpoint for each predictor, with those on
other hosts (by the transformer's file if PREDICTOR_ENDPOINTS has a service), and sets the folder of referenced files,
the percentage of traced requests, the origins whose pages may call, and TLS and JWT (gateway_access.py). Everything
else, including every limit, is the same as with docker compose, unless a test passes a `Change`, which shortens limits
that it cannot wait for. An unreadable file raises StartupError with one line.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from headrace.errors import StartupError
from headrace_runner import gateway_access
from headrace_runner.settings import LOOPBACK, ROOT, StackSettings

ENVOY_FOLDER = ROOT / "envoy"
NO_ORIGINS = "[]  # GATEWAY_ALLOWED_ORIGINS"
_CONNECT_TIMEOUT = "connect_timeout: 1s  # PREDICTOR_ENDPOINTS"
_CONNECT_TIMEOUT_ELSEWHERE = "connect_timeout: 3.5s"
_SERVICES = {"type: STRICT_DNS  # SRV": "type: EDS", "#SRV ": ""}
_NO_ENDPOINTS = '{"resources": []}'
_CONTAINER_FOLDER = "/etc/envoy/"
_CONNECTIONS = "envoy.resource_monitors.global_downstream_max_connections"
_OWN_DESCRIPTORS = 128  # Of Envoy: its files, listeners and connections to services.

Config = dict[str, Any]
Address = tuple[str, int]
Change = Callable[[Config], None]


def derive(settings: StackSettings, change: Change | None = None) -> Config:
    """The configuration of the stack that `settings` describes; `change` is applied last."""
    path = ENVOY_FOLDER / "envoy.yaml"
    gateway_access.check(settings)
    try:
        config = _derive(settings, path.read_text())
    except (OSError, ValueError, yaml.YAMLError, LookupError, TypeError, AttributeError) as error:
        problem = " ".join(str(error).split())
        raise StartupError(f"{path} is not a configuration of this stack: {type(error).__name__}: {problem}") from None
    if change is not None:
        change(config)
    return config


def _derive(settings: StackSettings, text: str) -> Config:
    origins = json.dumps(allowed_origins(settings.gateway_allowed_origins))
    text = gateway_access.fill(text, settings)
    if settings.predictor_endpoints:
        text = text.replace(_CONNECT_TIMEOUT, _CONNECT_TIMEOUT_ELSEWHERE)
    if settings.listed_predictors:
        for mark, value in {**_SERVICES, "<PREDICTORS>": str(settings.listed_predictors.absolute())}.items():
            text = text.replace(mark, value)
    config: Config = _with_local_files(yaml.safe_load(text.replace(NO_ORIGINS, origins)))
    (connections,) = [
        monitor["typed_config"]
        for monitor in config["overload_manager"]["resource_monitors"]
        if monitor["name"] == _CONNECTIONS
    ]
    # Where there are few descriptors, callers are refused rather than the connections to services.
    spare = max(_OWN_DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OWN_DESCRIPTORS)
    connections["max_active_downstream_connections"] = min(connections["max_active_downstream_connections"], spare)
    admin = (LOOPBACK, settings.gateway_admin_port)
    config["admin"]["address"] = _address(admin)
    config["layered_runtime"]["layers"][0]["static_layer"]["tracing"]["random_sampling"] = (
        settings.gateway_trace_percent
    )

    listeners: dict[str, Address] = {
        "ingress": (str(settings.gateway_plain_bind), settings.gateway_port),
        "tls": (str(settings.gateway_bind), settings.gateway_tls_port),
        "management": (LOOPBACK, settings.management_port),
        "inner": (LOOPBACK, settings.gateway_inner_port),
    }
    for listener in config["static_resources"]["listeners"]:
        if listener["name"] not in listeners:
            continue
        listener["address"] = _address(listeners[listener["name"]])

    endpoints: dict[str, Sequence[Address]] = {
        "transformer": [(LOOPBACK, settings.transformer_port)],
        "transformer_http": [(LOOPBACK, settings.transformer_http_port)],
        "predictor": [*((LOOPBACK, port) for port in settings.predictor_ports), *settings.remote_predictors],
        "logger": [(LOOPBACK, settings.logger_port)],
        "otel": [settings.otel_address],
        "admin": [admin],
    }
    for cluster in config["static_resources"]["clusters"]:
        if cluster["name"] not in endpoints:
            continue  # A cluster that the user added.
        hosts: list[Config] = [{"endpoint": {"address": _address(address)}} for address in endpoints[cluster["name"]]]
        if cluster["name"] == "transformer_http":
            for host in hosts:
                host["endpoint"]["health_check_config"] = {"port_value": settings.transformer_port}
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": hosts}]
    return config


def write(settings: StackSettings, path: Path, change: Change | None = None) -> None:
    """Writes the derived configuration as YAML, and its certificates into the run folder."""
    config = yaml.safe_dump(derive(settings, change), sort_keys=False, width=120)
    gateway_access.write_secrets(settings, ENVOY_FOLDER)
    if settings.listed_predictors and not settings.listed_predictors.exists():
        settings.listed_predictors.write_text(
            _NO_ENDPOINTS
        )  # Envoy needs the file before the transformer has written it.
    path.write_text(config)


def lua_path() -> dict[str, str]:
    """The environment by which Envoy's scripts find those that they share."""
    return {"LUA_PATH": str(ENVOY_FOLDER / "?.lua")}


def allowed_origins(setting: str) -> list[Config]:
    """Converts GATEWAY_ALLOWED_ORIGINS to Envoy's string matchers; envoy/start.sh does the same in a container."""
    return [{"exact": origin} for origin in setting.split(",") if origin]


def _address(address: Address) -> Config:
    host, port = address
    return {"socket_address": {"address": host, "port_value": port}}


def _with_local_files(value: Any) -> Any:
    """A copy without shared parts, with the container's paths replaced by the repository's."""
    if isinstance(value, dict):
        return {key: _with_local_files(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_local_files(item) for item in value]
    if isinstance(value, str) and value.startswith(_CONTAINER_FOLDER):
        return str(ENVOY_FOLDER / value.removeprefix(_CONTAINER_FOLDER))
    return value
