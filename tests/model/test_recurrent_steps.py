"""The compiled steps of recurrent layers give what transformers' own give, and each row what it has alone."""

from inspect import signature, unwrap

import pytest
import torch
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from headrace_predictor.engine.runners import mamba as ours

_ROWS = 9  # Their states are so many that threads share them. No other dimension is of this size.


def _numbers(*shape, dtype=torch.float32):
    return (torch.rand(shape) * 2 - 1).to(dtype)


def _convolution(dtype, has_more):
    projected, states = _numbers(_ROWS, 1, 170, dtype=dtype), _numbers(_ROWS, 130, 4, dtype=dtype)
    more = (_numbers(130, dtype=dtype), "silu") if has_more else (None, None)
    inputs = projected[..., 20:150].transpose(1, 2)
    return granite.causal_conv1d_update, ours.convolve, [inputs, states, _numbers(130, 4, dtype=dtype), *more], {}


def _state_space(dtype, has_more):
    heads, size, n, groups = 12, 40, 48, 3
    projected = _numbers(_ROWS, heads * size + 2 * groups * n, dtype=dtype)
    x, keys, queries = projected.split([heads * size, groups * n, groups * n], dim=-1)
    times = _numbers(_ROWS, heads, dtype=dtype)[..., None].expand(-1, -1, size)
    rates = (-torch.rand(heads))[:, None, None].expand(-1, size, n)
    skip, bias = (_numbers(heads, dtype=dtype)[:, None].expand(-1, size) for _ in range(2))
    gates = _numbers(_ROWS, heads, size, dtype=dtype) if has_more else None
    groups_of = (part.view(_ROWS, groups, n) for part in (keys, queries))
    return (
        granite.mamba2_selective_state_update,
        ours.update_state_space,
        [_numbers(_ROWS, heads, size, n, dtype=dtype), x.view(_ROWS, heads, size), times, rates, *groups_of, skip],
        {"dt_bias": bias, "dt_softplus": True, "z": gates},
    )


def _selective(dtype, _):
    channels, n = 1056, 16
    x, times, gates = (_numbers(_ROWS, channels, dtype=dtype) for _ in range(3))
    keys, queries = (_numbers(_ROWS, n, dtype=dtype) for _ in range(2))
    rates, skip, bias = -4 * torch.rand(channels, n), _numbers(channels, dtype=dtype), _numbers(channels)
    return (
        mamba.mamba_selective_state_update,
        ours.update_selective,
        [_numbers(_ROWS, channels, n), x, times, rates, keys, queries, skip],
        {"dt_bias": bias, "dt_softplus": True, "z": gates},
    )


def _delta_rule(dtype, has_more):
    _, _, arguments, named = _delta_rule_scan(dtype, has_more, ids=1)
    named |= {"initial_state": _numbers(_ROWS, 8, 48, 40)}
    return qwen.torch_recurrent_gated_delta_rule, ours.update_by_delta_rule, arguments, named


def _state_space_scan(dtype, has_more, ids=70):
    heads, size, n, groups = 12, 40, 48, 3
    convolved = _numbers(_ROWS, heads * size + 2 * groups * n, ids, dtype=dtype).transpose(1, 2)
    x, keys, queries = convolved.split([heads * size, groups * n, groups * n], dim=-1)
    return (
        granite.mamba2_chunk_scan,
        ours.scan_state_space,
        [
            *(x.view(_ROWS, ids, heads, size), _numbers(_ROWS, ids, heads, dtype=dtype), -torch.rand(heads)),
            *(part.view(_ROWS, ids, groups, n) for part in (keys, queries)),
        ],
        {
            "chunk_size": 32,
            "D": _numbers(heads, dtype=dtype),
            "dt_bias": _numbers(heads, dtype=dtype),
            "dt_softplus": True,
            "dt_limit": (0.1, 0.9) if has_more else (0.0, float("inf")),
            "initial_states": _numbers(_ROWS, heads, size, n, dtype=dtype) if has_more else None,
            "return_final_states": True,
            "z": None,
        },
    )


def _delta_rule_scan(dtype, has_more, ids=70):
    heads, n, size = 8, 48, 40
    query, key = (_numbers(_ROWS, ids, 4, n, dtype=dtype) / 4 for _ in range(2))
    return (
        qwen.torch_chunk_gated_delta_rule,
        ours.scan_by_delta_rule,
        [query, key, _numbers(_ROWS, ids, heads, size, dtype=dtype)],
        {
            "g": -torch.rand(_ROWS, ids, heads),
            "beta": torch.rand(_ROWS, ids, heads).to(dtype),
            "initial_state": _numbers(_ROWS, heads, n, size) if has_more else None,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": has_more,
        },
    )


def _result(step, arguments, named, rows=slice(None)):
    """The outputs of rows, and their states afterwards."""

    def of_rows(value):
        if not isinstance(value, torch.Tensor) or len(value) != _ROWS:
            return value
        return value[rows].clone() if value.is_contiguous() else value[rows]  # All states are; other views stay.

    arguments = [of_rows(value) for value in arguments]
    named = {name: of_rows(value) for name, value in named.items()}
    found = step(*arguments, **named)
    if isinstance(found, tuple):
        return found
    return found, arguments[1 if step in (ours.convolve, unwrap(granite.causal_conv1d_update)) else 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("has_more", [False, True])
@pytest.mark.parametrize(
    "case", [_convolution, _state_space, _selective, _delta_rule, _state_space_scan, _delta_rule_scan]
)
def test_a_step_is_that_of_transformers_and_each_row_the_same_alone(case, has_more, dtype):
    torch.manual_seed(0)
    own, step, arguments, named = case(dtype, has_more)
    expected, found = _result(unwrap(own), arguments, named), _result(step, arguments, named)
    rounds_times = case is _state_space_scan  # transformers' own, to bfloat16.
    tolerance = 2e-5 if dtype == torch.float32 else 8e-2 if rounds_times else 4e-2
    for ours_, theirs in zip(found, expected, strict=True):
        assert ours_.shape == theirs.shape
        assert ours_.dtype is theirs.dtype
        torch.testing.assert_close(ours_, theirs, rtol=tolerance, atol=tolerance)
    for row in range(_ROWS):
        alone = _result(step, arguments, named, slice(row, row + 1))
        assert all(torch.equal(one[0], all_[row]) for one, all_ in zip(alone, found, strict=True))


@pytest.mark.parametrize("case", [_state_space_scan, _delta_rule_scan])
def test_a_scan_continues_to_the_same_bits(case):
    _, scan, arguments, named = case(torch.float32, has_more=True)
    whole, states = scan(*arguments, **named)
    name = "initial_states" if "initial_states" in named else "initial_state"

    def part(value, ids):
        has_ids = isinstance(value, torch.Tensor) and value.dim() > 2 and value.shape[1] == 70
        return value[:, ids] if has_ids else value

    found, after = [], named[name]
    for ids in (slice(0, 3), slice(3, 64), slice(64, 70)):
        own = {key: part(value, ids) for key, value in named.items()} | {name: after}
        output, after = scan(*(part(value, ids) for value in arguments), **own)
        found.append(output)
    assert torch.equal(torch.cat(found, 1), whole)
    assert torch.equal(after, states)


def test_what_a_compiled_step_does_not_support_is_computed_by_transformers():
    _, step, arguments, _ = _convolution(torch.float64, has_more=True)
    assert step(*arguments) is None
    _, step, arguments, _ = _convolution(torch.float32, has_more=True)
    assert step(*arguments[:-1], "gelu") is None


def test_a_step_takes_what_transformers_takes():
    for name, step in ours._STEPS.items():
        for module in (granite, mamba, qwen):
            if (own := getattr(module, name, None)) is not None:
                theirs, taken = signature(unwrap(own)).parameters, signature(step).parameters
                optional = [key for key, one in theirs.items() if one.default is not one.empty]
                assert not [key for key in optional if key in taken and taken[key].default is taken[key].empty]
