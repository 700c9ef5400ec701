"""What a predictor is asked to generate, as steps.proto has it: the whole answer, or the rest of it. Pure."""

from __future__ import annotations

from headrace.rpc.client.interceptors import CallSpan
from headrace.sampling import RESTRICTIONS, SamplingParameters
from headrace_protos import steps_pb2 as pb
from headrace_transformer.predictors.progress import Progress
from headrace_transformer.predictors.tokens import Generation


def write_submission(
    generation: Generation, progress: Progress, span: CallSpan, is_isolated: bool, timeout_s: float | None
) -> pb.Submission:
    """The next call's, which continues after the tokens so far; without the number, which its link sets.

    `timeout_s`: what is left of the deadline. The log probabilities of the prompt are asked for once only.
    """
    return pb.Submission(
        model=generation.model,
        request_id=generation.request_id,
        prompt_ids=generation.prompt_ids,
        output_ids=progress.output_ids,
        sampling=_sampling(generation.sampling),
        # A call that continues after earlier ids follows one whose first chunk had them.
        prompt_logprobs=None if progress.output_ids else generation.prompt_logprobs,
        timeout_s=timeout_s,
        alone=is_isolated,
        fingerprint=progress.fingerprint,
        traceparent=span.traceparent,
        follows=span.follows,
        client=generation.client,
        weight=generation.weight,
        paced_after=generation.paced_after,
    )


def _sampling(sampling: SamplingParameters) -> bytes:
    """As JSON; without what changes nothing and a predictor of an earlier release would refuse."""
    unused = {name for name in ("pace", "structured_outputs", *RESTRICTIONS) if not getattr(sampling, name)}
    return sampling.model_dump_json(exclude_none=True, exclude=unused).encode()
