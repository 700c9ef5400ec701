"""GGUF files made from models of transformers, by the package `gguf`: its names of tensors, its quantisation.

Reordered rows and shifted norms as llama.cpp's conversion scripts have them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from tests.random_models import ROOT, TOKENIZER_FILES

QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_ARCHITECTURES = {"qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "mixtral": "llama"}
_TURNED = ("llama", "mixtral", "granite", "smollm3")
# Of blocks that the package does not quantise to: where the two-byte scales are.
_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def write_gguf(path: Path, model: Any, types: str | dict[str, str] = "F32", parts: int = 0, **changed: Any) -> Any:
    """Writes a model, with the storyteller's tokenizer; returns it with the weights that the file has.

    `types`: of matrices, one for all or by the end of a name of transformers, "" for the rest. `parts`: the
    most tensors of a file, 0 for one file. `changed`: metadata without the architecture.
    """
    config, kind = model.config, model.config.model_type
    architecture = _ARCHITECTURES.get(kind, kind)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=parts)
    _write_metadata(writer, config, kind, changed)
    write_tokens(writer, config.vocab_size)
    for own, part, written in named_tensors(model):
        stored = _stored(own, part, types)
        values, quantised = converted(written, part, config), None
        if stored != "F32":
            quantised = _quantise(values, stored)
            values = gguf.dequantize(quantised, Type[stored])
            part.copy_(torch.from_numpy(converted(written, torch.from_numpy(values), config, back=True)))
        writer.add_tensor(written, values if quantised is None else quantised, raw_dtype=Type[stored])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def named_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor, str]]:
    """The tensors of a model, each with its name and that in a file."""
    config = model.config
    architecture = getattr(gguf.MODEL_ARCH, _ARCHITECTURES.get(config.model_type, config.model_type).upper())
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for own, part in _parts(name, tensor):
            base, _, what = own.rpartition(".")
            yield own, part, f"{names.get_name(base)}.{what}"


def _parts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Experts have gates and what they open in separate tensors."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = tensor.chunk(2, dim=1)
        return [
            (name.replace("gate_up_proj", f"{one}_proj.weight"), part) for one, part in (("gate", gate), ("up", up))
        ]
    return [(f"{name}.weight" if name.endswith("experts.down_proj") else name, tensor)]


def _stored(name: str, tensor: torch.Tensor, types: str | dict[str, str]) -> str:
    if tensor.dim() < 2 or name.endswith("mlp.gate.weight"):
        return "F32"
    if isinstance(types, str):
        return types
    return next((kind for end, kind in types.items() if end and name.endswith(f"{end}.weight")), types[""])


def _quantise(values: Any, kind: str) -> Any:
    if kind not in _SCALES:
        return gguf.quantize(values, Type[kind])
    numbers, size = gguf.GGML_QUANT_SIZES[Type[kind]]
    random = np.random.default_rng(int(abs(values.sum()) * 1e6) % 2**32)
    blocks = random.integers(0, 256, (*values.shape[:-1], values.shape[-1] // numbers, size), dtype=np.uint8)
    for at in _SCALES[kind]:
        scales = (0.02 * values.std() * (1 + random.random(blocks.shape[:-1]))).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def converted(name: str, tensor: torch.Tensor, config: Any, back: bool = False) -> Any:
    """A tensor as the file has it, or back."""
    kind = config.model_type
    values = tensor.detach().float().numpy()
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    stem = name.split(".")[-2]
    if kind in _TURNED and stem in heads:
        halves = (heads[stem], -1, 2) if back else (heads[stem], 2, values.shape[0] // heads[stem] // 2)
        values = values.reshape(*halves, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if kind.startswith("gemma") and "norm" in stem:
        values = values + (-1 if back else 1)
    return np.ascontiguousarray(values)


def _write_metadata(writer: Any, config: Any, kind: str, changed: dict[str, Any]) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    rotary = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rotary["rope_theta"])
    writer.add_rope_dimension_count(int(head_size * rotary.get("partial_rotary_factor", 1.0)))
    if kind in ("gemma2", "gemma3_text"):
        writer.add_sliding_window(config.sliding_window)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if kind in ("mixtral", "qwen3_moe"):
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    for name, value in changed.items():
        key = f"{writer.arch}.{name.replace('__', '.')}"
        kind = {str: "string", float: "float32", bool: "bool", list: "array", int: "uint32"}[type(value)]
        getattr(writer, f"add_{kind}")(key, value)


def write_tokens(writer: Any, count: int) -> None:
    folder = ROOT / "models" / "storyteller"
    stated = json.loads((folder / TOKENIZER_FILES[0]).read_text())
    tokens = sorted(stated["model"]["vocab"], key=stated["model"]["vocab"].__getitem__)
    special = {token["content"] for token in stated["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    padding = [f"[PAD{index}]" for index in range(len(tokens), count)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *padding])
    writer.add_token_types([*kinds, *(gguf.TokenType.UNUSED for _ in padding)])
    writer.add_token_merges([" ".join(merge) for merge in stated["model"]["merges"]])
    for name, index in (("bos", 1), ("eos", 2), ("pad", 0)):
        getattr(writer, f"add_{name}_token_id")(index)
    writer.add_add_bos_token(True)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())
