"""The predictor with a model that computes nothing, to measure the path of tokens and not their generation.

It is the real service, including scheduler and sampler; only the runner computes nothing: every logit favours one
token, after a pause of PACE_MS, in which other threads can run.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from millrace.rpc.service import run_service
from services.predictor.__main__ import serve
from services.predictor.engine import build
from services.predictor.engine.runners.paged import PagedRunner
from services.predictor.settings import PredictorSettings

_TOKEN_ID = 100


def main() -> None:
    pause_s = float(os.environ["PACE_MS"]) / 1000

    class InstantRunner(PagedRunner):
        def __init__(self, model: Any, *arguments: Any, **more: Any) -> None:
            super().__init__(model, *arguments, **more)
            self._logits = torch.zeros(model.get_input_embeddings().num_embeddings)
            self._logits[_TOKEN_ID] = 10.0

        def run(self, rows: Any) -> Any:
            time.sleep(pause_s)
            return self._logits.repeat(sum(row.samples for row in rows), 1)

    build.PagedRunner = InstantRunner  # type: ignore[attr-defined]
    run_service("predictor", PredictorSettings, serve)


if __name__ == "__main__":
    main()
