"""Log probabilities of a prompt's own tokens, between predictor and transformer.

The parameter `prompt_logprobs` = n of a generation requests them. The first response with tokens has them as outputs:
`prompt_logprobs` FP32 [N - 1], one for each token of the prompt except the first, and for the n likeliest tokens at
each position, best first, `prompt_top_logprob_ids` INT32 [N - 1, n] and `prompt_top_logprobs` FP32 [N - 1, n]. A model
that supports this lists these outputs. Between transformer and predictor they are a message of steps.proto.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidRequestError
from headrace.oip.tensors import Tensor
from headrace_protos.steps_pb2 import PromptScores, Submission

PROMPT_LOGPROBS: Final = "prompt_logprobs"
PROMPT_TOP_LOGPROB_IDS = "prompt_top_logprob_ids"
PROMPT_TOP_LOGPROBS = "prompt_top_logprobs"
OUTPUTS = (PROMPT_LOGPROBS, PROMPT_TOP_LOGPROB_IDS, PROMPT_TOP_LOGPROBS)
MAX_NUMBERS = 64 * 1024  # In one request's answer: what is written as JSON at once.


@dataclass(frozen=True)
class PromptLogprobs:
    """In nats, by the model's raw logits; the shapes are those of the outputs."""

    chosen: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top: NDArray[np.float32]

    @classmethod
    def joined(cls, parts: "Sequence[PromptLogprobs]", top: int) -> "PromptLogprobs":
        """The parts of one prompt, of `top` likeliest tokens each, in order; without any, those of one token."""
        return cls(
            np.concatenate([np.empty(0, np.float32), *(part.chosen for part in parts)]),
            np.concatenate([np.empty((0, top), np.int32), *(part.top_ids for part in parts)]),
            np.concatenate([np.empty((0, top), np.float32), *(part.top for part in parts)]),
        )

    def tensors(self) -> list[Tensor]:
        """The outputs that carry them."""
        return [
            Tensor(PROMPT_LOGPROBS, "FP32", self.chosen),
            Tensor(PROMPT_TOP_LOGPROB_IDS, "INT32", self.top_ids),
            Tensor(PROMPT_TOP_LOGPROBS, "FP32", self.top),
        ]

    def message(self) -> PromptScores:
        """The message that carries them."""
        top_ids, top = self.top_ids.ravel().tolist(), self.top.ravel().tolist()
        return PromptScores(chosen=self.chosen.tolist(), top_ids=top_ids, top=top)


def read_prompt(scores: PromptScores, top: int, count: int | None = None) -> PromptLogprobs:
    """A prompt's log probabilities, with `top` at each of `count` positions; raises ValueError if they are not."""
    shape = len(scores.chosen), top
    if count not in (None, shape[0]) or {len(scores.top_ids), len(scores.top)} != {shape[0] * top}:
        raise ValueError(f"{PROMPT_LOGPROBS} are not those asked for")
    return PromptLogprobs(
        np.array(scores.chosen, np.float32),
        np.array(scores.top_ids, np.int32).reshape(shape),
        np.array(scores.top, np.float32).reshape(shape),
    )


def reader_of(submission: Submission) -> Callable[[PromptScores], PromptLogprobs] | None:
    """Reads what a submission asks for, and raises ValueError for anything else; None where it asks for nothing."""
    if not submission.HasField(PROMPT_LOGPROBS):
        return None
    return partial(read_prompt, top=submission.prompt_logprobs, count=len(submission.prompt_ids) - 1)


def check_asked(submission: Submission, prompts: int) -> None:
    """As `check_size`, of what a submission asks for."""
    if submission.HasField(PROMPT_LOGPROBS):
        check_size(len(submission.prompt_ids), submission.prompt_logprobs, prompts)


def check_size(prompt_tokens: int, top: int, prompts: int = 1) -> None:
    """Refuses what would be more than `MAX_NUMBERS`, if all of `prompts` were as long as this one."""
    most = MAX_NUMBERS // (1 + top) // prompts
    if prompt_tokens > most:
        others = "" if prompts == 1 else f" and {prompts} choices"
        raise InvalidRequestError(
            f"the prompt has {prompt_tokens} tokens; with {top} likeliest{others}, log probabilities are given for "
            f"at most {most}"
        )
