"""Loads and runs a tiny model in the host, so that its forks share what the first use of the libraries makes: tables
of compiled kernels, caches of classes, patterns of weights' names. An engine process starts faster then and needs half
the memory of its own.

Single-threaded, because the host is forked; never on the device.
"""

import logging
from functools import cache
from typing import Any

import torch
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from headrace_predictor.engine.runners.memory import cache_shape
from headrace_predictor.engine.runners.paged import PagedRunner
from headrace_predictor.engine.runners.proof import Proof
from headrace_predictor.engine.runners.streamed import StreamedDecoder, weight_format
from headrace_predictor.engine.state.cache import BLOCK_TOKENS

logger = logging.getLogger(__name__)

_VOCABULARY = 64
_BLOCKS = 8


@cache
def rehearse() -> None:
    """Does it once for a process and its forks; what fails costs time and memory only."""
    try:
        _run_tiny_model()
    except Exception:
        logger.warning("the host could not run a model", exc_info=True)


def _run_tiny_model() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    config = LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    with torch.inference_mode():
        kind: Any = LlamaForCausalLM
        model = kind.from_pretrained(None, config=config, state_dict=kind(config).state_dict()).eval()
        shape = cache_shape(model)
        proof = Proof(model, shape, _VOCABULARY, _BLOCKS * BLOCK_TOKENS)
        proof.check_generate("rehearsed")
        proof.of_paged()
        format_ = weight_format("rehearsed", model, "auto")
        streamed = StreamedDecoder(model, format_, 1) if format_ else None
        PagedRunner(model, shape, _BLOCKS, streamed=streamed).probe()
    torch.set_num_threads(threads)
