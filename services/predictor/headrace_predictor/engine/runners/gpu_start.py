"""What a model's start does for a GPU: finds whether the kernels run there and are right, and records passes."""

import logging
import os
import time
from typing import Any

import torch

from headrace.errors import StartupError
from headrace_predictor.engine.gpu.operations import Operations
from headrace_predictor.engine.runners.decode_graphs import CudaRecorder
from headrace_predictor.engine.runners.gpu_decoder import GpuDecoder
from headrace_predictor.engine.runners.paged import PagedRunner
from headrace_predictor.engine.runners.proof import Proof

logger = logging.getLogger(__name__)


def prove(name: str, model: Any, proof: Proof, is_exact: bool) -> tuple[str | None, Operations | None]:
    """Why a decoder is not paged, None if it is; the kernels that compute it, None on a CPU.

    Without Triton, or where its kernels are not right for the model, attention copies keys and values, with a warning.
    Raises StartupError if bits are asked for that only the kernels have.
    """
    if model.device.type != "cuda":
        return proof.of_paged(), None
    if is_exact and not GpuDecoder.takes(model):
        raise StartupError(f"model {name}: PREDICTOR_EXACT on CUDA is for Llama, Mistral, Qwen 2 and Qwen 3")
    fault: str | None
    try:
        operations = _operations(model.device, is_exact)
    except Exception as error:  # Of any kind: it needs a driver and a compiler.
        logger.debug("Triton does not run", exc_info=True)
        fault = f"Triton does not run: {error}"
    else:
        fault = proof.of_paged(operations)
        if fault is None:
            return None, operations
    if is_exact:
        raise StartupError(f"model {name}: PREDICTOR_EXACT needs Triton's kernels: {fault}")
    reason = proof.of_paged()
    if reason is None:
        logger.warning("model %s: attention copies keys and values; %s", name, fault)
    return reason, None


def _operations(device: torch.device, is_exact: bool) -> Operations:
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # The default differs between versions, and bits with it.
    from headrace_predictor.engine.gpu.kernels import GpuOperations  # torch for CPUs has no Triton.

    operations = GpuOperations(is_exact)
    operations.check(device)
    return operations


def record(name: str, runner: PagedRunner, rows: int, context: int) -> None:
    """Records the decode passes of a runner with kernels, and says what they take; without them if that fails."""
    started, free = time.monotonic(), torch.cuda.mem_get_info()[0]
    try:
        with torch.inference_mode():
            count = runner.record(CudaRecorder(), rows, context)
    except Exception as error:  # A layer that waits for the device, such as a loop over experts.
        logger.warning("model %s: decode passes are not recorded: %s", name, error)
        return
    taken = (free - torch.cuda.mem_get_info()[0]) / 1e9
    logger.info("model %s: %d graphs in %.1f s, %.2f GB", name, count, time.monotonic() - started, taken)
