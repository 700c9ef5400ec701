"""The predictor with faults that a test requests by files in the folder `FAULTS` and by token ids.

It is the real service; only the model fails. While `hold` exists, no step runs, and while
`hold_later` exists, no fourth step of a request with the seed HOLDS_LATER; while `down` exists, the process
does not start. `admitted` grows by a byte for each request that the engine or the Python model accepts.
A request with the seed FAILS fails in its first step, one with the seed FAILS_LATER in its fourth.

If the environment names a token id, a request with it in its prompt is fatal: with
POISON_ID it kills the engine process (SIGKILL, as a segmentation fault would) in the first step that computes any of
it, on every replica and after every restart; with HANGS_ID that step never ends, so that PREDICTOR_STEP_TIMEOUT
must end the process. Both hold for the engines of all models. For a text model the id comes from its
tokenizer: take a word that is one token and that no other prompt of the test has.
"""

import os
import signal
import time
from pathlib import Path

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


def wait_while(name: str) -> None:
    while (Path(os.environ["FAULTS"]) / name).exists():
        time.sleep(0.01)


def prepare() -> None:
    """Installs the faults in each engine process."""
    from headrace_predictor.engine import build
    from headrace_predictor.engine.runners.paged import PagedRunner
    from headrace_predictor.engine.scheduler import Scheduler

    folder = Path(os.environ["FAULTS"])
    poison, hangs = (int(os.environ.get(name) or -1) for name in ("POISON_ID", "HANGS_ID"))

    class FaultyRunner(PagedRunner):
        def run(self, rows):
            for row in rows:
                sequence, made = row.sequence, len(row.sequence.output_ids)
                if sequence.id in _OWN:
                    continue
                if poison in sequence.input_ids:
                    os.kill(os.getpid(), signal.SIGKILL)
                while hangs in sequence.input_ids:
                    time.sleep(60)
                wait_while("hold")
                if made == _HOLDS_AFTER.get(sequence.sampling.seed):
                    wait_while("hold_later")
                if made == _FAILS_AFTER.get(sequence.sampling.seed):
                    raise RuntimeError("secret")
            return super().run(rows)

    class CountingScheduler(Scheduler):
        def add(self, sequence, retry_after_ms):
            super().add(sequence, retry_after_ms)
            if sequence.id not in _OWN:
                with (folder / "admitted").open("a") as admitted:
                    admitted.write(".")

    build.PagedRunner = FaultyRunner
    build.Scheduler = CountingScheduler


if __name__ == "__main__":
    wait_while("down")
    __main__.main(prepare="tests.system.faulty_predictor:prepare")
