"""How much of a prompt is used where the request limits it (vLLM's `truncate_prompt_tokens`): its last tokens."""

from __future__ import annotations

from typing import Any

from millrace.errors import InvalidRequestError
from millrace.sampling import ContextLimits

MAX_TRUNCATED_TOKENS = 1024 * 1024  # Tokens of a prompt before it is cut; longer ones are refused.


def kept_tokens(limit: int, limits: ContextLimits, max_tokens: Any) -> int:
    """The number of tokens to keep; -1 stands for as many as leave room for `max_tokens`, or for one, if none is given.

    Raises InvalidRequestError for a limit beyond the context.
    """
    context_length = limits.context_length
    if limit > context_length:
        raise InvalidRequestError(
            f"truncate_prompt_tokens={limit} is more than the context, which is {context_length}",
            param="truncate_prompt_tokens",
        )
    if limit != -1:
        return limit
    if limits.is_encoder_decoder:
        return context_length
    reserved = max_tokens if isinstance(max_tokens, int) else 1
    return max(1, context_length - max(1, reserved))
