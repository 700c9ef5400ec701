"""The predictor with a model that computes nothing, to measure the path of tokens and not their generation.

It is the real service, including scheduler and sampler; only the runner computes nothing: every logit favours one
token, after a pause of PACE_MS, in which other threads can run.
"""

import os
import time
from functools import cache
from typing import Any

from headrace_predictor import __main__

_TOKEN_ID = 100


def instant_runner() -> type[Any]:
    """The class of the runner; imports torch, which only engine processes do."""
    import torch

    from headrace_predictor.engine.runners.paged import PagedRunner

    pause_s = float(os.environ["PACE_MS"]) / 1000

    class InstantRunner(PagedRunner):
        def __init__(self, model: Any, *arguments: Any, **more: Any) -> None:
            super().__init__(model, *arguments, **more)
            logits = torch.zeros(model.get_input_embeddings().num_embeddings)
            logits[_TOKEN_ID] = 10.0
            self._logits_of = cache(lambda rows: logits.repeat(rows, 1))

        def is_exact(self) -> bool:
            return False  # One token of a stream in each step.

        def run(self, rows: Any) -> Any:
            time.sleep(pause_s)
            return self._logits_of(sum(row.samples for row in rows))

    return InstantRunner


def prepare() -> None:
    """Replaces the runner in each engine process."""
    from headrace_predictor.engine import build

    build.PagedRunner = instant_runner()  # type: ignore[misc]


if __name__ == "__main__":
    __main__.main(prepare="bench.instant_predictor:prepare")
