"""Checks the tokens that vLLM generates for answers with a form, see headrace/structured_outputs.py.

vLLM's backend `guidance` masks the tokens. It compiles a form with the library of headrace/grammars.py, so the same
answers are possible. The grammar that the engine compiles before a sequence is queued bounds what vLLM compiles, takes
each token after vLLM, and ends the answer where it is complete.

To vLLM's grammar the end of an answer is one token, the tokenizer's own end token: vLLM generates it also if a grammar
fails there. Without an allowed token it generates any.
"""

from __future__ import annotations

import logging
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.grammars import grammar_error, no_token_error
from headrace.models.tokenizer_files import read_tokenizer
from headrace_predictor.engine.sampling.sampler import NO_TOKEN
from headrace_predictor.engine.state.sequence import Sequence

logger = logging.getLogger(__name__)


def end_id_of(folder: Path) -> int | None:
    """The end token of the tokenizer in a folder; None if there is no tokenizer that grammars can use."""
    try:
        from llguidance import LLTokenizer

        tokenizer = read_tokenizer(folder)
        LLTokenizer(tokenizer.backend.to_str())
        return tokenizer.eos_id
    except Exception:  # Files may have any contents, and tokenizers raises bare Exceptions.
        logger.warning("grammars cannot use the tokenizer in %s: no structured output", folder, exc_info=True)
        return None


def checked(sequence: Sequence, token_id: int, end_id: int | None, eos_ids: frozenset[int]) -> int | HeadraceError:
    """The next token of an answer with a form, NO_TOKEN if the answer ends without one, or why it cannot go on."""
    constraint, sampling = sequence.constraint, sequence.sampling
    if constraint is None:
        return token_id
    is_allowed = not sampling.allowed_token_ids or token_id in sampling.allowed_token_ids
    if token_id != end_id and is_allowed and constraint.allows(token_id):
        return token_id
    if token_id == end_id and constraint.may_end:
        if sampling.finish_reason(token_id, len(sequence.output_ids), sampling.end_ids(eos_ids)) == "stop":
            return token_id
        constraint.stop(is_complete=True)
        return NO_TOKEN
    if sampling.has_restrictions:
        return no_token_error()
    return grammar_error("the grammar is too complex for vLLM at this point")
