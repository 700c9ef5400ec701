"""A contender's process, from the view of its parent: started on one core, sent commands, stopped.

Every failure is a ContenderError with one line of reason: the contender is reported as absent, and the others continue.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.contenders import ROOT, Contender

_START_TIMEOUT_S = 300.0
_ANSWER_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 20.0
_LINE_BYTES = 16 << 20

# The same for all: one thread that does not spin, and the services' allocator settings.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "MKL_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "268435456",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "MALLOC_TOP_PAD_": "67108864",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class ContenderError(Exception):
    """The reason why a contender has no figures."""


class WorkerProcess:
    """See the module. `ready` is the worker's first line: versions and settings."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log
        self.ready: dict[str, Any] = {}

    @classmethod
    async def start(cls, contender: Contender, model: Path, log: Path, core: int) -> WorkerProcess:
        """Starts the worker and waits until its model is loaded; stderr goes to `log`."""
        cores = os.sched_getaffinity(0)
        # A child inherits the cores of the thread that starts it, before it creates any thread of its own.
        os.sched_setaffinity(0, {core})
        try:
            with log.open("wb") as errors:
                process = await asyncio.create_subprocess_exec(
                    *(contender.python, "-m", "bench.workers", contender.module, str(model), *contender.arguments),
                    cwd=ROOT,
                    env={**os.environ, **ENVIRONMENT},
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=errors,
                    limit=_LINE_BYTES,
                )
        except OSError as error:
            raise ContenderError(str(error)) from None
        finally:
            os.sched_setaffinity(0, cores)
        worker = cls(process, log)
        try:
            worker.ready = await worker._answer(_START_TIMEOUT_S)
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def ask(self, command: str, **arguments: Any) -> Mapping[str, Any]:
        """Returns the answer to one command."""
        if self._process.stdin is None or self._process.returncode is not None:
            raise ContenderError(self._last_words())
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
            await self._process.stdin.drain()
        except ConnectionError:
            raise ContenderError(self._last_words()) from None
        return await self._answer(_ANSWER_TIMEOUT_S)

    async def stop(self) -> None:
        """Ends the process by closing its stdin; kills it if it does not end."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _answer(self, timeout_s: float) -> dict[str, Any]:
        if self._process.stdout is None:
            raise ContenderError("its output is not read")
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            self._process.kill()
            raise ContenderError(f"no answer within {timeout_s:.0f} s") from None
        if not line:
            raise ContenderError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ContenderError(answer["error"])
        return answer

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"the process ended: {lines[-1] if lines else 'it said nothing'}"
