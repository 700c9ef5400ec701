"""The predictor's settings, as far as vLLM needs them, and vLLM's arguments and environment that follow from them.

The settings' own class is not imported: its dependencies need not be installed beside vLLM.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel, ConfigDict

from headrace.errors import StartupError

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_CPU_CACHE_BYTES = 1 << 30
_MAX_RUNNING = 256
# Arguments that follow from MODELS, what concerns forms of answers, and code of a model's author, which no engine runs.
_RESERVED = frozenset(
    {
        "model",
        "reasoning_parser",
        "reasoning_parser_plugin",
        "revision",
        "served_model_name",
        "skip_tokenizer_init",
        "structured_outputs_config",
        "tokenizer",
        "trust_remote_code",
    }
)


class VllmSettings(BaseModel):
    """For the meaning of the fields see services/predictor/headrace_predictor/settings.py."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    log_level: str
    device: str
    dtype: str
    max_running: int
    max_waiting: int
    max_context: int
    kv_cache_memory: int | None
    gpu_memory_share: float
    step_tokens: int
    step_timeout: float
    vllm_arguments: dict[str, Any]


def engine_arguments(
    settings: VllmSettings, known: Collection[str], device: str, memory_elsewhere: float = 0.0
) -> dict[str, Any]:
    """vLLM's EngineArgs but for the model; `known` are their names. Raises StartupError.

    `device`: "cpu" or "cuda"; `memory_elsewhere`: the share of the device's memory that other engines hold.
    """
    if settings.device not in ("auto", device):
        raise StartupError(f"PREDICTOR_DEVICE={settings.device}: this vLLM is built for {device}")
    if settings.dtype == "fp64":
        raise StartupError("PREDICTOR_DTYPE=fp64: vLLM does not compute with it")
    running = settings.max_running or _MAX_RUNNING
    arguments: dict[str, Any] = {
        "dtype": _DTYPES.get(settings.dtype, "float32" if device == "cpu" else "auto"),
        "max_num_seqs": running,
        "max_num_batched_tokens": max(settings.step_tokens, running),
        "gpu_memory_utilization": max(0.0, settings.gpu_memory_share - memory_elsewhere),
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if settings.max_context:
        arguments["max_model_len"] = settings.max_context
    if settings.kv_cache_memory or device == "cpu":
        arguments["kv_cache_memory_bytes"] = settings.kv_cache_memory or _CPU_CACHE_BYTES
    for name in settings.vllm_arguments:
        if name in _RESERVED:
            raise StartupError(f"PREDICTOR_VLLM_ARGUMENTS: {name} is not for this setting")
        if name not in known:
            raise StartupError(f"PREDICTOR_VLLM_ARGUMENTS: vLLM's EngineArgs have no {name!r}")
    return arguments | settings.vllm_arguments
