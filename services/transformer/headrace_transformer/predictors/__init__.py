"""Everything that talks to predictors: calls, retries, resume, replicas; and the tokens that come from any of them."""

from dataclasses import dataclass, field, replace

from headrace.oip.prompt_scores import PromptLogprobs
from headrace_protos.headrace_pb2 import Usage

# How an answer went on after its engine failed, the best first: the same answer as without the failure, one that began
# again before anything was shown, or one that goes on from its tokens or its text as well as the engine can.
EXACT, RESTARTED, APPROXIMATE = "exact", "restarted", "approximate"
CONTINUITY = "x-headrace-continuity"
_WORST_LAST = ("", EXACT, RESTARTED, APPROXIMATE)


def worse(one: str, other: str) -> str:
    """The worse of two of them; "" is no failure."""
    return max(one, other, key=_WORST_LAST.index)


@dataclass(slots=True)
class TokenChunk:
    """New token ids, with log probabilities (see TextChunk) where requested; the last one has `finish_reason`.

    `cached_tokens` is the number of prompt tokens that needed no computation, if it is known. `prompt` is in the first
    chunk with tokens, if requested. `fingerprint` is that of the weights. `resumed` marks the first chunk after another
    call has resumed the answer; this one and the very first have the name of their `predictor`. `engine_s` is how long
    engines have worked for the answer so far, None if unknown. `repeated`: the client has it, see
    services/transformer/headrace_transformer/generation/repeating.py. `continuity`: in the first chunk
    after an engine's failure, how the answer went on.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage | None = None
    cached_tokens: int | None = None
    fingerprint: str = ""
    prompt: PromptLogprobs | None = None
    resumed: bool = False
    predictor: str = ""
    engine_s: float | None = None
    repeated: bool = False
    continuity: str = ""

    def part(self, start: int, end: int | None = None) -> "TokenChunk":
        """A chunk with some of the tokens, and their log probabilities."""
        ids, logprobs, tops = self.token_ids[start:end], self.logprobs[start:end], self.top_logprobs[start:end]
        return replace(self, token_ids=ids, logprobs=logprobs, top_logprobs=tops)
