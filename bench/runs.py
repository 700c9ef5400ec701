"""Shared by the benchmarks: the command line, the machine, the measured stack, the file of results."""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace_runner.envoy_config import Change
from tests.support.free_ports import start_stack
from tests.support.runner_stack import Stack

PROMPT = "Tell me a story about a fox."

_RESULTS = Path(__file__).resolve().parent / "results"
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """A parser with `--out`, the file of results: bench/results/NAME.json."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--out", type=Path, default=_RESULTS / f"{name}.json", help="results")
    return result


def write(out: Path, report: Mapping[str, Any]) -> None:
    """Writes a report with its date."""
    out.write_text(json.dumps({"date": datetime.now(UTC).isoformat(timespec="seconds"), **report}, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """Processor, cores, load and Python."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
    }


@asynccontextmanager
async def running_stack(
    *models: str,
    predictor: str = "",
    environment: Mapping[str, Mapping[str, str]] | None = None,
    change_gateway: Change | None = None,
    **overrides: Any,
) -> AsyncIterator[Stack]:
    """A whole stack with bundled models; `predictor` is a module of this folder that replaces the service's own.

    `environment` and `change_gateway` are those of headrace_runner.stack.Stack, `overrides` fields of its settings.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # Without compiled modules a start takes longer.
    commands = {"predictor": (sys.executable, "-m", f"bench.{predictor}")} if predictor else {}
    overrides = {"models": ",".join(f"{model}=models/{model}" for model in models), **overrides}
    with tempfile.TemporaryDirectory() as folder:
        stack = await start_stack(
            *(Path(folder), overrides),
            commands=commands,
            environment=environment or {},
            change_gateway=change_gateway,
            say=lambda line: None,
        )
        try:
            yield stack
        finally:
            await stack.stop()


def cpu_seconds(stack: Stack) -> dict[str, float]:
    """The processor time of each process of the stack, and of this one as `callers`, without their children."""
    pids = {name: stack.pid(name) for name in stack.names} | {"callers": os.getpid()}
    used = {}
    for name, pid in pids.items():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used[name] = (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND
    return used
