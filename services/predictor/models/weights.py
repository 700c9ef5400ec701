"""Weights of transformers' models: whole, on one device, and from safetensors only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from millrace.errors import StartupError

# What these modules of transformers report is said here in one line, or does not concern a model on one device:
# a table of missing weights of many lines; which layers a plan for tensor parallelism would leave whole.
_QUIET_LOGGERS = ("transformers.modeling_utils", "transformers.distributed.tensor_parallel")

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def choose_device(wanted: str) -> torch.device:
    """The device that `PREDICTOR_DEVICE` means on this machine."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise StartupError("DEVICE=cuda, but torch finds no CUDA device; install its CUDA build or set DEVICE=cpu")
    return torch.device("cuda" if wanted != "cpu" and available else "cpu")


def load_weights(name: str, folder: Path, auto: Any, dtype: str, device: torch.device) -> tuple[Any, Sequence[str]]:
    """What `auto`, one of transformers' Auto classes, makes of a folder, and which weights the folder lacks.

    Those are random then. Raises StartupError.
    """
    if not any(folder.glob("*.safetensors")):
        raise StartupError(f"model {name}: {folder} has no *.safetensors; other formats are not loaded")
    for logger in _QUIET_LOGGERS:
        logging.getLogger(logger).setLevel(logging.ERROR)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # Of the weights' reading, which takes seconds; a download's is shown.
    own = "auto" if device.type == "cuda" else torch.float32
    model, info = auto.from_pretrained(
        folder,
        dtype=_DTYPES.get(dtype, own),
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    model = model.to(device).eval()
    _check_devices(name, model, device)
    return model, sorted(info["missing_keys"])


def dtype_name(model: Any) -> str:
    """The model's own dtype in torch's words, such as float32."""
    return str(model.dtype).removeprefix("torch.")


def _check_devices(name: str, model: Any, device: torch.device) -> None:
    """A part left on another device would fail the first request that reaches it, and only that."""
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for part, tensor in tensors:
            if tensor.device.type != device.type:
                raise StartupError(f"model {name}: {kind} {part} is on {tensor.device}, not on {device}")
