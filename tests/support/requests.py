"""Submissions to any engine."""

from collections.abc import Sequence as Rows
from typing import Any

from headrace.sampling import SamplingParameters
from headrace_protos.steps_pb2 import Submission


def submission(
    name: str, prompt: Rows[int], sampling: SamplingParameters, output_ids: Rows[int] = (), **fields: Any
) -> Submission:
    """With these sampling parameters; `fields` are the message's."""
    return Submission(
        request_id=name,
        prompt_ids=prompt,
        sampling=sampling.model_dump_json(exclude_defaults=True).encode(),
        output_ids=output_ids,
        **fields,
    )


def request(
    name: str = "a",
    prompt: Rows[int] = (5, 6),
    output_ids: Rows[int] = (),
    deadline: float | None = None,
    first_token_timeout_s: float | None = None,
    alone: bool = False,
    client: str = "",
    **parameters: Any,
) -> Submission:
    sampling = SamplingParameters(**{"max_tokens": 12, "seed": 3, **parameters})
    return submission(
        name,
        prompt,
        sampling,
        output_ids,
        deadline=deadline,
        first_token_timeout_s=first_token_timeout_s,
        alone=alone,
        client=client,
    )
