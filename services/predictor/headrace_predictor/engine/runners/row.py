"""Runs a model of transformers one row at a time, with transformers' own caches.

It serves the models that the batching runners cannot: every architecture of `generate`, at the cost of one forward pass
for each row. `CausalRunner` and `EncoderDecoderRowRunner` keep a cache for each sequence in its `state`;
`CachelessRunner` computes every id at each step, for models with another kind of memory.
"""

import inspect
from abc import abstractmethod
from collections.abc import Sequence as Rows
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from headrace.errors import StartupError
from headrace_predictor.engine.faults import check_numbers
from headrace_predictor.engine.runners.interface import ModelRunner
from headrace_predictor.engine.runners.rotary import SequenceRotary
from headrace_predictor.engine.state.sequence import Row

_AGAIN = 512  # Tokens of a pass that computes again what a failed one has lost: a longer one could fail for ever.


class _RowRunner(ModelRunner):
    """The common part: rows one after another."""

    description = "one row"

    def __init__(self, model: Any) -> None:
        self._model = model
        self._takes = inspect.signature(model.forward).parameters
        # The logits of a long prompt's other positions would take far more memory than its keys and values.
        self._only_last = {"logits_to_keep": 1} if "logits_to_keep" in self._takes else {}

    def run(self, rows: Rows[Row]) -> Tensor:
        logits = [self._last_logits(row) for row in rows]
        sampled = [one for one, row in zip(logits, rows, strict=True) if row.samples]
        return torch.stack(sampled) if sampled else torch.empty(0)

    def clear(self, blocks: Rows[int]) -> None:
        """Does nothing: everything of a sequence is in its state."""

    def probe(self) -> None:
        check_numbers(self._model(input_ids=self._tensor([0]), use_cache=False).logits)

    @abstractmethod
    def _last_logits(self, row: Row) -> Tensor:
        """Computes a row; returns its last logits."""

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], device=self._model.device)


class CausalRunner(_RowRunner):
    """Decoder-only models: the prompt and the output share one cache.

    With `whole`, as `generate` does, a pass has either the whole prompt or one id: an index that selects positions may
    choose among equals by their number.
    """

    def __init__(self, model: Any, rotary: SequenceRotary | None = None, whole: bool = False) -> None:
        super().__init__(model)
        self._rotary = rotary
        self.scaling = None if rotary is None else rotary.scaling
        self.reads_whole_prompts = whole

    def _last_logits(self, row: Row) -> Tensor:
        sequence = row.sequence
        # The cache is restored only after a successful pass: a failed one may leave it half written.
        cache, sequence.state = sequence.state, None
        if cache is None or cache.get_seq_length() > row.start:  # The latter if the step is repeated.
            cache = DynamicCache(config=self._model.config)
        done, end = cache.get_seq_length(), row.start + row.count
        most = max(row.count, _AGAIN)
        ends = [*range(done + most, end, most), end]
        if self.reads_whole_prompts:  # None for a part of the prompt: a later row computes it.
            ends = list(range(max(len(sequence.input_ids), done + 1), end + 1))
        logits = torch.empty(0)
        for end in ends:
            logits = self._pass(Row(sequence, done, end - done), cache)
            if cache.get_seq_length() != end:
                raise ValueError("the model keeps nothing in its cache")
            done = end
        sequence.state = cache
        return logits

    def _pass(self, row: Row, cache: DynamicCache) -> Tensor:
        end = row.start + row.count
        positions = {"position_ids": self._tensor([*range(row.start, end)])} if "position_ids" in self._takes else {}
        with nullcontext() if self._rotary is None else self._rotary.packed([row]):
            output = self._model(
                input_ids=self._tensor(row.sequence.ids[row.start : end]),
                **positions,
                past_key_values=cache,
                use_cache=True,
                **self._only_last,
            )
        logits: Tensor = output.logits[0, -1]
        return logits


class EncoderDecoderRowRunner(_RowRunner):
    """Encoder-decoder models: the encoder runs once, the output has its own cache.

    With `stepwise`, as in `generate`, a pass of the decoder has one id: some compute several at once otherwise.
    """

    def __init__(self, model: Any, stepwise: bool = False) -> None:
        super().__init__(model)
        self._stepwise = stepwise
        self.start_ids = (decoder_start(model),)

    def probe(self) -> None:
        ids = self._tensor([0])
        check_numbers(self._model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits)

    def _last_logits(self, row: Row) -> Tensor:
        sequence = row.sequence
        state, sequence.state = sequence.state, None
        prompt = sequence.input_ids
        if state is None or len(prompt) + state[1].get_seq_length() > row.start:
            encoded = self._model.get_encoder()(input_ids=self._tensor(prompt), return_dict=True)
            # Cross-attention reaches the whole prompt, whatever window the decoder has.
            state = encoded, EncoderDecoderCache(DynamicCache(config=self._model.config), DynamicCache())
        encoded, cache = state
        done = len(prompt) + cache.get_seq_length()
        count = 1 if self._stepwise else row.start + row.count - done
        logits = torch.empty(0)
        for begin in range(done, row.start + row.count, count):
            output = self._model(
                encoder_outputs=encoded,
                decoder_input_ids=self._tensor(sequence.ids[begin : begin + count]),
                past_key_values=cache,
                use_cache=True,
            )
            logits = output.logits[0, -1]
        sequence.state = state
        return logits


def decoder_start(model: Any) -> int:
    """The id from which an encoder-decoder model's decoder starts, as in `generate`; raises StartupError."""
    stated, config = model.generation_config, model.config
    starts = (stated.decoder_start_token_id, stated.bos_token_id, getattr(config, "decoder_start_token_id", None))
    start: Any = next((start for start in starts if start is not None), None)
    if isinstance(start, list) and len(start) == 1:  # One for each row.
        (start,) = start
    if not isinstance(start, int):
        raise StartupError(f"decoder_start_token_id={start!r} in its configuration is no token id")
    return start


class CachelessRunner(_RowRunner):
    """Models that have no memory of ids, or one that no other runner knows: every step computes all ids."""

    description = "one row, no cache"

    def _last_logits(self, row: Row) -> Tensor:
        if not row.samples:
            return torch.empty(0)
        ids = row.sequence.ids[: row.start + row.count]
        logits: Tensor = self._model(input_ids=self._tensor(ids), use_cache=False, **self._only_last).logits[0, -1]
        return logits
