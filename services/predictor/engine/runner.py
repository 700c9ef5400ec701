"""Runs a model of transformers one row at a time, with transformers' own caches.

It serves every causal and encoder-decoder architecture of attention that `generate` can serve, at the
price of one forward pass a row. `logits(sequence)` returns the next token's logits [vocabulary] and
brings the sequence's cache up to date with its ids; it can be called again after it raised.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from services.predictor.engine.sequence import Sequence


class ModelRunner(Protocol):
    def logits(self, sequence: Sequence) -> Tensor:
        """Logits of the token after the sequence's last."""


class CausalRunner:
    """Decoder-only models: the prompt and the output share one cache."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def logits(self, sequence: Sequence) -> Tensor:
        ids = sequence.request.input_ids + sequence.output_ids
        # The cache is replaced only after the pass succeeded: a failed pass may leave it half written.
        cache = sequence.cache or DynamicCache(config=self._model.config)
        sequence.cache = None
        done = cache.get_seq_length()
        output = self._model(
            input_ids=torch.tensor([ids[done:]], device=self._model.device),
            position_ids=torch.arange(done, len(ids), device=self._model.device)[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        sequence.cache = cache
        logits: Tensor = output.logits[0, -1]
        return logits


class EncoderDecoderRunner:
    """Encoder-decoder models: the encoder runs once, the output has a cache of its own."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._start = model.generation_config.decoder_start_token_id
        if self._start is None:
            self._start = model.config.decoder_start_token_id

    def logits(self, sequence: Sequence) -> Tensor:
        state, sequence.cache = sequence.cache, None
        if state is None:
            prompt = torch.tensor([sequence.request.input_ids], device=self._model.device)
            encoded = self._model.get_encoder()(input_ids=prompt, return_dict=True)
            config = self._model.config
            state = encoded, EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
        encoded, cache = state
        ids = [self._start, *sequence.output_ids]
        output = self._model(
            encoder_outputs=encoded,
            decoder_input_ids=torch.tensor([ids[cache.get_seq_length() :]], device=self._model.device),
            past_key_values=cache,
            use_cache=True,
        )
        sequence.cache = state
        logits: Tensor = output.logits[0, -1]
        return logits
