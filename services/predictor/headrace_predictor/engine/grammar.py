"""The grammars of sequences: compiled before these are queued, and the tokens that they allow in a step.

A grammar is compiled on one of two threads, with a bounded queue in which clients have turns. The model's vocabulary is
read with the first grammar. A compiled grammar is kept for other sequences: each has a copy. A sequence that continues
an answer replays its tokens.

Masks are computed on the engine's thread, between the start of the forward pass and the sampling: a GPU computes the
pass meanwhile. A CPU does not; there the masks of 32 rows, of a vocabulary of 1,536, take about half a millisecond.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import HeadraceError, InvalidRequestError, OverloadedError, RequestFailedError
from headrace.grammars import PARAMETER, compile_grammar
from headrace.models.tokenizer_files import read_tokenizer
from headrace.threads import FairThreads
from headrace_predictor.engine.state.constraint import Constraint
from headrace_predictor.engine.state.sequence import Row, Sequence

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

_THREADS = 2
_MAX_WAITING = 256
_KEPT = 32  # Compiled grammars.
_RETRY_AFTER_MS = 1000
# A token that the model does not have: whether the grammar allows it is read from masks.
_END = "<|end of the answer|>"

Masks = tuple[list[int], Tensor]  # Rows, and for each the tokens that it must not have, [rows, vocabulary] bool.


class GrammarCompiler:
    """See the module. `folder` has the model's tokenizer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads = FairThreads(_THREADS, _MAX_WAITING, "grammars")
        self._lock = threading.Lock()  # Of what follows.
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._reading = threading.Lock()  # Of the vocabulary, which takes up to seconds.
        self._vocabulary: tuple[LLTokenizer, int] | InvalidRequestError | None = None

    def begin(self, sequence: Sequence, queue: Callable[[Sequence], None], flush: Callable[[], None]) -> None:
        """Gives a sequence its constraint, then queues it; on a thread, where `flush` sends the error of a refusal.

        Raises OverloadedError if too many sequences wait.
        """
        if self._threads.submit(sequence.client, self._run, sequence, queue, flush) is None:
            most = f"at most {_MAX_WAITING} may, half of them of one client"
            raise OverloadedError(f"too many requests wait for their grammars: {most}", retry_after_ms=_RETRY_AFTER_MS)

    def close(self) -> None:
        """Drops what waits."""
        self._threads.close()

    def _run(self, sequence: Sequence, queue: Callable[[Sequence], None], flush: Callable[[], None]) -> None:
        try:
            if sequence.slot.cancelled:
                raise RequestFailedError("the request was cancelled")
            if (late := sequence.overdue(time.monotonic())) is not None:
                raise late
            sequence.constraint = self._constraint(sequence)
            queue(sequence)
        except HeadraceError as refusal:
            sequence.slot.fail(refusal)
        except Exception:
            logger.exception("the grammar of request %s failed", sequence.id)
            sequence.slot.fail(RequestFailedError("internal error"))
        flush()

    def _constraint(self, sequence: Sequence) -> Constraint:
        row, text = sequence.row, sequence.sampling.structured_outputs
        tokenizer, end_bit = self._read_vocabulary()
        with self._lock:
            master = self._compiled.get(text)
        if master is None:
            master = compile_grammar(text, tokenizer)
        with self._lock:
            self._compiled[text] = master
            self._compiled.move_to_end(text)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            matcher = master.deep_copy()
        constraint = Constraint(matcher, tokenizer, end_bit, row.sampling.end_ids(row.end_ids), row.end_ids)
        constraint.replay(sequence.output_ids)
        return constraint

    def _read_vocabulary(self) -> tuple[LLTokenizer, int]:
        """The tokenizer, and the id behind all of the model's, which stands for the end of an answer."""
        with self._reading:
            if self._vocabulary is None:
                try:
                    self._vocabulary = _read_vocabulary(self._folder)
                except Exception as error:  # Files may have any contents, and tokenizers raises bare Exceptions.
                    logger.warning("grammars cannot use the tokenizer in %s", self._folder, exc_info=True)
                    reason = " ".join(f"{error}".split())[:200]
                    self._vocabulary = InvalidRequestError(
                        f"{PARAMETER} is not supported for the model's tokenizer: {reason}", param=PARAMETER
                    )
            if isinstance(self._vocabulary, InvalidRequestError):
                raise self._vocabulary
            return self._vocabulary


def _read_vocabulary(folder: Path) -> tuple[LLTokenizer, int]:
    from llguidance import LLTokenizer

    backend = read_tokenizer(folder).backend
    backend.add_special_tokens([_END])
    end = backend.token_to_id(_END)
    if end is None or end < max(backend.get_vocab().values()):
        raise ValueError("its ids have gaps")
    return LLTokenizer(backend.to_str(), eos_token=end), end


def forbidden_tokens(rows: Rows[Row], vocabulary: int) -> Masks | None:
    """The masks of rows that sample, if any has a grammar; `vocabulary` is the number of logits of a row.

    A row that cannot go on, because it is complete or has an error, may have any token, which nobody gets.
    """
    numbers = [i for i, row in enumerate(rows) if row.sequence.constraint is not None]
    if not numbers:
        return None
    constraints = [constraint for row in rows if (constraint := row.sequence.constraint) is not None]
    first = constraints[0]  # What concerns the vocabulary is the same for all.
    bits = np.zeros((len(constraints), first.mask_bytes), np.uint8)
    for mask, constraint in zip(bits, constraints, strict=True):
        constraint.fill(mask)
    flags: NDArray[np.bool_] = np.unpackbits(bits, axis=1, bitorder="little").view(np.bool_)
    allowed = np.zeros((len(constraints), vocabulary), bool)
    known = min(first.end_bit, vocabulary)
    allowed[:, :known] = flags[:, :known]
    allowed[:, first.eos_ids] = False
    continues: list[bool] = np.any(allowed, axis=1).tolist()
    ends: list[bool] = flags[:, first.end_bit].tolist()
    for i, (number, constraint) in enumerate(zip(numbers, constraints, strict=True)):
        sequence = rows[number].sequence
        if constraint.error is None and not continues[i]:
            constraint.stop(is_complete=ends[i])
        if constraint.has_ended:
            allowed[i] = True
        elif ends[i] and sequence.sampling.may_end(len(sequence.output_ids)):
            allowed[i, constraint.end_ids] = True
    return numbers, torch.from_numpy(~allowed)
