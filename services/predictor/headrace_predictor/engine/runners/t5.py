"""Runs T5 and its family: in every step one encoder pass for new prompts and one decoder pass for all rows.

ragged.py has where keys and values lie.

In the decoder, positions enter only by a bias that depends on the distance between query and key, so tokens of many
sequences, at any position, pass the decoder packed in one row, and each attends to a range of its own sequence. Output
tokens from the request are computed like generated ones. Norms, projections and feed-forward layers are the model's own
modules; the order of a block's parts, the bias and the clamping for float16 follow transformers' T5Block.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import MT5ForConditionalGeneration, T5ForConditionalGeneration, UMT5ForConditionalGeneration

from headrace_predictor.engine.runners.ragged import (
    RaggedRunner,
    Range,
    decoder_ids,
    prompt_places,
    ranges_of,
    relative_biases,
)
from headrace_predictor.engine.state.cache import CacheShape
from headrace_predictor.engine.state.sequence import Row, Sequence

# Whether the decoder's outputs are divided by the root of their size before the projection to the vocabulary.
_SCALES_OUTPUTS: dict[type, Callable[[Any], bool]] = {
    T5ForConditionalGeneration: lambda config: config.scale_decoder_outputs,
    MT5ForConditionalGeneration: lambda config: False,
    UMT5ForConditionalGeneration: lambda config: config.tie_word_embeddings,
}
_SHORT_PROMPT = 16  # Prompts up to this length are padded together.


class T5Runner(RaggedRunner):
    """See the module."""

    description = "ragged decoder"

    def __init__(self, model: Any, shape: CacheShape, blocks: int) -> None:
        super().__init__(model, shape, blocks)
        config = model.config
        self._scale = config.d_model**-0.5 if _SCALES_OUTPUTS[type(model)](config) else None
        self._biases = relative_biases(model.decoder)
        # Compiles the kernels before the first request.
        self.probe()

    @staticmethod
    def supports(model: Any) -> bool:
        return type(model) in _SCALES_OUTPUTS

    def run(self, rows: Rows[Row]) -> Tensor:
        if new := [row.sequence for row in rows if row.start == 0]:
            self._encode(new)
        ids = [decoder_ids(row) for row in rows]
        hidden = self._decode(self._tensor(np.concatenate(ids)), *ranges_of(self._cache, rows))
        lasts = np.cumsum([len(own) for own in ids]) - 1
        sampled = [int(last) for last, row in zip(lasts, rows, strict=True) if row.samples]
        if len(sampled) < len(hidden):
            hidden = hidden[sampled]
        hidden = self._model.decoder.final_layer_norm(hidden)
        if self._scale is not None:
            hidden = hidden * self._scale
        logits: Tensor = self._model.lm_head(hidden)
        return logits

    def _encode(self, sequences: Rows[Sequence]) -> None:
        """Encodes prompts and writes the keys and values of cross-attention."""
        for group in _groups(sequences):
            prompts = [sequence.input_ids for sequence in group]
            longest = max(map(len, prompts))
            ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
            mask = torch.arange(longest)[None] < torch.tensor([len(prompt) for prompt in prompts])[:, None]
            ids, mask = ids.to(self._cache.device), mask.to(self._cache.device)
            encoded = self._model.encoder(input_ids=ids, attention_mask=mask).last_hidden_state[mask]
            blocks, offsets = zip(*(prompt_places(sequence) for sequence in group), strict=True)
            places = self._tensor(np.concatenate(blocks)), self._tensor(np.concatenate(offsets))
            for index, block in enumerate(self._model.decoder.block):
                attention = block.layer[1].EncDecAttention
                keys, values = self._heads(attention.k(encoded)), self._heads(attention.v(encoded))
                self._cache.write(index, places, keys, values)

    def _decode(self, ids: Tensor, prompt: Range, outputs: Range) -> Tensor:
        """The decoder's last hidden states [tokens, model size], before the last norm."""
        decoder = self._model.decoder
        hidden: Tensor = decoder.embed_tokens(ids)
        for index, (block, bias) in enumerate(zip(decoder.block, self._biases, strict=True)):
            own, cross, feed_forward = block.layer

            attention, normed = own.SelfAttention, own.layer_norm(hidden)
            query, key, value = (self._heads(part(normed)) for part in (attention.q, attention.k, attention.v))
            attended = self._attention(index, outputs, query, (key, value), bias=bias)
            hidden = _bounded(hidden + attention.o(attended))

            attention, normed = cross.EncDecAttention, cross.layer_norm(hidden)
            query = self._heads(attention.q(normed))
            attended = self._attention(index, prompt, query)
            hidden = _bounded(hidden + attention.o(attended))

            hidden = _bounded(feed_forward(hidden))
        return hidden

    def _heads(self, projected: Tensor) -> Tensor:
        shape = self._cache.shape
        return projected.view(-1, shape.heads, shape.head_size)


def _groups(sequences: Rows[Sequence]) -> Iterator[list[Sequence]]:
    """Groups sequences whose prompts are padded together, none to more than twice its length except short ones."""
    group: list[Sequence] = []
    for sequence in sorted(sequences, key=lambda sequence: len(sequence.input_ids)):
        length = len(sequence.input_ids)
        if group and length > max(_SHORT_PROMPT, 2 * len(group[0].input_ids)):
            yield group
            group = []
        group.append(sequence)
    yield group


def _bounded(hidden: Tensor) -> Tensor:
    """Clamps to the range of float16."""
    if hidden.dtype != torch.float16:
        return hidden
    largest = torch.finfo(torch.float16).max
    bound = torch.where(torch.isinf(hidden).any(), largest - 1000, largest)
    return hidden.clamp(-bound, bound)
