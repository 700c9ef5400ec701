"""The predictor with slow models, so that a test can act between two tokens.

It is the real service; only the runners wait, SLOW_MS (20) after each step. While the file AWAY exists, it does
not start.
"""

import os
import time
from pathlib import Path

from headrace_predictor import __main__


def prepare() -> None:
    """Slows the runners in each engine process."""
    from headrace_predictor.engine import build
    from headrace_predictor.engine.runners import proof
    from headrace_predictor.engine.runners.encoder_decoder import EncoderDecoderRunner
    from headrace_predictor.engine.runners.paged import PagedRunner

    pause_s = float(os.environ.get("SLOW_MS", 20)) / 1000

    class SlowPagedRunner(PagedRunner):
        def is_exact(self):
            return False  # One token of a stream in each step.

        def run(self, rows):
            made = super().run(rows)
            time.sleep(pause_s)
            return made

    class SlowEncoderDecoderRunner(EncoderDecoderRunner):
        def run(self, rows):
            made = super().run(rows)
            time.sleep(pause_s)
            return made

    build.PagedRunner, proof.EncoderDecoderRunner = SlowPagedRunner, SlowEncoderDecoderRunner


if __name__ == "__main__":
    away = os.environ.get("AWAY")
    while away and Path(away).exists():
        time.sleep(0.1)
    __main__.main(prepare="tests.system.slow_predictor:prepare")
