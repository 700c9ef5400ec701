"""Adapters (LoRA) with random weights in PEFT's format, and the models that result from merging them."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

# The linear layers of the decoders' attention and feed-forward parts.
LINEARS = re.compile(
    r".*\.(q_proj|k_proj|v_proj|o_proj|out_proj|gate_proj|up_proj|down_proj|fc1|fc2|c_attn|c_proj|c_fc|qkv_proj"
    r"|gate_up_proj|query_key_value|dense|dense_h_to_4h|dense_4h_to_h)"
)


def save_random_adapter(
    folder: Path,
    model: Any,
    base: str,
    seed: int = 0,
    rank: int = 4,
    targets: str = "",
    ranks: Mapping[str, int] | None = None,
    **config: Any,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Writes an adapter of a model's linear layers, those whose path ends with one of `targets`; returns A and B.

    `ranks`: those of paths that contain a key. They are large enough to change what a random model generates.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D) or not LINEARS.fullmatch(path):
            continue
        if targets and not path.endswith(tuple(targets.split("|"))):
            continue
        size_out, size_in = module.weight.shape if isinstance(module, nn.Linear) else module.weight.T.shape
        own = next((value for key, value in (ranks or {}).items() if key in path), rank)
        down = torch.randn(own, size_in, generator=generator) / size_in**0.5
        up = torch.randn(size_out, own, generator=generator) / own**0.5
        weights[path] = down, up
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, pair in weights.items():
        for side, tensor in zip("AB", pair, strict=True):
            tensors[f"base_model.model.{path}.lora_{side}.weight"] = tensor.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": sorted({path.rpartition(".")[2] for path in weights}),
        "modules_to_save": None,
        "use_dora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    return weights


def merge(model: Any, weights: Mapping[str, Sequence[torch.Tensor]], scale: float | Mapping[str, float] = 1.0) -> Any:
    """Adds scale · BA to the model's own weights; a mapping has the scales of paths. Returns the model."""
    with torch.no_grad():
        for path, (down, up) in weights.items():
            module = model.get_submodule(path)
            delta = (scale if isinstance(scale, float) else scale[path]) * (up @ down)
            module.weight += delta.to(module.weight.dtype) if isinstance(module, nn.Linear) else delta.T
    return model
