"""The predictor with slow models, and with faults that a test requests by files, by seeds and by a gate.

It is the real service; only the runners wait or fail. A step takes SLOW_MS longer, as if the model ran on its own
device: 20 where the environment requests nothing else. With GATE_SOCKET each byte that a test sends to that Unix socket
lets a decoder generate one token of one sequence.

Files in the folder `FAULTS` are faults of decoders. While `hold` exists, no step runs, and while `hold_later` exists,
no fourth step of a request with the seed HOLDS_LATER. After `raise-PORT` is created, the next step of several rows
raises, once; a failure with one row would be that request's own. While `dead-PORT` exists, every step and every probe
raises. While `down` exists, the process does not start. A request with the seed FAILS fails in its first step, one with
the seed FAILS_LATER in its fourth. `admitted` grows by a byte for each request that the engine or the Python model
accepts; whenever a request has ended, `blocks-PORT` has the number of blocks of the KV cache in use and that of
sequences, in one line.
"""

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from headrace_predictor import __main__

FAILS, FAILS_LATER, HOLDS_LATER = 13, 14, 15
_FAILS_AFTER = {FAILS: 0, FAILS_LATER: 3}
_HOLDS_AFTER = {HOLDS_LATER: 3}
_OWN = ("warm-up", "")  # The empty one is the engine's probe.

# A model that needs no text, with the same faults.
PYTHON_MODEL = """
import asyncio
import os
from pathlib import Path

from headrace.errors import InvalidRequestError

FAULTS = Path(os.environ["FAULTS"])


async def execute(request):
    if request.parameters.get("temperature", 0) < 0:
        raise InvalidRequestError("temperature must not be negative")
    with (FAULTS / "admitted").open("a") as admitted:
        admitted.write(".")
    if request.parameters.get("seed") == 13:
        raise RuntimeError("secret")
    while (FAULTS / "hold").exists():
        await asyncio.sleep(0.01)
    return request.raw
"""


def _wait_while(file: Path) -> None:
    while file.exists():
        time.sleep(0.01)


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


class Faults:
    """The faults that the files of a folder request from the decoders of one process."""

    def __init__(self, folder: Path, port: str) -> None:
        self._folder = folder
        self._raising, self._dead, self._blocks = (folder / f"{name}-{port}" for name in ("raise", "dead", "blocks"))
        self._dead.unlink(missing_ok=True)  # The previous process's.

    def before_step(self, rows: Any) -> None:
        if self._dead.exists():
            raise RuntimeError("secret")
        if len(rows) > 1 and self._raising.exists():
            self._raising.unlink(missing_ok=True)
            raise RuntimeError("secret")
        for row in rows:
            sequence = row.sequence
            if sequence.id in _OWN:
                continue
            _wait_while(self._folder / "hold")
            if len(sequence.output_ids) == _HOLDS_AFTER.get(sequence.sampling.seed):
                _wait_while(self._folder / "hold_later")
            if len(sequence.output_ids) == _FAILS_AFTER.get(sequence.sampling.seed):
                raise RuntimeError("secret")

    def added(self, sequence: Any) -> None:
        if sequence.id not in _OWN:
            with (self._folder / "admitted").open("a") as admitted:
                admitted.write(".")

    def removed(self, scheduler: Any) -> None:
        blocks = scheduler.blocks
        self._blocks.write_text(f"{blocks.total - blocks.free} {len(scheduler.sequences)}\n")


def prepare() -> None:
    """Installs pace, gate and faults in each engine process."""
    from headrace_predictor.engine import build
    from headrace_predictor.engine.runners import proof
    from headrace_predictor.engine.runners.encoder_decoder import EncoderDecoderRunner
    from headrace_predictor.engine.runners.paged import PagedRunner
    from headrace_predictor.engine.scheduler import Scheduler

    folder = os.environ.get("FAULTS")
    faults = Faults(Path(folder), os.environ["PREDICTOR_PORT"]) if folder else None
    gate = Gate(os.environ["GATE_SOCKET"]) if "GATE_SOCKET" in os.environ else None
    pause_s = float(os.environ.get("SLOW_MS", 0 if faults or gate else 20)) / 1000

    class FaultyRunner(PagedRunner):
        def is_exact(self) -> bool:
            return False  # One token of a stream in each step.

        def run(self, rows: Any) -> Any:
            if faults:
                faults.before_step(rows)
            for row in rows:
                if gate and row.samples and row.sequence.id not in _OWN:
                    gate.wait()
            made = super().run(rows)
            time.sleep(pause_s)
            return made

    class SlowEncoderDecoderRunner(EncoderDecoderRunner):
        def run(self, rows: Any) -> Any:
            made = super().run(rows)
            time.sleep(pause_s)
            return made

    class CountingScheduler(Scheduler):
        def add(self, sequence: Any, retry_after_ms: int) -> None:
            super().add(sequence, retry_after_ms)
            if faults:
                faults.added(sequence)

        def remove(self, *arguments: Any, **named: Any) -> Any:
            released = super().remove(*arguments, **named)
            if faults:
                faults.removed(self)
            return released

    build.PagedRunner, proof.EncoderDecoderRunner = FaultyRunner, SlowEncoderDecoderRunner  # type: ignore[misc]
    build.Scheduler = CountingScheduler  # type: ignore[misc]


if __name__ == "__main__":
    if "FAULTS" in os.environ:
        _wait_while(Path(os.environ["FAULTS"]) / "down")
    __main__.main(prepare="tests.system.faulty_predictor:prepare")
