"""The tokens of an answer that is computed again for a client that has a part of it.

Chunks that the client has are marked as `repeated`. A chunk that reaches beyond them is split, so that the rest begins
exactly where the client's part ends. The tokens are compared with the client's by their checksum: an answer that cannot
be repeated exactly ends with an error, and never continues with another text.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.errors import HopBrokenError
from headrace_transformer.generation.resume_ids import ResumePoint, checksum
from headrace_transformer.predictors.resuming import TokenStream
from headrace_transformer.predictors.tokens import TokenChunk


class RepeatedTokens:
    """See the module; reads `tokens`, whose owner closes it; these follow `known` ones, which are the client's."""

    def __init__(self, tokens: TokenStream, resume: ResumePoint, known: TokenChunk | None = None) -> None:
        self._tokens = tokens
        self._resume = resume
        self._left = resume.tokens if known is None else 0  # Tokens that are still to be repeated.
        self._checksum = 0
        self._known = known
        self._rest: TokenChunk | None = None

    async def read(self) -> TokenChunk:
        """As TokenStream; raises HopBrokenError too."""
        if self._rest is not None:
            chunk, self._rest = self._rest, None
            return chunk
        chunk = await self._tokens.read()
        if self._known is not None:  # Which are of no use before the rest follows.
            known, self._known, self._rest = self._known, None, chunk
            return known
        left, has_end = self._left, bool(self._resume.stage)
        if not (left or has_end):
            return chunk
        count, is_last = len(chunk.token_ids), chunk.finish_reason is not None
        self._repeat(chunk.token_ids[:left], is_last)
        if has_end or count < left or (count == left and not is_last):
            chunk.repeated = True
            return chunk
        self._rest = _rest(chunk, left)
        return _beginning(chunk, left)

    def _repeat(self, token_ids: list[int], is_last: bool) -> None:
        self._left -= len(token_ids)
        self._checksum = checksum(token_ids, self._checksum)
        differs = not self._left and self._checksum != self._resume.checksum
        if differs or (is_last and self._left):
            raise HopBrokenError("the answer could not be repeated: other tokens came out", hop="predictor")


def _beginning(chunk: TokenChunk, count: int) -> TokenChunk:
    return replace(
        chunk,
        token_ids=chunk.token_ids[:count],
        logprobs=chunk.logprobs[:count],
        top_logprobs=chunk.top_logprobs[:count],
        finish_reason=None,
        usage=None,
        repeated=True,
    )


def _rest(chunk: TokenChunk, count: int) -> TokenChunk:
    return replace(
        chunk,
        token_ids=chunk.token_ids[count:],
        logprobs=chunk.logprobs[count:],
        top_logprobs=chunk.top_logprobs[count:],
        prompt=None,
        resumed=False,
        predictor="",
    )
