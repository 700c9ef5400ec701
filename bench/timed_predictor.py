"""The predictor, whose runner counts its time in the file FORWARD_TIMES; with FREE=1 it computes nothing either."""

import os
from pathlib import Path

from bench.forward_times import VARIABLE, timed
from bench.instant_predictor import instant_runner
from headrace_predictor import __main__


def prepare() -> None:
    """Replaces the runner in each engine process."""
    from headrace_predictor.engine import build
    from headrace_predictor.engine.runners.paged import PagedRunner

    runner = instant_runner() if os.environ.get("FREE") else PagedRunner
    build.PagedRunner = timed(runner, Path(os.environ[VARIABLE]))  # type: ignore[misc]


if __name__ == "__main__":
    __main__.main("bench.timed_predictor:prepare")
