"""Paged attention behind transformers' AttentionInterface: what every layer of a paged model calls.

The step's plan comes as the model's keyword `step_plan`. A layer writes the keys and values of the
step's tokens to their blocks, at places given by position, so a step can be run again; then each
sequence's queries look at their own blocks. One query a row goes to the compiled kernel where there
is one for the device and dtype; all else is plain torch and runs anywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface

from services.predictor.engine.step_plan import Chunk, StepPlan

try:
    from services.predictor.engine import cpu_attention
except ImportError:  # Numba is optional.
    cpu_attention = None  # type: ignore[assignment]

NAME = "millrace_paged"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    step_plan: StepPlan | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Query [1, heads, T, head size] to output [1, T, heads, head size], as the interface wants it."""
    if step_plan is None:
        raise ValueError("paged attention needs a step plan")
    if unknown := [name for name in _UNSUPPORTED if others.get(name) is not None]:
        raise NotImplementedError(f"attention with {', '.join(unknown)}")
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window or 0
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    outputs = []
    if decodes := step_plan.decodes:
        attend = _decode_compiled if uses_kernel(query) else _decode
        outputs.append(attend(step_plan, layer, queries[:decodes], keys[:decodes], values[:decodes], scale, window))
    if step_plan.chunks:
        step_plan.cache.write(layer, step_plan.written, keys[decodes:], values[decodes:])
        outputs += [_prefill(step_plan, layer, chunk, query, key, value, scale, window) for chunk in step_plan.chunks]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output[None], None


def uses_kernel(query: Tensor) -> bool:
    """Whether the compiled kernel takes such queries."""
    return (
        cpu_attention is not None
        and query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.bfloat16)
        and query.shape[-1] % 8 == 0
    )


def _prefill(
    plan: StepPlan, layer: int, chunk: Chunk, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
) -> Tensor:
    """Output [tokens, heads, head size] of a chunk, whose keys and values are in the cache already."""
    mine = slice(chunk.at, chunk.at + chunk.count)
    if chunk.start == 0:
        keys, values = key[:, :, mine], value[:, :, mine]
    else:
        end = chunk.start + chunk.count
        transposed, values = plan.cache.read(layer, chunk.blocks[None])
        keys, values = transposed.transpose(2, 3)[:, :, :end], values[:, :, :end]
    group = query.shape[1] // keys.shape[1]
    if group > 1:
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    is_causal = chunk.start == 0 and (not window or chunk.count <= window)
    mask = None if is_causal else plan.chunk_mask(chunk, window)
    output = F.scaled_dot_product_attention(query[:, :, mine], keys, values, mask, is_causal=is_causal, scale=scale)
    return output[0].transpose(0, 1)


def _decode(
    plan: StepPlan, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int
) -> Tensor:
    """Output [rows, heads, head size] of one query a row, from blocks copied together."""
    size = plan.cache.block_tokens
    position = plan.lengths.long() - 1
    block = plan.table.gather(1, (position // size)[:, None])[:, 0].long()
    plan.cache.write(layer, (block, position % size), keys, values)
    transposed, read_values = plan.cache.read(layer, plan.table)
    rows, heads = queries.shape[0], keys.shape[1]
    grouped = queries.reshape(rows, heads, -1, queries.shape[-1])
    scores = torch.matmul(grouped, transposed).float() * scale
    scores = scores.masked_fill(~plan.decode_mask(window)[:, None, None], -torch.inf)
    return torch.matmul(scores.softmax(-1).to(values.dtype), read_values).view_as(queries)


def _decode_compiled(
    plan: StepPlan, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int
) -> Tensor:
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    cpu_attention.attend(
        torch.get_num_threads(),
        *(_array(tensor) for tensor in (queries, keys, values)),
        _array(plan.cache.keys[layer]),
        _array(plan.cache.values[layer]),
        plan.table.numpy(),
        plan.lengths.numpy(),
        np.float32(scale),
        window,
        _array(output),
    )
    return output


def _array(tensor: Tensor) -> NDArray[Any]:
    """The tensor's memory as the kernel takes it."""
    tensor = tensor.contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


AttentionInterface.register(NAME, paged_attention)
