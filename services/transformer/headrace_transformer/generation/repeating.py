"""The tokens of an answer that is computed again for a client that has a part of it.

Chunks that the client has are marked as `repeated`. A chunk that reaches beyond them is split, so that the rest begins
exactly where the client's part ends. The tokens are compared with the client's by their checksum: an answer that cannot
be repeated exactly ends with an error, and never continues with another text.

Tokens that the payload log has need not be generated again. It is asked for the request's id, if the client sent the
same one again, or the one of the first answer's `x-request-id`. Its tokens are used only if prompt, weights and
checksum agree, so a wrong record, which another request with the same id may have, is ignored. The log never fails a
request, nor does it delay one for long.
"""

import logging
from dataclasses import replace
from typing import Any

from headrace.errors import HeadraceError, HopBrokenError
from headrace_protos.headrace_pb2 import PayloadRecord, QueryPayloadsRequest
from headrace_transformer.generation.preparation import Prepared
from headrace_transformer.generation.requests import TextRequest
from headrace_transformer.generation.resume_ids import ResumePoint, checksum
from headrace_transformer.predictors import TokenChunk
from headrace_transformer.predictors.resume.resuming import TokenStream

logger = logging.getLogger(__name__)

_TIMEOUT_S = 0.5
_MAX_RECORDS = 4  # With the same request id; each reconnection adds one.


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
        self._rest = replace(chunk.part(left), prompt=None, resumed=False, predictor="")
        return replace(chunk.part(0, left), finish_reason=None, usage=None, repeated=True)

    def _repeat(self, token_ids: list[int], is_last: bool) -> None:
        self._left -= len(token_ids)
        self._checksum = checksum(token_ids, self._checksum)
        differs = not self._left and self._checksum != self._resume.checksum
        if differs or (is_last and self._left):
            raise HopBrokenError("the answer could not be repeated: other tokens came out", hop="predictor")


class RecordedTokens:
    """Reads `log`, a PayloadLogStub."""

    def __init__(self, log: Any) -> None:
        self._log = log

    async def find(self, request: TextRequest, prepared: Prepared) -> TokenChunk | None:
        """The tokens that the client has, None if the log does not have them or they do not suffice."""
        resume = request.resume
        # A complete answer has no next token, and what is asked beside them is not on record.
        if resume is None or resume.stage or prepared.dialect is not None or request.asked.ByteSize():
            return None
        query = QueryPayloadsRequest(
            request_id=request.call.request_id, client=request.call.client.name or None, page_size=_MAX_RECORDS
        )
        try:
            async for record in self._log.Query(query, timeout=_TIMEOUT_S):
                found = _tokens_of(record, resume, prepared)
                if found is not None:
                    return found
        except HeadraceError as error:
            logger.debug("request %s is not looked up in the payload log: %s", request.call.request_id, error.message)
        return None


def _tokens_of(record: PayloadRecord, resume: ResumePoint, prepared: Prepared) -> TokenChunk | None:
    token_ids: list[int] = []
    logprobs: list[float] = []
    for chunk in record.chunks:
        token_ids += chunk.token_ids
        logprobs += chunk.logprobs
    token_ids, logprobs, prompt_ids = token_ids[: resume.tokens], logprobs[: resume.tokens], prepared.origin.prompt_ids
    is_same = (
        len(token_ids) == resume.tokens
        and checksum(token_ids) == resume.checksum
        and record.fingerprint == resume.fingerprint
        and len(record.prompt_ids) == len(prompt_ids)
        and list(record.prompt_ids) == list(prompt_ids)
        and len(logprobs) == (resume.tokens if prepared.sampling.logprobs else 0)
    )
    return TokenChunk(token_ids, logprobs, fingerprint=resume.fingerprint, repeated=True) if is_same else None
