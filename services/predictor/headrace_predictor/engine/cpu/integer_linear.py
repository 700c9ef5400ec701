"""Linear layers of 8 and 4 bits, for models whose forward pass is transformers' own.

Inputs and weights are those of formats.py, and a row's product is the same for any rows beside it, any threads and any
processor. What is between the products stays the model's.

Experts that transformers keeps in one tensor become linear layers too: its own products read these tensors row by row,
or pass through all experts for any number of tokens. Here a step computes those experts that its tokens have, each once
for all of them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor, nn

from headrace.errors import StartupError
from headrace_predictor.engine.cpu import decode
from headrace_predictor.engine.cpu.attention import POOL
from headrace_predictor.engine.cpu.compiled import OPTIONS
from headrace_predictor.engine.cpu.formats import MARKERS, pack, panel_bytes
from headrace_predictor.engine.cpu.grouped import BLOCK, GROUP, PANEL
from headrace_predictor.engine.cpu.packed_file import PackedFile
from headrace_predictor.engine.cpu.packed_linear import (
    PackedWeight,
    WeightKind,
    called_linears,
    linears_of,
    replace_layers,
    weight_of,
)

# With fewer bits they would choose other experts, or other keys.
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "indexer"})


class ExpertLinears(nn.ModuleList):
    """The same product of each expert."""

    def forward(self, rows: Tensor, counts: dict[int, int]) -> Tensor:
        """Rows [n, in], of which each expert in turn has so many, to [n, out]."""
        parts = torch.split(rows, [*counts.values()])
        return torch.cat([self[expert](part) for expert, part in zip(counts, parts, strict=True)])


def split_experts(model: Any) -> None:
    """Replaces the tensors of all modules that follow transformers' interface for experts."""
    for module in [*model.modules()]:
        if isinstance(getattr(module, "down_proj", None), nn.Parameter) and hasattr(module, "has_post_expert_norm"):
            module.opening = _linears(module, "gate_up_proj" if module.has_gate else "up_proj")
            module.closing = _linears(module, "down_proj")
            module.forward = partial(_compute_experts, module)


def _linears(module: Any, name: str) -> ExpertLinears:
    """Takes a tensor [experts, …] and its biases from a module."""
    weights = module._parameters.pop(name).detach()
    biases = module._parameters.pop(f"{name}_bias").detach() if module.has_bias else [None] * len(weights)
    linears = ExpertLinears()
    for weight, bias in zip(weights.mT if module.is_transposed else weights, biases, strict=True):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias, requires_grad=False)
        linears.append(linear)
    return linears


def _compute_experts(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The sum [tokens, n] of each token's experts [tokens, k], times their weights."""
    chosen = top_k_index.flatten()
    order = chosen.argsort()
    counts = {expert: count for expert, count in enumerate(chosen.bincount().tolist()) if count}
    inner = experts.opening(hidden_states[order // top_k_index.shape[1]], counts)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    outputs = experts.closing(inner, counts)
    if experts.has_post_expert_norm:
        outputs = experts.post_expert_norm(outputs)
    own = torch.empty_like(outputs)
    own[order] = outputs
    weighted = own.view(*top_k_index.shape, -1) * top_k_weights[..., None]
    return weighted.sum(dim=1).to(hidden_states.dtype)


class IntegerLinear(nn.Module):
    """x [..., in] to x·weightᵀ + bias [..., out], in the dtype of x.

    `weight` is [out, in]. `format_` is the model's; with `is_wide` this layer has 8 bits in any case.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, format_: str, is_wide: bool, file: PackedFile) -> None:
        super().__init__()
        self.weight = WeightKind(weight.dtype, weight.device)
        self.packed = packed = pack("int8" if is_wide else format_, weight.detach().contiguous(), file=file)
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._marker = MARKERS[format_]
        self._product = np.array(packed.numbers(self._bias), np.int64)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.packed.inputs).float().contiguous()
        tokens, blocks = len(rows), self.packed.blocks
        out = torch.empty(tokens, self.packed.outputs)
        memory = {
            decode.PACKED: out,
            decode.INPUTS: torch.empty(tokens, blocks * BLOCK + decode.ROW_GAP, dtype=torch.uint8),
            decode.SCALES: torch.empty(tokens, blocks),
            decode.SUMS: torch.empty(tokens, blocks * BLOCK // GROUP, dtype=torch.int32),
        }
        parameters = np.zeros(decode.PRODUCT, np.int64)
        for at, tensor in memory.items():
            parameters[at] = tensor.data_ptr()
        threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
        with POOL:
            numba.set_num_threads(threads)
            _compute(self._marker, rows.numpy(), self._product, parameters, threads)
        return out.to(x.dtype).view(*x.shape[:-1], self.packed.outputs)


@njit(parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _compute(marker: Any, rows: Any, product: Any, parameters: Any, threads: Any) -> None:
    """One product, as a pass of decode.py computes it."""
    tokens = len(rows)
    for token in prange(tokens):
        decode.convert_inputs(token, rows[token], product, parameters, marker)
    together, most = decode.sizes_of_chunk(product, tokens, threads, False)
    divisions = (tokens + most - 1) // most
    for chunk in prange((product[decode.PANELS] + together - 1) // together * divisions):
        panel, token = chunk // divisions * together, chunk % divisions * most
        panels, end = min(panel + together, product[decode.PANELS]), min(token + most, tokens)
        decode.multiply_panels(decode.MULTIPLY, product, panel, panels, token, end, parameters, marker)


class Quantisation:
    """Quantises the linear layers of a model that a pass calls, and all experts beside one; the head has 8 bits in any
    format.

    Weights of other layers may be read as they are, so these stay. So do layers that choose experts or keys, whose
    products are packed: one that depended on the rows beside it could choose others. `open_file` opens the file of so
    many bytes at most.
    """

    def __init__(self, format_: str, open_file: Callable[[int], PackedFile]) -> None:
        self.weights_bytes = self.mapped_bytes = 0
        self._format = format_
        self._open_file = open_file

    def __call__(self, model: Any, run: Callable[[], None]) -> None:
        """Quantises what `run` calls, and runs it again."""
        split_experts(model)
        head, layers = model.get_output_embeddings(), _chosen(model, run)
        if not layers:
            raise StartupError(f"PREDICTOR_WEIGHTS={self._format}: {type(model).__name__} calls no linear layer")
        file = self._open_file(sum(self._most_bytes(layer, layer is head) for layer in layers))

        def quantised(linear: Any) -> IntegerLinear:
            layer = IntegerLinear(weight_of(linear), linear.bias, self._format, linear is head, file)
            self.weights_bytes += layer.packed.nbytes
            return layer

        replace_layers(model, layers, quantised)
        file.keep()
        self.mapped_bytes = self.weights_bytes if file.is_mapped else 0
        self.weights_bytes += sum(tensor.numel() * tensor.itemsize for tensor in model.parameters())
        for module in _routers(model):
            if (weight := module._parameters.get("weight")) is not None and weight.dim() == 2:
                del module.weight
                module.weight = PackedWeight.of(weight, module._parameters.get("bias"))
        run()

    def _most_bytes(self, linear: Any, is_wide: bool) -> int:
        outputs, inputs = weight_of(linear).shape
        a_panel = panel_bytes("int8" if is_wide else self._format, inputs) + 4 * PANEL
        return (outputs // PANEL + 1) * a_panel + BLOCK


def _chosen(model: Any, run: Callable[[], None]) -> list[Any]:
    """The linear layers that `run` calls, and all experts beside one, but not those that choose experts."""
    called = set(called_linears(model, run))
    for experts in (module for module in model.modules() if isinstance(module, ExpertLinears)):
        if not called.isdisjoint(experts):
            called.update(experts)
    called -= _routers(model)
    return [linear for linear in linears_of(model) if linear in called]


def _routers(model: Any) -> set[Any]:
    named = model.named_modules(remove_duplicate=False)
    return {module for path, module in named if not _ROUTERS.isdisjoint(path.split("."))}
