"""A stack whose model generates tokens only on request; see faulty_predictor.py."""

import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.free_ports import start_stack
from tests.support.runner_stack import Stack


@asynccontextmanager
async def gated_stack(
    folder: Path, overrides: Mapping[str, Any] | None = None, **environment: dict[str, str]
) -> AsyncIterator[tuple[Stack, Callable[[int], object]]]:
    """The stack, and a function that lets the model generate so many tokens.

    `overrides` are fields of StackSettings, `environment` the environment of single services.
    """
    path = str(folder / "gate")
    stack = await start_stack(
        folder,
        {"models": "storyteller=models/storyteller", **(overrides or {})},
        commands={"predictor": (sys.executable, "-m", "tests.system.faulty_predictor")},
        environment={"predictor": {"GATE_SOCKET": path}, **environment},
    )
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            yield stack, lambda tokens: sender.sendto(b"1" * tokens, path)
    finally:
        await stack.stop()
