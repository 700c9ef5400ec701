"""The tokens that a client has of a broken answer, from the payload log: they need not be generated again.

Found by the request's id, if the client sent the same one again, or the one of the first answer's `x-request-id`. They
are used only if prompt, weights and checksum agree, so a wrong record, which another request with the same id may have,
is ignored. The log never fails a request, nor does it delay one for long.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from headrace.errors import HeadraceError
from headrace_protos.headrace_pb2 import PayloadRecord, QueryPayloadsRequest
from headrace_transformer.generation.requests import PreparedGeneration, TextRequest
from headrace_transformer.generation.resume_ids import ResumePoint, checksum
from headrace_transformer.predictors.tokens import TokenChunk

logger = logging.getLogger(__name__)

_TIMEOUT_S = 0.5
_MAX_RECORDS = 4  # With the same request id; each reconnection adds one.


class RecordedTokens:
    """Reads `log`, a PayloadLogStub."""

    def __init__(self, log: Any) -> None:
        self._log = log

    async def find(self, request: TextRequest, generation: PreparedGeneration) -> TokenChunk | None:
        """The tokens that the client has, None if the log does not have them or they do not suffice."""
        resume = request.resume
        # A complete answer has no next token, and the prompt's log probabilities are not on record.
        if resume is None or resume.stage or generation.dialect is not None or request.prompt_logprobs is not None:
            return None
        query = QueryPayloadsRequest(
            request_id=request.call.request_id, client=request.call.client.name or None, page_size=_MAX_RECORDS
        )
        try:
            async for record in self._log.Query(query, timeout=_TIMEOUT_S):
                found = _tokens_of(record, resume, generation)
                if found is not None:
                    return found
        except HeadraceError as error:
            logger.debug("request %s is not looked up in the payload log: %s", request.call.request_id, error.message)
        return None


def _tokens_of(record: PayloadRecord, resume: ResumePoint, generation: PreparedGeneration) -> TokenChunk | None:
    token_ids: list[int] = []
    logprobs: list[float] = []
    for chunk in record.chunks:
        token_ids += chunk.token_ids
        logprobs += chunk.logprobs
    token_ids, logprobs = token_ids[: resume.tokens], logprobs[: resume.tokens]
    is_same = (
        len(token_ids) == resume.tokens
        and checksum(token_ids) == resume.checksum
        and record.fingerprint == resume.fingerprint
        and _equal(record.prompt_ids, generation.prompt_ids)
        and len(logprobs) == (resume.tokens if generation.sampling.logprobs else 0)
    )
    return TokenChunk(token_ids, logprobs, fingerprint=resume.fingerprint, repeated=True) if is_same else None


def _equal(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and list(one) == list(other)
