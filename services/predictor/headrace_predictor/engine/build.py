"""Builds the engine of a loaded transformers model: memory, runner, scheduler.

Of four kinds of runners the fastest that supports the model is chosen: paged for decoders that take an attention
function (see proof.py), hybrid for those with recurrent states; encoder-decoder for models of that kind; one row at a
time for the rest. A model or memory that cannot be served raises StartupError here, with one line of text.
"""

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headrace.errors import StartupError
from headrace.sampling import end_ids_of
from headrace_predictor.engine.adapters import Adapters
from headrace_predictor.engine.cpu.packed_linear import pack_linears, pack_mixtures
from headrace_predictor.engine.engine import ContinuousBatchingEngine
from headrace_predictor.engine.gpu import Operations
from headrace_predictor.engine.grammar import GrammarCompiler
from headrace_predictor.engine.interface import EngineLimits
from headrace_predictor.engine.load import PrefillPace
from headrace_predictor.engine.lookup import PromptLookup
from headrace_predictor.engine.runners.decode_graphs import cuda_recorder
from headrace_predictor.engine.runners.gpu_decoder import quantise
from headrace_predictor.engine.runners.hybrid import HybridRunner
from headrace_predictor.engine.runners.interface import ModelRunner
from headrace_predictor.engine.runners.memory import cache_shape, plan_memory
from headrace_predictor.engine.runners.paged import PagedRunner
from headrace_predictor.engine.runners.proof import Proof
from headrace_predictor.engine.runners.proof_conditions import proven_layers
from headrace_predictor.engine.runners.states import state_bytes
from headrace_predictor.engine.runners.streamed import (
    GPU_INT8,
    GROUPED,
    StreamedDecoder,
    open_file,
    packed_file,
    unlike_gated,
    weight_format,
)
from headrace_predictor.engine.runners.unread import read_weights, stored_formats
from headrace_predictor.engine.scheduler import Scheduler
from headrace_predictor.engine.state.blocks import BlockManager
from headrace_predictor.engine.state.cache import BLOCK_TOKENS
from headrace_predictor.settings import PredictorSettings

logger = logging.getLogger(__name__)

_ROWS_RUNNING = 32  # Sequences at once, where each step computes them one after the other.


def build_engine(
    name: str,
    model: Any,
    settings: PredictorSettings,
    flush: Callable[[], None] = lambda: None,
    grammars: GrammarCompiler | None = None,
    eos_ids: frozenset[int] | None = None,
    kept_at: Path | None = None,
) -> ContinuousBatchingEngine:
    """Builds and starts the engine of a generation model; raises StartupError. For the rest see engine.py.

    Without `eos_ids` the model's own are the end tokens; a tokenizer may have one that the model cannot choose. For
    `kept_at` see `packed_file`.
    """
    shape = cache_shape(model)
    with torch.inference_mode():
        own_state = state_bytes(model)
    own_context, context, blocks, max_running = plan_memory(name, model, shape, settings, own_state)
    # Before a runner packs the weights in a form of its own.
    size = {
        "parameter_count": str(sum(tensor.numel() for tensor in model.parameters())),
        "weights_bytes": str(sum(tensor.numel() * tensor.itemsize for tensor in model.parameters())),
        "cache_bytes": str(blocks * BLOCK_TOKENS * shape.bytes_per_token),
        "own_context_length": str(own_context),
    }
    vocabulary = model.get_input_embeddings().num_embeddings
    ends = end_ids_of(model.generation_config.eos_token_id) if eos_ids is None else eos_ids
    format_ = weight_format(name, model, settings.weights)
    read_weights(model, proven_layers(model) if format_ == GROUPED else None)
    quantised = None
    if format_ is None and settings.weights != "auto":
        from headrace_predictor.engine.cpu.integer_linear import Quantisation  # Numba is optional.

        opened = partial(open_file, model, settings.weights, kept_at, settings.weights_cache_size)
        quantised = Quantisation(settings.weights, opened)
    with torch.inference_mode():
        proof = Proof(model, shape, vocabulary, context, 2 * settings.step_tokens, quantised)
        if not model.config.is_encoder_decoder:
            proof.check_generate(name)
        runner, adapters, reason = _choose_runner(name, proof, blocks, settings, format_, kept_at)
        chooser = runner if isinstance(runner, PagedRunner) and runner.chooses else None
        looks_up = settings.prompt_lookup and not chooser and isinstance(runner, PagedRunner) and runner.is_exact()
    if reason is not None and not settings.max_running:
        max_running = min(max_running, _ROWS_RUNNING)
    if isinstance(runner, HybridRunner):
        runner.limit(max_running)
    if chooser and settings.cuda_graphs:
        record_passes(name, chooser, max_running, context)
    manager = BlockManager(blocks, BLOCK_TOKENS)
    scheduler = Scheduler(
        manager,
        max_running,
        settings.max_waiting,
        settings.step_tokens,
        runner.reuses_prefixes,
        runner.scaling,
        runner.prefix_states,
    )
    engine = ContinuousBatchingEngine(
        name,
        runner,
        scheduler,
        PrefillPace(settings.max_gap_ms / 1000, packed=isinstance(runner, PagedRunner)),
        EngineLimits(context, bool(model.config.is_encoder_decoder), vocabulary, runner.scores_prompts),
        {token_id for token_id in ends if 0 <= token_id < vocabulary},
        settings.step_timeout,
        flush,
        grammars,
        PromptLookup(manager) if looks_up else None,
        chooser,
    )
    size |= {"max_running": str(max_running), "block_tokens": str(BLOCK_TOKENS), "cache_blocks": str(manager.total)}
    streamed = runner.streamed if isinstance(runner, PagedRunner) else None
    size["weights"] = str(model.dtype).removeprefix("torch.")
    if streamed:
        own = streamed.format
        size["weights"] = own if own != GROUPED else "+".join(stored_formats(model)) or settings.weights
        size |= {"weights_bytes": str(streamed.weights_bytes), "angles": streamed.origin}
        size |= {"mapped_bytes": str(streamed.mapped_bytes)}
    elif format_ == GPU_INT8:
        weights_bytes = sum(tensor.numel() * tensor.itemsize for tensor in model.parameters())
        size |= {"weights": settings.weights, "weights_bytes": str(weights_bytes)}
    elif quantised is not None:
        size |= {"weights": settings.weights, "weights_bytes": str(quantised.weights_bytes), "angles": ""}
        size |= {"mapped_bytes": str(quantised.mapped_bytes)}
    engine.description |= size | ({} if reason is None else {"runner_reason": reason})
    engine.adapters = adapters
    return engine


def _choose_runner(
    name: str, proof: Proof, blocks: int, settings: PredictorSettings, format_: str | None, kept_at: Path | None
) -> tuple[ModelRunner, Adapters | None, str | None]:
    """The runner, the adapters that it can compute, and why it is not a faster one."""
    runner: ModelRunner
    adapters: Adapters | None = None
    model = proof.model
    if model.config.is_encoder_decoder:
        runner, reason = proof.encoder_decoder_runner(blocks)
        return runner, None, reason
    reason, operations = prove_on_gpu(name, proof, settings)
    if reason is None:
        if format_ != GROUPED:
            read_weights(model)
        has_own_products = operations is not None and (settings.exact or format_ == GPU_INT8)
        if not has_own_products:  # With an adapter transformers' modules compute all rows of a step.
            adapters = Adapters(model, torch.float32 if format_ else None)  # Before the layers are replaced.
        streamed = None
        if format_ == GPU_INT8:
            quantise(model)
        elif format_:
            file = packed_file(model, format_, kept_at, settings.weights_cache_size)
            streamed = StreamedDecoder(model, format_, torch.get_num_threads(), file)
        elif operations is None and proof.quantise is None:
            pack_linears(model, but=proof.read_linears)
        runner = PagedRunner(
            model,
            proof.shape,
            blocks,
            adapters,
            proof.rotary,
            streamed,
            tells_positions=proof.tells_positions,
            operations=operations,
        )
        # All layers; compiles what is not in Numba's cache.
        runner = proof.finished(runner, pack_mixtures)
    elif format_ and settings.weights != "auto":
        raise StartupError(f"model {name}: PREDICTOR_WEIGHTS={settings.weights} is not for it: {reason}")
    else:
        read_weights(model)
        runner, reason = proof.other_runner(blocks, reason)
        if reason is not None:
            logger.warning("model %s is run one row at a time: %s", name, reason)
    return runner, adapters, reason


def prove_on_gpu(name: str, proof: Proof, settings: PredictorSettings) -> tuple[str | None, Operations | None]:
    """Why a decoder is not paged, None if it is; the kernels that compute it, None on a CPU.

    Without Triton, or where its kernels are not right for the model, attention copies keys and values, with a warning.
    Raises StartupError if bits or weights are asked for that only the kernels have.
    """
    model = proof.model
    if model.device.type != "cuda":
        return proof.of_paged(), None
    asked = "PREDICTOR_EXACT" if settings.exact else f"PREDICTOR_WEIGHTS={settings.weights}"
    needed = settings.exact or settings.weights != "auto"
    if needed and (unlike := unlike_gated(model)) is not None:
        raise StartupError(f"model {name}: {asked} on CUDA is for Llama, Mistral, Qwen 2 and Qwen 3: {unlike}")
    try:
        # The default differs between versions, and bits with it.
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
        from headrace_predictor.engine.gpu import kernels  # torch for CPUs has no Triton.

        operations = kernels.operations(settings.exact)
        fault = proof.of_paged(operations)
    except Exception as error:  # Of any kind: what it loads may not fit the machine.
        fault = f"Triton does not run: {error}"
    if fault is None:
        return None, operations
    if needed:
        raise StartupError(f"model {name}: {asked} needs Triton's kernels: {fault}")
    reason = proof.of_paged()
    if reason is None:
        logger.warning("model %s: attention copies keys and values; %s", name, fault)
    return reason, None


def record_passes(name: str, runner: PagedRunner, rows: int, context: int) -> None:
    """Records the decode passes of a runner with kernels, and says what they take; without them if that fails."""
    started, free = time.monotonic(), torch.cuda.mem_get_info()[0]
    try:
        with torch.inference_mode():
            count = runner.record(cuda_recorder(), rows, context)
    except Exception as error:  # A layer that waits for the device, such as a loop over experts.
        logger.warning("model %s: decode passes are not recorded: %s", name, error)
        return
    taken = (free - torch.cuda.mem_get_info()[0]) / 1e9
    logger.info("model %s: %d graphs in %.1f s, %.2f GB", name, count, time.monotonic() - started, taken)
