"""Paged attention for families whose attention is code of their own: BLOOM, MPT, Falcon, GPT-J, CodeGen, GPT-Neo.

With attention.py's name as the model's attention function, their layers compute queries, keys and values as in
transformers, and `attend` the rest; with any other they do what they did.

ALiBi is a bias of scores, in the numbers that the model itself computes: by the key's position in BLOOM and Falcon,
which round it to 16 bits, and by distance in MPT.
"""

import sys
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from headrace_predictor.engine.runners.attention import NAME, attend
from headrace_predictor.engine.runners.reach import Mask, Reach
from headrace_predictor.engine.state.attention import Scores


def page_own_attention(model: Any, context: int) -> bool:
    """Lets a model take the attention function of attention.py, for contexts so long; False for any other family."""
    layers = [module for module in model.modules() if type(module).__name__ in _METHODS]
    for index, layer in enumerate(layers):
        name, paged = _METHODS[type(layer).__name__]
        layer.config, layer.layer_idx, layer.reach = model.config, index, _reach(layer, context)
        setattr(layer, name, MethodType(_either(getattr(type(layer), name), paged), layer))
    if layers:
        _share(layers, model.base_model, context)
        model.set_attn_implementation = MethodType(_set_function, model)
    return bool(layers)


def _set_function(model: Any, name: Any) -> None:
    """In place of transformers' own, which refuses a class without the interface."""
    model.config._attn_implementation = name


def _either(own: Any, paged: Any) -> Any:
    """A method of a layer that is its own, or `paged` under that name."""

    def method(layer: Any, *given: Any, **named: Any) -> Any:
        return (paged if layer.config._attn_implementation == NAME else own)(layer, *given, **named)

    return method


def _reach(layer: Any, context: int) -> Reach:
    """Only GPT-Neo's layers have a mask of their own, in a buffer."""
    if type(layer).__name__ != "GPTNeoSelfAttention":
        return Reach()
    mask = layer.bias[0, 0]
    return Mask(lambda batch, head, queries, keys: mask[queries, keys]).reach(context, mask.device)


def _share(layers: list[Any], decoder: Any, context: int) -> None:
    """Prepares what the layers of a model have in common."""
    module = sys.modules[type(layers[0]).__module__]
    if hasattr(module, "build_alibi_tensor"):
        heads, ones = layers[0].num_heads, torch.ones(1, context, dtype=torch.long, device=decoder.device)

        @cache
        def alibi(dtype: torch.dtype) -> Any:
            return module.build_alibi_tensor(ones, heads, dtype)[:, 0].float() * layers[0].beta

        for layer in layers:
            layer.alibi = alibi
    elif hasattr(decoder, "build_mpt_alibi_tensor"):
        decoder.build_mpt_alibi_tensor = cache(decoder.build_mpt_alibi_tensor)  # It is the same in each pass.
        decoder.register_forward_pre_hook(_give_mask, with_kwargs=True)


def _give_mask(decoder: Any, given: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """MPT converts its mask, so there must be one; transformers leaves one of four dimensions as it is."""
    is_paged = decoder.config._attn_implementation == NAME
    return given, named | ({"attention_mask": decoder.wte.weight.new_empty(1, 1, 1, 1)} if is_paged else {})


def _bloom(layer: Any, hidden: Tensor, residual: Tensor, **_: Any) -> tuple[Tensor, None]:
    query, key, value = layer._reshape(layer.query_key_value(hidden))
    scores = Scores(layer.inv_norm_factor, bias=layer.alibi(hidden.dtype), by_position=True)
    return residual + layer.dense(attend(layer, query, key, value, scores).flatten(2)), None


def _mpt(layer: Any, hidden: Tensor, position_bias: Tensor, **_: Any) -> tuple[Tensor, None]:
    packed = layer.Wqkv(hidden)
    if layer.clip_qkv:
        packed = packed.clamp(-layer.clip_qkv, layer.clip_qkv)
    query, key, value = (part.unflatten(2, (layer.n_heads, -1)).transpose(1, 2) for part in packed.chunk(3, 2))
    scores = Scores(layer.softmax_scale, bias=position_bias[:, 0])
    return layer.out_proj(attend(layer, query, key, value, scores).flatten(2)), None


def _falcon(layer: Any, hidden: Tensor, alibi: Any, position_embeddings: Any, **_: Any) -> tuple[Tensor, None]:
    # By key head: the queries, the key and the values. transformers would repeat the last two for each query.
    parts = layer.query_key_value(hidden).unflatten(2, (layer.num_kv_heads, -1, layer.head_dim))
    query, key, value = parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    scores = Scores(layer.inv_norm_factor)
    if alibi is None:
        query, key = sys.modules[type(layer).__module__].apply_rotary_pos_emb(query, key, *position_embeddings)
    else:
        scores = scores._replace(bias=layer.alibi(hidden.dtype), by_position=True)
    return layer.dense(attend(layer, query, key, value, scores).flatten(2)), None


def _attn(layer: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
    """The part of GPT-J's, CodeGen's and GPT-Neo's attention behind queries and keys, which may be wider."""
    scores = Scores(1 / getattr(layer, "scale_attn", 1.0))
    output = attend(layer, query.to(value.dtype), key.to(value.dtype), value, scores)
    return output.transpose(1, 2), None


_METHODS = {
    "BloomAttention": ("forward", _bloom),
    "MptAttention": ("forward", _mpt),
    "FalconAttention": ("forward", _falcon),
    "GPTJAttention": ("_attn", _attn),
    "CodeGenAttention": ("_attn", _attn),
    "GPTNeoSelfAttention": ("_attn", _attn),
}
