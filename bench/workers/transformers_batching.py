"""transformers' ContinuousBatchingManager, started once.

Requests do not stream: delivering each token would slow it down, and it records the time of the first one itself.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from bench.workers.protocol import Contender, Generation

_RESULT_TIMEOUT_S = 300.0


class TransformersBatching(Contender):
    """See the module. Everything except the memory has its default; by default it takes 60 % of the machine's."""

    packages = ("torch", "transformers")

    def __init__(self, folder: str) -> None:
        auto: Any = AutoModelForCausalLM
        model = auto.from_pretrained(folder, dtype=torch.bfloat16).eval()
        config = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=4096)
        # -1 means no end token.
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)  # type: ignore[no-untyped-call]
        self._manager = model.init_continuous_batching(generation, config)
        self._manager.start()
        self.settings = {
            "dtype": "bf16",
            "attention": model.config._attn_implementation,
            "num_blocks": config.num_blocks,
            "page_size": config.page_size,
            "max_batch_tokens": config.max_batch_tokens,
        }

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Generation:
        ids = self._manager.add_requests(prompts, max_new_tokens=new_tokens, record_timestamps=True)
        results: dict[str, Any] = {}
        while len(results) < len(ids):
            result = self._manager.get_result(timeout=_RESULT_TIMEOUT_S)
            if result is None:
                raise RuntimeError("the manager gave no result; its log says why")
            if result.error is not None:
                raise RuntimeError(result.error)
            if result.is_finished():
                results[result.request_id] = result
        return Generation([results[key].generated_tokens for key in ids], [results[key].timestamps[0] for key in ids])

    def close(self) -> None:
        self._manager.stop(block=True, timeout=10)


create = TransformersBatching
