"""Derives the local Envoy's configuration from `envoy/envoy.yaml`; pure but for reading that file.

What changes: the addresses of listeners, clusters and the admin page, one endpoint for each
predictor, the folder of the files it refers to, the percentage of requests traced, and the origins
whose pages may call. Everything else, every limit included, is what docker compose runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from runner.settings import LOOPBACK, ROOT, StackSettings

ENVOY_FOLDER = ROOT / "envoy"
NO_ORIGINS = "[]  # GATEWAY_ALLOWED_ORIGINS"
_CONTAINER_FOLDER = "/etc/envoy/"

Config = dict[str, Any]
Address = tuple[str, int]


def derive(settings: StackSettings) -> Config:
    """The configuration of the stack that `settings` describes."""
    origins = json.dumps(allowed_origins(settings.gateway_allowed_origins))
    text = (ENVOY_FOLDER / "envoy.yaml").read_text().replace(NO_ORIGINS, origins)
    config: Config = _with_local_files(yaml.safe_load(text))
    admin = (LOOPBACK, settings.gateway_admin_port)
    config["admin"]["address"] = _address(admin)
    config["layered_runtime"]["layers"][0]["static_layer"]["tracing"]["random_sampling"] = (
        settings.gateway_trace_percent
    )

    listeners: dict[str, Address] = {
        "ingress": (str(settings.gateway_bind), settings.gateway_port),
        "inner": (LOOPBACK, settings.gateway_inner_port),
    }
    for listener in config["static_resources"]["listeners"]:
        listener["address"] = _address(listeners[listener["name"]])

    endpoints: dict[str, Sequence[Address]] = {
        "transformer": [(LOOPBACK, settings.transformer_port)],
        "predictor": [(LOOPBACK, port) for port in settings.predictor_ports],
        "logger": [(LOOPBACK, settings.logger_port)],
        "otel": [settings.otel_address],
        "admin": [admin],
    }
    for cluster in config["static_resources"]["clusters"]:
        hosts = [{"endpoint": {"address": _address(address)}} for address in endpoints[cluster["name"]]]
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": hosts}]
    return config


def write(settings: StackSettings, path: Path) -> None:
    """Writes the derived configuration as YAML."""
    path.write_text(yaml.safe_dump(derive(settings), sort_keys=False, width=120))


def allowed_origins(setting: str) -> list[Config]:
    """GATEWAY_ALLOWED_ORIGINS as Envoy's string matchers; envoy/start.sh does the same in a container."""
    return [{"exact": origin} for origin in setting.split(",") if origin]


def _address(address: Address) -> Config:
    host, port = address
    return {"socket_address": {"address": host, "port_value": port}}


def _with_local_files(value: Any) -> Any:
    """A copy without shared parts, in which each path of the container is the repository's."""
    if isinstance(value, dict):
        return {key: _with_local_files(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_local_files(item) for item in value]
    if isinstance(value, str) and value.startswith(_CONTAINER_FOLDER):
        return str(ENVOY_FOLDER / value.removeprefix(_CONTAINER_FOLDER))
    return value
