"""Free ports for stacks of tests and benchmarks, whose settings are independent of `.env`."""

import os
import random
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.endpoints import steps_port
from headrace.errors import StartupError
from headrace.models.sources import DEFAULT_MODELS
from headrace_runner.settings import StackSettings
from headrace_runner.stack import check_ports
from tests.support.runner_stack import Stack

# Below Linux's ephemeral ports: no client's own port can take one between the check and its use.
_FIRST, _LAST, _BLOCK = 20_000, 32_000, 100
_ATTEMPTS = 5


def free_predictor_port() -> int:
    """A port of 127.0.0.1 on which no process listens, nor on that of a predictor's generations."""
    while True:
        with socket.socket() as probe, socket.socket() as steps, suppress(OSError):
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            steps.bind(("127.0.0.1", steps_port(port)))
            return port


def _blocks() -> range:
    """The first ports of the blocks of this pytest-xdist worker; of all blocks outside one.

    A port that was checked is used a second later, and two Envoys can listen on one port (SO_REUSEPORT) without an
    error. So parallel workers choose from different blocks.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return range(_FIRST, _LAST, _BLOCK)[worker::workers]


def free_settings(run_folder: Path, **overrides: Any) -> StackSettings:
    """Settings with ports that are free now; `overrides` are fields of StackSettings."""
    for _ in range(100 * _ATTEMPTS):
        base = random.choice(_blocks())
        values: dict[str, Any] = {
            "port_offset": 0,
            "gateway_bind": "127.0.0.1",
            "gateway_port": base,
            "gateway_inner_port": base + 1,
            "gateway_admin_port": base + 2,
            "gateway_trace_percent": 100,
            "transformer_port": base + 3,
            "logger_port": base + 4,
            "transformer_metrics_port": base + 5,
            "logger_metrics_port": base + 6,
            "predictor_metrics_port": base + 7,
            "management_port": base + 8,
            "gateway_tls_port": base + 9,
            "transformer_http_port": base + 10,
            "predictor_port": base + 15,  # Generations have +19, replicas +25 and +29, and so on.
            "models": DEFAULT_MODELS,
            "predictors": 1,
            "device": "cpu",
            "run_folder": run_folder,
        }
        settings = StackSettings(**values | overrides)
        try:
            check_ports(settings)
        except StartupError:
            continue
        return settings
    raise StartupError(f"no free ports between {_FIRST} and {_LAST}")


def free_offset() -> int:
    """A PORT_OFFSET whose ports are free now: below those of `free_settings`."""
    offsets = range(1_000, 10_000, 20)
    for offset in random.sample(offsets, len(offsets)):
        with suppress(StartupError):
            check_ports(StackSettings(port_offset=offset))
            return offset
    raise StartupError(f"no free ports for an offset of {offsets}")


async def start_stack(run_folder: Path, overrides: dict[str, Any], **arguments: Any) -> Stack:
    """A ready stack; `arguments` are Stack's. Retries if another process takes one of the ports."""
    for attempt in range(1, _ATTEMPTS + 1):
        stack = Stack(free_settings(run_folder, **overrides), **arguments)
        try:
            return await stack.__aenter__()
        except StartupError as error:
            if attempt == _ATTEMPTS or not any(text in str(error) for text in ("taken", "already in use")):
                raise
    raise AssertionError("unreachable")
