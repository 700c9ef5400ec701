"""The predictor with faults that files in the folder `FAULTS` request.

It is the real service. After `raise-PORT` is created, the next step of several rows raises, once; a failure with one
row would be that request's own. While `dead-PORT` exists, every step and every probe raises. A request with the seed
FAILS fails in its fourth step. Whenever a request has ended, `blocks-PORT` has the number of blocks of the KV cache in
use and the number of sequences, in one line.

With PACE_MS in the environment a step takes that many milliseconds longer, as if the model ran on its own device and
left the processor to the others. A prompt with the token POISON_ID kills the engine process in its first step.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

from headrace_predictor import __main__

FAILS = 13
_FAILS_AFTER = 3


class InjectedError(Exception):
    """A requested failure of a step."""


def prepare() -> None:
    """Installs the faults in each engine process."""
    from headrace_predictor.engine import build
    from headrace_predictor.engine.runners.paged import PagedRunner
    from headrace_predictor.engine.scheduler import Scheduler

    folder, port = Path(os.environ["FAULTS"]), os.environ["PREDICTOR_PORT"]
    raising, dead, blocks = (folder / f"{name}-{port}" for name in ("raise", "dead", "blocks"))
    pace_s, poison = float(os.environ.get("PACE_MS", 0)) / 1000, int(os.environ.get("POISON_ID", -1))
    # The file is the previous process's.
    dead.unlink(missing_ok=True)

    class FaultyRunner(PagedRunner):
        def is_exact(self) -> bool:
            return False  # One token of a stream in each step.

        def run(self, rows: Any) -> Any:
            if dead.exists():
                raise InjectedError
            if len(rows) > 1 and raising.exists():
                raising.unlink(missing_ok=True)
                raise InjectedError
            time.sleep(pace_s)
            for row in rows:
                if poison in row.sequence.input_ids:
                    os.kill(os.getpid(), signal.SIGKILL)
                if row.sequence.sampling.seed == FAILS and len(row.sequence.output_ids) == _FAILS_AFTER:
                    raise InjectedError
            return super().run(rows)

    class CountingScheduler(Scheduler):
        def remove(self, *arguments: Any, **named: Any) -> Any:
            released = super().remove(*arguments, **named)
            blocks.write_text(f"{self.blocks.total - self.blocks.free} {len(self.sequences)}\n")
            return released

    build.PagedRunner = FaultyRunner  # type: ignore[misc]
    build.Scheduler = CountingScheduler  # type: ignore[misc]


if __name__ == "__main__":
    __main__.main(prepare="tests.chaos.predictor:prepare")
