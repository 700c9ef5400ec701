"""The predictor with a fixed pace: the real service, whose runner takes PACE_MS longer for a step."""

import os
import time
from typing import Any

from headrace_predictor import __main__


def prepare() -> None:
    """Slows the runner in each engine process."""
    from headrace_predictor.engine import build
    from headrace_predictor.engine.runners.paged import PagedRunner

    pause_s = float(os.environ["PACE_MS"]) / 1000

    class PacedRunner(PagedRunner):
        def is_exact(self) -> bool:
            return False  # One token of a stream in each step.

        def run(self, rows: Any) -> Any:
            logits = super().run(rows)
            if any(row.samples for row in rows):
                time.sleep(pause_s)
            return logits

    build.PagedRunner = PacedRunner  # type: ignore[attr-defined]


if __name__ == "__main__":
    __main__.main(prepare="bench.paced_predictor:prepare")
