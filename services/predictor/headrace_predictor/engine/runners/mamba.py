"""Recurrent layers of transformers on the CPU: shorter scans, and steps for one id of each row in one call.

transformers pads a pass of several ids to a multiple of `chunk_size`, usually 256, so that four ids took a third of the
time of 256; with `_SCAN` longer passes are no slower. Its steps for one id are 5 to 30 operations, some of which make
tensors of the size of the states. All modules with such layers have copies of the same few functions; in their places
are those of cpu/recurrent.py, which change the states in place, and transformers' own where these do not apply. The
proof (proof.py) compares both with what transformers computes.
"""

import math
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace_predictor.engine.cpu.recording import launch

try:
    from headrace_predictor.engine.cpu import recurrent
except ImportError:  # Numba is optional.
    recurrent = None  # type: ignore[assignment]

_SCAN = 64  # Ids.
_SWISH = ("silu", "swish")
_ANY = 0.0, math.inf
_UNKNOWN = ("z", "seq_idx", "cu_seqlens")
_TYPES = {torch.float32: np.empty(0, np.float32), torch.bfloat16: np.empty(0, np.uint16)}


def quicken(model: Any) -> None:
    """Changes the layers of a model, and for its process the steps of all models of its class."""
    if model.device.type != "cpu":
        return
    for module in model.modules():
        if isinstance(getattr(module, "chunk_size", None), int):
            module.chunk_size = min(module.chunk_size, _SCAN)
        code = sys.modules[type(module).__module__]
        for name, step in _STEPS.items() if recurrent is not None else ():
            own = getattr(code, name, None)
            if own is not None and getattr(own, "step", None) is not step:
                setattr(code, name, _either(step, own))


def _either(step: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """A step that returns None where it does not apply: then `own` computes it, as on other devices."""

    @wraps(own)
    def compute(*arguments: Any, **named: Any) -> Any:
        result = step(*arguments, **named) if arguments[0].device.type == "cpu" else None
        return own(*arguments, **named) if result is None else result

    compute.step = step  # type: ignore[attr-defined]
    return compute


def convolve(
    x: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor | None:
    """The outputs [rows, channels, 1] for inputs of that shape; states and `weight` are [..., channels, taps]."""
    rows, channels, ids = x.shape
    parameters = [weight] if bias is None else [weight, bias]
    is_like = all(one.dtype is x.dtype and one.is_contiguous() for one in (states, *parameters))
    if ids > 1 or activation not in (None, *_SWISH) or states.shape[1:] != weight.shape or x.stride(1) != 1:
        return None
    if not is_like or x.dtype not in _TYPES:
        return None
    out = torch.empty(rows, channels, 1, dtype=x.dtype)
    launch(
        *(recurrent.convolution(weight.shape[1]), rows, channels, x.data_ptr(), x.stride(0), states.data_ptr()),
        *(weight.data_ptr(), parameters[-1].data_ptr(), bias is not None, activation is not None, out.data_ptr()),
        _TYPES[x.dtype],
    )
    return out


def update_state_space(
    states: Tensor,
    x: Tensor,
    times: Tensor,
    rates: Tensor,
    keys: Tensor,
    queries: Tensor,
    skip: Tensor | None = None,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """The outputs [rows, heads, size] of Mamba 2 for inputs, and gates `z`, of that shape.

    Keys and queries are [rows, groups, n], states [rows, heads, size, n], and the others views of one number for each
    head: `times` [rows, heads, size], `rates` [heads, size, n], `skip` and `dt_bias` [heads, size].
    """
    if skip is None or dt_bias is None or not dt_softplus:
        return None
    if times.stride()[1:] != (1, 0) or rates.stride() != (1, 0, 0) or {skip.stride(), dt_bias.stride()} != {(1, 0)}:
        return None
    inputs = [one[:, None] for one in (x, times, keys, queries, x if z is None else z)]
    return _state_space(inputs, z is not None, _ANY, (rates, dt_bias, skip), states, torch.empty_like(x))


def scan_state_space(
    x: Tensor,
    times: Tensor,
    rates: Tensor,
    keys: Tensor,
    queries: Tensor,
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    **others: Any,
) -> Any:
    """The outputs [rows, ids, heads, size] of Mamba 2, float32, for inputs of that shape; the states if asked for.

    Time steps are [rows, ids, heads], keys and queries [rows, ids, groups, n], `rates`, `D` and `dt_bias` [heads].
    """
    if D is None or dt_bias is None or not dt_softplus or any(others.get(name) is not None for name in _UNKNOWN):
        return None
    rows, _, heads, size = x.shape
    states = x.new_zeros((rows, heads, size, keys.shape[-1]), dtype=torch.float32)
    if initial_states is not None:
        states.copy_(initial_states)
    inputs = [one.contiguous() for one in (x, times, keys, queries)]
    out = _state_space(
        [*inputs, inputs[0]], False, dt_limit, (rates, dt_bias, D), states, torch.empty(x.shape, dtype=torch.float32)
    )
    return out if out is None or not return_final_states else (out, states)


def _state_space(
    inputs: list[Tensor],
    is_gated: bool,
    limits: tuple[float, float],
    parameters: tuple[Tensor, Tensor, Tensor],
    states: Tensor,
    out: Tensor,
) -> Tensor | None:
    """`out`; None if the kernel does not take the types or the places of the numbers."""
    x, times, keys, queries, gates = inputs
    rates, biases, skip = parameters
    if not _are_rows(x, keys, queries, gates) or times.dtype is not x.dtype:
        return None
    if not _have_types(rates, skip, biases, states):
        return None
    recurrent.run(
        *(
            recurrent.state_space,
            states.numel() * x.shape[1],
            (*x.shape[:3], *keys.shape[2:3], x.shape[3], keys.shape[3]),
        ),
        *(_places(*inputs), is_gated, (np.float32(limits[0]), np.float32(limits[1]))),
        *(rates.data_ptr(), biases.data_ptr(), skip.data_ptr(), states.data_ptr(), out.data_ptr()),
        *(_TYPES[x.dtype], _TYPES[skip.dtype], _TYPES[states.dtype], _TYPES[out.dtype]),
    )
    return out


def update_selective(
    states: Tensor,
    x: Tensor,
    times: Tensor,
    rates: Tensor,
    keys: Tensor,
    queries: Tensor,
    skip: Tensor | None = None,
    *,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    **_: Any,
) -> Tensor | None:
    """The outputs [rows, channels] of Mamba for inputs, time steps and gates `z` of that shape.

    Keys and queries are [rows, n], states [rows, channels, n], `rates` [channels, n], `skip` and `dt_bias` [channels].
    """
    if skip is None or dt_bias is None or not dt_softplus or z is None or not rates.is_contiguous():
        return None
    if not _are_rows(x, times, keys, queries, z) or not _have_types(rates, skip, skip, states):
        return None
    out, biases = torch.empty(x.shape, dtype=x.dtype), dt_bias.float()
    recurrent.run(
        *(recurrent.selective, states.numel(), tuple(states.shape), _places(x, times, keys, queries, z)),
        *(rates.data_ptr(), biases.data_ptr(), skip.data_ptr(), states.data_ptr(), out.data_ptr()),
        *(_TYPES[x.dtype], _TYPES[skip.dtype], _TYPES[states.dtype]),
    )
    return out


def update_by_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor] | None:
    """The outputs [rows, 1, heads, size] of the gated delta rule for values of that shape, and the states.

    Queries and keys are [rows, 1, key heads, n], `g` and `beta` [rows, 1, heads], states [rows, heads, n, size].
    """
    if initial_state is None or value.shape[1] > 1 or cu_seqlens is not None or not output_final_state:
        return None
    return _delta_rule((query, key, value), g, beta, initial_state, use_qk_l2norm_in_kernel)


def scan_by_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None] | None:
    """As `update_by_delta_rule`, for several ids; states are float32."""
    if any(others.get(name) is not None for name in _UNKNOWN):
        return None
    rows, _, heads, size = value.shape
    states = value.new_zeros((rows, heads, key.shape[-1], size), dtype=torch.float32)
    if initial_state is not None:
        states.copy_(initial_state)
    parts = query.contiguous(), key.contiguous(), value.contiguous()
    found = _delta_rule(parts, g, beta, states, use_qk_l2norm_in_kernel)
    return found if found is None or output_final_state else (found[0], None)


def _delta_rule(
    parts: tuple[Tensor, Tensor, Tensor], g: Tensor, beta: Tensor, states: Tensor, is_normed: bool
) -> tuple[Tensor, Tensor] | None:
    """The outputs and the changed states; None if the kernel does not take the types or the places of the numbers."""
    _, key, value = parts
    if not _are_rows(*parts) or not states.is_contiguous() or states.dtype not in _TYPES:
        return None
    out, decays, rates = torch.empty(value.shape, dtype=value.dtype), *(one.float().contiguous() for one in (g, beta))
    recurrent.run(
        *(recurrent.delta_rule, states.numel() * value.shape[1], (*value.shape[:3], *key.shape[2:], value.shape[3])),
        *(_places(*parts, decays, rates), is_normed, states.data_ptr(), out.data_ptr()),
        *(_TYPES[value.dtype], _TYPES[states.dtype]),
    )
    return out, states


_STEPS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_update": convolve,
    "mamba2_selective_state_update": update_state_space,
    "mamba2_chunk_scan": scan_state_space,
    "mamba_selective_state_update": update_selective,
    "torch_recurrent_gated_delta_rule": update_by_delta_rule,
    "torch_chunk_gated_delta_rule": scan_by_delta_rule,
}


def _are_rows(*tensors: Tensor) -> bool:
    """Whether tensors [rows, ids, ...] are of one supported type, and the numbers of each id contiguous."""
    dtype = tensors[0].dtype
    return dtype in _TYPES and all(
        one.dtype is dtype
        and one.stride(-1) == 1
        and (one.dim() < 4 or one.shape[2] == 1 or one.stride(2) == one.shape[3])
        for one in tensors
    )


def _have_types(rates: Tensor, skip: Tensor, biases: Tensor, states: Tensor) -> bool:
    is_float = rates.dtype is torch.float32 and skip.dtype in _TYPES and states.dtype in _TYPES
    return is_float and skip.dtype is biases.dtype and states.is_contiguous()


def _places(*tensors: Tensor) -> Any:
    """The address of each tensor [rows, ids, ...], or [rows, numbers], and its strides: int64 [tensors, 3]."""
    return np.array([(one.data_ptr(), *one.stride()[:2]) for one in tensors], np.int64)
