"""A stack whose model generates tokens only on request; see faulty_predictor.py."""

import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from headrace_runner import envoy_config
from tests.support.free_ports import start_stack
from tests.support.runner_stack import Stack


@asynccontextmanager
async def gated_stack(
    folder: Path, change_gateway: envoy_config.Change | None = None, **environment: dict[str, str]
) -> AsyncIterator[tuple[Stack, Callable[[int], object]]]:
    """The stack, and a function that lets the model generate so many tokens; `environment` is that of services."""
    path = str(folder / "gate")
    stack = await start_stack(
        folder,
        {"models": "storyteller=models/storyteller"},
        commands={"predictor": (sys.executable, "-m", "tests.system.faulty_predictor")},
        environment={"predictor": {"GATE_SOCKET": path}, **environment},
        change_gateway=change_gateway,
    )
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            yield stack, lambda tokens: sender.sendto(b"1" * tokens, path)
    finally:
        await stack.stop()
