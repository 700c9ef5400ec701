"""The predictor with a pace: each token is made at a moment of its own, which is written down.

It is the real service; only the runner waits, 5 to 60 ms a token or PACE_MS each, by a sequence that the
environment's PACE_SEED fixes. To the file PACE_LOG, where there is one, goes a line for each token, when it leaves
the runner: request id, tab, seconds of the machine's monotonic clock.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

from millrace.rpc.service import run_service
from services.predictor.__main__ import serve
from services.predictor.engine import build
from services.predictor.engine.runners.paged import PagedRunner
from services.predictor.settings import PredictorSettings

_SHORTEST_S, _LONGEST_S = 0.005, 0.06


def main() -> None:
    pace = random.Random(os.environ["PACE_SEED"])  # noqa: S311  # A pace, no secret.
    always_s = float(os.environ.get("PACE_MS", 0)) / 1000
    with Path(os.environ.get("PACE_LOG", os.devnull)).open("a", buffering=1) as log:

        class PacedRunner(PagedRunner):
            def run(self, rows: Any) -> Any:
                made = super().run(rows)
                told = [row.sequence.request.id for row in rows if row.samples]
                if told:
                    time.sleep(always_s or pace.uniform(_SHORTEST_S, _LONGEST_S))
                    now = time.monotonic()
                    log.writelines(f"{request_id}\t{now}\n" for request_id in told)
                return made

        build.PagedRunner = PacedRunner  # type: ignore[misc]
        run_service("predictor", PredictorSettings, serve)


if __name__ == "__main__":
    main()
