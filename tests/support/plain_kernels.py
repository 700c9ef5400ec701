"""The operations of the GPU's kernels in plain torch, headrace_predictor/engine/gpu."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from headrace_predictor.engine.gpu import INT8_BLOCK, HeadNorm, Matrix
from headrace_predictor.engine.state.attention import Range, Scores


def attend(queries: Tensor, keys: Tensor, values: Tensor, tokens: Range, scores: Scores) -> Tensor:
    page = values.shape[2]
    group = queries.shape[1] // values.shape[1]
    outputs = []
    for query, owner, first, end in zip(
        queries, tokens.owners.tolist(), tokens.firsts.tolist(), tokens.ends.tolist(), strict=True
    ):
        blocks = tokens.table[owner, : -(-end // page)].long()
        key = keys[blocks].permute(1, 2, 0, 3).flatten(2)[:, :, first:end].float()
        value = values[blocks].transpose(0, 1).flatten(1, 2)[:, first:end].float()
        products = query.float().view(len(key), group, -1) @ key * scores.scale
        if scores.cap:
            products = scores.cap * torch.tanh(products / scores.cap)
        if scores.bias is not None:
            n = scores.bias.shape[1]
            places = [position if scores.by_position else max(0, position - end + n) for position in range(first, end)]
            products = products + scores.bias[:, places].view(len(key), group, -1)
        if scores.sinks is not None:
            products = torch.cat((products, scores.sinks.float().view(-1, group, 1)), -1)
        weights = products.softmax(-1)[..., : end - first]
        outputs.append((weights @ value).flatten(0, 1).to(queries.dtype))
    return torch.stack(outputs)


def turn_and_store(
    packed: Tensor, rotary: tuple[Tensor, Tensor], norm: HeadNorm | None, keys: Tensor, values: Tensor, tokens: Range
) -> Tensor:
    heads, size, page = keys.shape[1:]
    parts = packed.view(len(packed), -1, size)
    queries, new_keys, new_values = parts.split((parts.shape[1] - 2 * heads, heads, heads), 1)
    if norm is not None:
        weights, epsilon = norm
        queries, new_keys = (
            F.rms_norm(part.float(), (size,), weight.float(), epsilon)
            for part, weight in zip((queries, new_keys), weights, strict=True)
        )
    position = tokens.ends.long() - 1
    block, offset = tokens.table[tokens.owners.long(), position // page].long(), position % page
    keys[block, :, :, offset] = _turned(new_keys, *rotary).to(keys.dtype)
    values[block, :, offset] = new_values
    return _turned(queries, *rotary).to(packed.dtype)


def _turned(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    near, far = heads.float().chunk(2, -1)
    return heads.float() * cosines.float()[:, None] + torch.cat((-far, near), -1) * sines.float()[:, None]


def gate(gate_up: Tensor) -> Tensor:
    first, second = gate_up.float().chunk(2, -1)
    return (F.silu(first) * second).to(gate_up.dtype)


def linear(x: Tensor, matrix: Matrix, total: Tensor | None = None) -> Tensor:
    product = _product(x, matrix)
    return product if total is None else total + product


def _product(x: Tensor, matrix: Matrix) -> Tensor:
    weight, bias, scales = matrix
    if scales is None:
        return F.linear(x, weight, bias)
    sums, most = torch.zeros(len(x), len(weight), device=x.device), torch.full((), 127.0, device=x.device)
    parts = zip(x.float().split(INT8_BLOCK, 1), weight.float().split(INT8_BLOCK, 1), strict=True)
    for numbers, weights in parts:  # The sums of integers are exact in float32 too.
        largest = numbers.abs().amax(1, keepdim=True)
        largest = largest.where(largest >= 2.0**-120, 0.0)
        inverse = torch.where(largest > 0, most / largest, 0.0)
        sums += (numbers * inverse).round() @ weights.T * (largest / most)
    return (sums * scales + (0.0 if bias is None else bias)).to(x.dtype)
