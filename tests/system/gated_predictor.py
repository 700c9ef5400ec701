"""The predictor with a gate before each step of its models, for tests that stop the model between tokens.

It is the real service with one model; only its runner waits. A test opens the gate by sending bytes to the Unix
socket `GATE_SOCKET`: each byte lets the model generate one token of one sequence.
"""

import os
import socket
import threading
from pathlib import Path

from headrace_predictor import __main__

UNGATED = ("warm-up", "")  # The empty one is the engine's own probe.


class Gate:
    """Permits, one for each byte that arrives."""

    def __init__(self, path: str) -> None:
        self._permits = threading.Semaphore(0)
        Path(path).unlink(missing_ok=True)  # A killed process may have left it.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path)
        threading.Thread(target=self._receive, name="gate", daemon=True).start()

    def wait(self) -> None:
        self._permits.acquire()

    def _receive(self) -> None:
        while data := self._socket.recv(4096):
            self._permits.release(len(data))


def prepare() -> None:
    """Installs the gate in the engine process."""
    from headrace_predictor.engine import build
    from headrace_predictor.engine.runners.paged import PagedRunner

    gate = Gate(os.environ["GATE_SOCKET"])

    class GatedRunner(PagedRunner):
        def is_exact(self):
            return False  # One token of a stream in each step.

        def run(self, rows):
            for row in rows:
                if row.samples and row.sequence.id not in UNGATED:
                    gate.wait()
            return super().run(rows)

    build.PagedRunner = GatedRunner


if __name__ == "__main__":
    __main__.main(prepare="tests.system.gated_predictor:prepare")
