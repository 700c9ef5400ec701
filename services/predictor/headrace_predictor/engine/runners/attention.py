"""Paged attention behind transformers' AttentionInterface, which every layer of a paged model calls.

The step's plan is the model's keyword argument `step_plan`. A layer writes the keys and values of the step's tokens to
their blocks, at places given by position, so a step can be repeated. Then each token's query attends to its own
sequence's blocks: with the compiled kernel if it supports the device and dtype, otherwise in plain torch, which runs
anywhere.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AttentionInterface

from headrace_predictor.engine.cpu import kernel
from headrace_predictor.engine.runners.reach import Reach
from headrace_predictor.engine.runners.step_plan import Chunk, StepPlan
from headrace_predictor.engine.state.cache import BLOCK_TOKENS

NAME = "headrace_paged"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    step_plan: StepPlan | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Query [1, heads, T, head size] to output [1, T, heads, head size], as the interface requires."""
    if step_plan is None:
        raise ValueError("paged attention needs a step plan")
    if unknown := [name for name in _UNSUPPORTED if others.get(name) is not None]:
        raise NotImplementedError(f"attention with {', '.join(unknown)}")
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    reach: Reach = module.reach  # type: ignore[assignment]  # Not `sliding_window`: some families only have the mask.
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    attend = _attend_compiled if kernel.takes(queries) else _attend_in_copies
    return attend(step_plan, layer, queries, keys, values, scale, reach)[None], None


def _attend_compiled(
    plan: StepPlan, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, reach: Reach
) -> Tensor:
    """Output [T, heads, head size]."""
    packed = torch.cat((queries, keys, values), dim=1)
    attend = kernel.Attention(queries.shape[1], keys.shape[1], scale)
    output = kernel.Buffer(queries.shape, queries.dtype)
    return attend(plan.cache.arrays[layer], plan.ranges(reach), packed, output).view(queries.shape)


def _attend_in_copies(
    plan: StepPlan, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, reach: Reach
) -> Tensor:
    """Output [T, heads, head size], from copies of the blocks."""
    plan.cache.write(layer, plan.places(), keys, values)
    outputs = []
    if decodes := plan.decodes:
        read_keys, read_values = plan.cache.read(layer, plan.table[:decodes])
        grouped = queries[:decodes].reshape(decodes, keys.shape[1], -1, queries.shape[-1])
        scores = torch.matmul(grouped, read_keys).float() * scale
        weights = scores.masked_fill(~plan.decode_mask(reach), -torch.inf).softmax(-1).to(values.dtype)
        outputs.append(torch.matmul(weights, read_values).view_as(queries[:decodes]))
    outputs += [_prefill(plan, layer, chunk, queries, scale, reach) for chunk in plan.chunks]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _prefill(plan: StepPlan, layer: int, chunk: Chunk, queries: Tensor, scale: float, reach: Reach) -> Tensor:
    """Output [tokens, heads, head size] of a chunk whose keys and values are already in the cache."""
    blocks = -(-(chunk.start + chunk.count) // BLOCK_TOKENS)
    keys, values = plan.cache.read(layer, plan.table[chunk.owner : chunk.owner + 1, :blocks])
    query = queries[chunk.at : chunk.at + chunk.count].transpose(0, 1)[None]
    group = query.shape[1] // keys.shape[1]
    keys = keys.transpose(2, 3)
    if group > 1:
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    mask = plan.chunk_mask(chunk, reach)
    return F.scaled_dot_product_attention(query, keys, values, mask, scale=scale)[0].transpose(0, 1)


AttentionInterface.register(NAME, paged_attention)
