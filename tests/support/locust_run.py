"""Locust without its page: a run to its end, and the figures of its HTML report."""

import asyncio
import sys

import psutil

from headrace_runner.settings import ROOT

FILES = "loadtest/locustfile.py,loadtest/knee_locustfile.py"


class LocustRun:
    """`output` and `processor_s`, the used processor time, are those of the whole run."""

    def __init__(self) -> None:
        self.output = ""
        self.processor_s = 0.0
        self.status: int | None = None

    async def run(self, gateway: str, *options: str, files: str = "loadtest/locustfile.py") -> None:
        """Runs to the end."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "locust", "-f", files, "--headless", "--only-summary"),
            *("--host", f"http://{gateway}", *options),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        watching = asyncio.create_task(self._watch(psutil.Process(process.pid)))
        output, _ = await process.communicate()
        watching.cancel()
        self.output, self.status = output.decode(), process.returncode

    async def _watch(self, process: psutil.Process) -> None:
        """The processor time, until a fifth of a second before the end."""
        while True:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                return
            self.processor_s = times.user + times.system
            await asyncio.sleep(0.2)
