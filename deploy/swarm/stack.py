#!/usr/bin/env python3
"""Converts what `docker compose … config --format json` prints into a file for `docker stack deploy`.

Swarm refuses or silently ignores compose's limits, replicas, GPUs and folders in memory; here they become what Swarm
reads. A port that compose binds to loopback is not published, because Swarm publishes on every address of a node.
Standard library alone. Exits with 1 and a sentence if nothing would be published, or a port at one address.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

# Swarm has no counterpart, or has it elsewhere: `restart` is deploy.restart_policy, and `security_opt` a setting of the
# engine.
_LEFT_OUT = ("build", "depends_on", "profiles", "pull_policy", "restart", "security_opt")
_EVERY_ADDRESS = ("", "0.0.0.0", "::")  # noqa: S104
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class NotPublishableError(ValueError):
    """Ports that Swarm cannot publish as compose would."""


def stack_file(project: dict[str, Any]) -> dict[str, Any]:
    """The stack of a compose project as `config` prints it; raises NotPublishableError."""
    services = {name: _service(name, service) for name, service in project["services"].items()}
    if not any(service["ports"] for service in services.values()):
        raise NotPublishableError(
            "every port is bound to loopback, where Swarm cannot publish: set GATEWAY_BIND=0.0.0.0"
        )
    stack = {"version": "3.13", "services": services}
    stack |= {part: project.get(part, {}) for part in ("networks", "volumes")}
    return stack | {part: _used(part, project, services) for part in ("configs", "secrets")}


def _used(part: str, project: dict[str, Any], services: dict[str, Any]) -> dict[str, Any]:
    """The configs or secrets of containers; others are those of builds."""
    used = {item["source"] for service in services.values() for item in service.get(part, ())}
    return {name: item for name, item in project.get(part, {}).items() if name in used}


def _service(name: str, service: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in service.items() if key not in _LEFT_OUT and value is not None}
    deploy = kept.setdefault("deploy", {})
    if "scale" in kept:
        deploy["replicas"] = kept.pop("scale")
    resources = deploy.setdefault("resources", {})
    limits = resources.setdefault("limits", {})
    for key, limit in (("mem_limit", "memory"), ("pids_limit", "pids")):
        if key in kept:
            limits[limit] = kept.pop(key)
    reservations = resources.get("reservations", {})
    if "devices" in reservations:
        reservations["generic_resources"] = [_gpus(device) for device in reservations.pop("devices")]
    # A setting without a value is one that nobody set.
    kept["environment"] = {key: value for key, value in kept.get("environment", {}).items() if value is not None}
    kept["ports"] = [_port(name, port) for port in kept.get("ports", ()) if not _on_loopback(port)]
    kept["volumes"] = [_volume(volume) for volume in kept.get("volumes", ())]
    kept["volumes"] += [_in_memory(*folder.partition(":")[::2]) for folder in kept.pop("tmpfs", ())]
    if "shm_size" in kept:
        kept["volumes"].append(_in_memory("/dev/shm", f"size={kept.pop('shm_size')}"))  # noqa: S108
    return kept


def _volume(volume: dict[str, Any]) -> dict[str, Any]:
    # How compose makes a folder that is missing; Swarm never does.
    return {key: value for key, value in volume.items() if key != "bind"}


def _in_memory(folder: str, options: str) -> dict[str, Any]:
    """A tmpfs; its mode is Swarm's default, 1777."""
    found = re.search(r"size=(\d+)([kmg]?)", options)
    size = {"size": int(found[1]) * _UNITS[found[2]]} if found else {}
    return {"type": "tmpfs", "target": folder, "tmpfs": size}


def _gpus(device: dict[str, Any]) -> dict[str, Any]:
    return {"discrete_resource_spec": {"kind": "NVIDIA-GPU", "value": device["count"]}}


def _on_loopback(port: dict[str, Any]) -> bool:
    address: str = port.get("host_ip", "")
    return address.startswith("127.") or address == "::1"


def _port(service: str, port: dict[str, Any]) -> dict[str, Any]:
    address = port.get("host_ip", "")
    if address not in _EVERY_ADDRESS:
        raise NotPublishableError(f"{service}: Swarm publishes on every address of a node, not on {address} alone")
    # A service whose name resolves to its tasks has no part in the routing mesh.
    return {
        "target": port["target"],
        "published": int(port["published"]),
        "protocol": port["protocol"],
        "mode": "host",
    }


def main() -> None:
    try:
        stack = stack_file(json.load(sys.stdin))
    except NotPublishableError as refused:
        raise SystemExit(str(refused)) from refused
    json.dump(stack, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
