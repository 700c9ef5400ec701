"""A contender's process, from the view of its parent: started on one core, sent commands, stopped.

Every failure is a ContenderError with one line of reason: the contender is reported as absent, and the others continue.
"""

import json
import os
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.contenders import ROOT, Contender

_START_TIMEOUT_S = 300.0
_ANSWER_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 20.0

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

    def __init__(self, contender: Contender, model: Path, log: Path, core: int) -> None:
        """Starts the worker and waits until its model is loaded; stderr goes to `log`."""
        self._log = log
        cores = os.sched_getaffinity(0)
        # A child inherits the cores of the thread that starts it, before it creates any thread of its own.
        os.sched_setaffinity(0, {core})
        try:
            with log.open("wb") as errors:
                self._process = subprocess.Popen(
                    (contender.python, "-m", "bench.workers", contender.module, str(model), *contender.arguments),
                    cwd=ROOT,
                    env=os.environ | ENVIRONMENT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
        finally:
            os.sched_setaffinity(0, cores)
        try:
            self.ready = self._exchange("", _START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Returns the answer to one command."""
        return self._exchange(json.dumps({"command": command, **arguments}) + "\n", _ANSWER_TIMEOUT_S)

    def stop(self) -> None:
        """Ends the process by closing its stdin; kills it if it does not end."""
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _exchange(self, command: str, timeout_s: float) -> dict[str, Any]:
        """Writes a command, and returns the next answer; kills the process if there is none in time."""
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(command)
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            words = self._log.read_text(errors="replace").strip().splitlines() or ["no output"]
            raise ContenderError(f"the process ended, or was killed after {timeout_s:.0f} s: {words[-1]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ContenderError(answer["error"])
        return answer
