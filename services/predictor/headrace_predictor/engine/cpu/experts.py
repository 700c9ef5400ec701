"""The experts of a mixture that transformers keeps in one tensor: packed, and one product for those that a step has.

Transformers' own products read these tensors row by row, or pass through all experts for any number of tokens. Here a
step reads each expert that its tokens have once, and a token's numbers depend on no other token.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from headrace_predictor.engine.cpu.compiled import OPTIONS
from headrace_predictor.engine.cpu.packed_file import PackedFile
from headrace_predictor.engine.cpu.recording import launch
from headrace_predictor.engine.cpu.row_products import RowProducts
from headrace_predictor.engine.cpu.vectors import array_at


def weights_of(experts: Any) -> dict[str, Tensor]:
    """The weights [experts, out, in] of the two products, by their names."""
    names = ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
    return {name: getattr(experts, name).mT if experts.is_transposed else getattr(experts, name) for name in names}


def pack_experts(experts: Any, format_: str, file: PackedFile) -> int:
    """Replaces the tensors of a module of experts; returns the bytes of the packed ones. For formats see formats.py."""
    products = []
    for name, weights in weights_of(experts).items():
        biases = experts._parameters.pop(f"{name}_bias") if experts.has_bias else None
        products.append(RowProducts(weights.detach(), biases, format_, file))
        del experts._parameters[name]
    opening, closing = products
    experts.forward = partial(_compute, experts, opening, closing)
    return sum(product.nbytes for product in products)


def _compute(
    experts: Any,
    opening: RowProducts,
    closing: RowProducts,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """The sum [tokens, n] of each token's experts [tokens, k], times their weights."""
    chosen = top_k_index.flatten().long()
    order, places = torch.empty((2, len(chosen)), dtype=torch.int64)
    ends = np.empty(opening.count, np.int64)
    launch(_sort, chosen.data_ptr(), top_k_index.shape[1], order.data_ptr(), places.data_ptr(), ends, len(chosen))
    inner = opening(hidden_states.index_select(0, order), ends)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    outputs = closing(inner, ends)
    if experts.has_post_expert_norm:
        outputs = experts.post_expert_norm(outputs)
    own = outputs.index_select(0, places).view(*top_k_index.shape, -1)
    weighted = own * top_k_weights[..., None]
    return weighted.sum(dim=1).to(hidden_states.dtype)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _sort(chosen: Any, together: Any, order: Any, places: Any, ends: Any, count: Any) -> None:
    """Sorts choices by expert, of which each token has so many: their tokens, the place of each, and experts' ends."""
    own = array_at(chosen, (count,), ends)
    tokens, own_places = array_at(order, (count,), ends), array_at(places, (count,), ends)
    ends[:] = 0
    for expert in own:
        ends[expert] += 1
    begin = 0
    for expert in range(len(ends)):
        begin, ends[expert] = begin + ends[expert], begin
    for number in range(count):
        place = ends[own[number]]
        tokens[place], own_places[number] = number // together, place
        ends[own[number]] += 1
