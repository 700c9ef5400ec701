"""CTranslate2, causal or encoder-decoder. Argument: a compute type ("float32", "int8").

The model is converted beside its folder at the first start. Its callback, which reports the first token, is called for
each one and costs about 5 % at 32 callers.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ctranslate2  # type: ignore[import-not-found]
from ctranslate2.converters import TransformersConverter  # type: ignore[import-not-found]
from transformers import AutoConfig

from bench.workers.protocol import Contender, Generation


class CTranslate2Generator(Contender):
    """See the module. Its tokens are words: token n is `tn`."""

    packages = ("ctranslate2", "torch", "transformers")

    def __init__(self, folder: str, compute_type: str) -> None:
        converted = Path(f"{folder}-ctranslate2-{compute_type}")
        if not converted.is_dir():
            TransformersConverter(folder).convert(str(converted), quantization=compute_type)
        options: dict[str, Any] = {
            "device": "cpu",
            "compute_type": compute_type,
            "intra_threads": 1,
            "inter_threads": 1,
        }
        self._is_encoder_decoder = AutoConfig.from_pretrained(folder).is_encoder_decoder
        self._model: Any = (ctranslate2.Translator if self._is_encoder_decoder else ctranslate2.Generator)(
            str(converted), **options
        )
        self.settings = {**options, "compute_type": self._model.compute_type}

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Generation:
        words = [[f"t{n}" for n in prompt] for prompt in prompts]
        first_token_at: dict[int, float] = {}

        def note(step: Any) -> bool:
            """Called for each token; returning true would end its sequence."""
            first_token_at.setdefault(step.batch_id, time.perf_counter())
            return False

        if self._is_encoder_decoder:
            results = self._model.translate_batch(
                words, beam_size=1, min_decoding_length=new_tokens, max_decoding_length=new_tokens, callback=note
            )
            outputs = [[int(word[1:]) for word in result.hypotheses[0]] for result in results]
        else:
            results = self._model.generate_batch(
                words,
                beam_size=1,
                sampling_topk=1,
                min_length=new_tokens,
                max_length=new_tokens,
                include_prompt_in_result=False,
                callback=note,
            )
            outputs = [result.sequences_ids[0] for result in results]
        return Generation(outputs, [first_token_at[n] for n in range(len(prompts))])


create = CTranslate2Generator
