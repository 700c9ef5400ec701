"""What a predictor is asked to generate (steps.proto): the pipeline writes it, each call copies it. Pure."""

from __future__ import annotations

from headrace.rpc.client.interceptors import ClientSpan
from headrace.sampling import RESTRICTIONS, SamplingParameters
from headrace_protos import steps_pb2 as pb
from headrace_transformer.predictors.progress import Progress


def sampling_json(sampling: SamplingParameters) -> bytes:
    """The parameters as a submission has them; without what changes nothing and an earlier release would refuse."""
    unused = {name for name in ("pace", "structured_outputs", *RESTRICTIONS) if not getattr(sampling, name)}
    return sampling.model_dump_json(exclude_none=True, exclude=unused).encode()


def next_submission(
    submission: pb.Submission, progress: Progress, span: ClientSpan, is_isolated: bool, timeout_s: float | None
) -> pb.Submission:
    """The next call's, which continues after the tokens so far; its link sets the number.

    `timeout_s`: what is left of the deadline. The log probabilities of the prompt are asked for once only.
    """
    own = pb.Submission(
        output_ids=progress.output_ids,
        timeout_s=timeout_s,
        alone=is_isolated,
        fingerprint=progress.fingerprint,
        traceparent=span.traceparent,
        follows=span.follows,
        moved=bool(progress.output_ids),
    )
    own.MergeFrom(submission)
    if progress.output_ids:  # A call that continues after earlier ids follows one whose first chunk had them.
        own.ClearField("prompt_logprobs")
    return own
