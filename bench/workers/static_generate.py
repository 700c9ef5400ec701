"""transformers' `generate` on one static batch, causal or encoder-decoder."""

import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.generation.streamers import BaseStreamer

from bench.workers.protocol import Contender, Generation


class _Clock(BaseStreamer):
    """Records the time of the first new ids; the first call has the prompt, or the decoder's start."""

    def __init__(self) -> None:
        self.calls: list[float] = []

    def put(self, value: Any) -> None:
        if len(self.calls) < 2:
            self.calls.append(time.perf_counter())

    def end(self) -> None:
        pass


class StaticGenerate(Contender):
    """See the module."""

    packages = ("torch", "transformers")

    def __init__(self, folder: str) -> None:
        self._is_encoder_decoder = AutoConfig.from_pretrained(folder).is_encoder_decoder
        auto: Any = AutoModelForSeq2SeqLM if self._is_encoder_decoder else AutoModelForCausalLM
        self._model = auto.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.settings = {"dtype": "bf16", "attention": self._model.config._attn_implementation}

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Generation:
        ids = torch.tensor(prompts)
        clock = _Clock()
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                streamer=clock,
            )
        before = 1 if self._is_encoder_decoder else ids.shape[1]
        return Generation(output[:, before:].tolist(), [clock.calls[1]] * len(prompts))


create = StaticGenerate
