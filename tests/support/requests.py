"""Requests to any engine."""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from typing import Any

from headrace.sampling import SamplingParameters
from headrace_predictor.engine.interface import GenerationRequest


def request(
    name: str = "a",
    prompt: Rows[int] = (5, 6),
    output_ids: Rows[int] = (),
    deadline: float = math.inf,
    first_token_timeout_s: float | None = None,
    alone: bool = False,
    client: str = "",
    **parameters: Any,
) -> GenerationRequest:
    sampling = SamplingParameters(**{"max_tokens": 12, "seed": 3, **parameters})
    return GenerationRequest(
        name, list(prompt), sampling, list(output_ids), deadline, first_token_timeout_s, alone, client=client
    )
