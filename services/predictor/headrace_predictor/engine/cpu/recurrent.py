"""Steps of recurrent layers for all rows, and their passes of several ids, compiled for the CPU by Numba.

The formulas are those of transformers: `causal_conv1d_update`, `mamba2_selective_state_update` (Mamba 2),
`mamba_selective_state_update` (Mamba) and `torch_recurrent_gated_delta_rule`. Several ids are computed one by one: a
state that stays in the cache takes less time than transformers' products of chunks. Intermediate results are not
rounded to bfloat16. Rows are computed separately and always in the same order.

Tensors come as addresses, or as `places`: see `_at`. `inputs`, `parameters` and `stored` are empty arrays: their types
are those of the inputs and outputs, of the model's parameters, and of the states. A stride is in numbers; states,
parameters and outputs are contiguous. The states are changed in place.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from numba import njit, prange

from headrace_predictor.engine.cpu.compiled import OPTIONS, run_in_parallel
from headrace_predictor.engine.cpu.recording import launch
from headrace_predictor.engine.cpu.threads import kernel_threads
from headrace_predictor.engine.cpu.vectors import COEFFICIENTS, LOG2_E, array_at, narrow, widen

_ONE, _ZERO = np.float32(1), np.float32(0)
_LINEAR_FROM = np.float32(20)  # Of softplus, as in torch.
_NORM_EPSILON = np.float32(1e-6)  # Of the queries and keys of the delta rule.
# Of exp, as in vectors.py.
_LOG2_E, _LEAST, _MOST, _BIAS, _HALF = map(np.float32, (LOG2_E, -126.0, 127.0, 127.0, 0.5))
_C0, _C1, _C2, _C3, _C4, _C5, _ = map(np.float32, COEFFICIENTS)
_FEW = 1 << 17  # Numbers of states that one thread changes before others would have begun.
# Lanes may reorder a sum: the order then depends only on its length.
_OPTIONS = {**OPTIONS, "fastmath": {"reassoc", "contract", "nsz"}}


def run(kernel: Callable[..., None], numbers: int, *arguments: Any) -> None:
    """Runs a step that changes so many numbers of states: the same code for few as for many."""
    launch(partial(run_in_parallel, alone=numbers < _FEW), kernel, kernel_threads(), *arguments)


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _exp(x: Any) -> Any:
    """e^x, in a form that LLVM computes in vectors; at least 2^-126."""
    power = min(max(x * _LOG2_E, _LEAST), _MOST)
    exponent = np.int32(power + _BIAS + _HALF)
    rest = power - (np.float32(exponent) - _BIAS)
    series = ((((((_C0 * rest) + _C1) * rest + _C2) * rest + _C3) * rest + _C4) * rest + _C5) * rest + _ONE
    return series * widen(np.uint16(exponent << 7))


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _swish(x: Any) -> Any:
    return x / (_ONE + _exp(-x))


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _softplus(x: Any) -> Any:
    return x if x > _LINEAR_FROM else np.log1p(np.exp(x))


@cache
def convolution(taps: int) -> Callable[..., None]:
    """The step of a convolution of so many taps, for each channel on its own.

    Inputs and outputs are [rows, channels], states [rows, channels, taps], parameters [channels, taps] and [channels].
    """

    @njit(**_OPTIONS)  # type: ignore[untyped-decorator]
    def step(
        rows: Any,
        channels: Any,
        x: Any,
        stride: Any,
        states: Any,
        weights: Any,
        biases: Any,
        has_biases: Any,
        is_swish: Any,
        out: Any,
        inputs: Any,
    ) -> None:
        own_weights, own_biases = array_at(weights, (channels, taps), inputs), array_at(biases, (channels,), inputs)
        all_states = array_at(states, (rows, channels, taps), inputs)
        outputs = array_at(out, (rows, channels), inputs)
        for row in range(rows):
            state, output = all_states[row], outputs[row]
            new = array_at(x + row * stride * inputs.itemsize, (channels,), inputs)
            for c in range(channels):
                total = widen(new[c]) * widen(own_weights[c, taps - 1])
                for t in range(taps - 1):
                    total += widen(state[c, t + 1]) * widen(own_weights[c, t])
                    state[c, t] = state[c, t + 1]
                state[c, taps - 1] = new[c]
                if has_biases:
                    total += widen(own_biases[c])
                output[c] = narrow(_swish(total) if is_swish else total, new[c])

    return step  # type: ignore[no-any-return]


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _at(places: Any, number: Any, row: Any, id_: Any, like: Any) -> Any:
    """The address of a tensor's numbers for an id of a row; `places` int64 [tensors, 3]: address and both strides."""
    return places[number, 0] + (row * places[number, 1] + id_ * places[number, 2]) * like.itemsize


@njit(parallel=True, **_OPTIONS)  # type: ignore[untyped-decorator]
def state_space(
    shape: Any,
    places: Any,
    is_gated: Any,
    limits: Any,
    rates: Any,
    biases: Any,
    skip: Any,
    states: Any,
    out: Any,
    inputs: Any,
    parameters: Any,
    stored: Any,
    results: Any,
) -> None:
    """Mamba 2, whose heads have a decay each and share keys and queries in groups, for some ids of each row.

    `shape`: rows, ids, heads, groups, size, n. `places` of inputs [rows, ids, heads, size], time steps [rows, ids,
    heads], which `limits` bound, keys and queries [rows, ids, groups, n] and gates like inputs: with `is_gated` the
    outputs, like inputs in the type of `results`, are multiplied by their swish. States [rows, heads, size, n],
    parameters [heads], `rates` float32.
    """
    rows, ids, heads, groups, size, n = shape
    own_rates = array_at(rates, (heads,), np.empty(0, np.float32))
    own_biases, own_skip = array_at(biases, (heads,), parameters), array_at(skip, (heads,), parameters)
    all_states = array_at(states, (rows, heads, size, n), stored)
    outputs = array_at(out, (rows, ids, heads, size), results)
    for part in prange(rows * heads):
        row, head = part // heads, part % heads
        group = head // (heads // groups)
        for id_ in range(ids):
            new = array_at(_at(places, 0, row, id_, inputs), (heads, size), inputs)[head]
            time = array_at(_at(places, 1, row, id_, inputs), (heads,), inputs)[head]
            key = array_at(_at(places, 2, row, id_, inputs), (groups, n), inputs)[group]
            query = array_at(_at(places, 3, row, id_, inputs), (groups, n), inputs)[group]
            gate = array_at(_at(places, 4, row, id_, inputs), (heads, size), inputs)[head]
            delta = min(max(_softplus(widen(time) + widen(own_biases[head])), limits[0]), limits[1])
            decay = np.exp(delta * own_rates[head])
            for s in range(size):
                state, added, total = all_states[row, head, s], delta * widen(new[s]), _ZERO
                for i in range(n):
                    changed = widen(state[i]) * decay + added * widen(key[i])
                    state[i] = narrow(changed, state[i])
                    total += changed * widen(query[i])
                total += widen(new[s]) * widen(own_skip[head])
                total = total * _swish(widen(gate[s])) if is_gated else total
                outputs[row, id_, head, s] = narrow(total, outputs[row, id_, head, s])


@njit(parallel=True, **_OPTIONS)  # type: ignore[untyped-decorator]
def selective(
    shape: Any,
    places: Any,
    rates: Any,
    biases: Any,
    skip: Any,
    states: Any,
    out: Any,
    inputs: Any,
    parameters: Any,
    stored: Any,
) -> None:
    """The step of Mamba, whose channels have n decays each; the outputs are multiplied by the swish of the gates.

    `shape`: rows, channels, n. `places` of inputs and time steps [rows, channels], keys and queries [rows, n] and
    gates, like which outputs are, [rows, channels]. States [rows, channels, n], `rates` float32 [channels, n] and
    `biases` float32 [channels], `skip` [channels].
    """
    rows, channels, n = shape
    floats = np.empty(0, np.float32)
    own_rates, own_biases = array_at(rates, (channels, n), floats), array_at(biases, (channels,), floats)
    own_skip, outputs = array_at(skip, (channels,), parameters), array_at(out, (rows, channels), inputs)
    all_states = array_at(states, (rows, channels, n), stored)
    for part in prange(rows * channels):
        row, c = part // channels, part % channels
        new = widen(array_at(_at(places, 0, row, 0, inputs), (channels,), inputs)[c])
        time = array_at(_at(places, 1, row, 0, inputs), (channels,), inputs)[c]
        key = array_at(_at(places, 2, row, 0, inputs), (n,), inputs)
        query = array_at(_at(places, 3, row, 0, inputs), (n,), inputs)
        gate = widen(array_at(_at(places, 4, row, 0, inputs), (channels,), inputs)[c])
        delta = _softplus(widen(time) + own_biases[c])
        state, rate, added, total = all_states[row, c], own_rates[c], delta * new, new * widen(own_skip[c])
        for i in range(n):
            changed = widen(state[i]) * _exp(delta * rate[i]) + added * widen(key[i])
            state[i] = narrow(changed, state[i])
            total += changed * widen(query[i])
        outputs[row, c] = narrow(total * _swish(gate), time)


@njit(parallel=True, **_OPTIONS)  # type: ignore[untyped-decorator]
def delta_rule(shape: Any, places: Any, is_normed: Any, states: Any, out: Any, inputs: Any, stored: Any) -> None:
    """The gated delta rule for some ids of each row; heads of values share keys and queries in groups.

    `shape`: rows, ids, heads, key heads, n, size. `places` of queries and keys [rows, ids, key heads, n], values, like
    which outputs are, [rows, ids, heads, size], and of the logarithms of decays and the rates, float32 [rows, ids,
    heads]. States [rows, heads, n, size].
    """
    rows, ids, heads, key_heads, n, size = shape
    floats = np.empty(0, np.float32)
    all_states = array_at(states, (rows, heads, n, size), stored)
    outputs = array_at(out, (rows, ids, heads, size), inputs)
    for part in prange(rows * heads):
        row, head = part // heads, part % heads
        group = head // (heads // key_heads)
        state = all_states[row, head]
        for id_ in range(ids):
            query = array_at(_at(places, 0, row, id_, inputs), (key_heads, n), inputs)[group]
            key = array_at(_at(places, 1, row, id_, inputs), (key_heads, n), inputs)[group]
            value = array_at(_at(places, 2, row, id_, inputs), (heads, size), inputs)[head]
            decay = np.exp(array_at(_at(places, 3, row, id_, floats), (heads,), floats)[head])
            rate = array_at(_at(places, 4, row, id_, floats), (heads,), floats)[head]
            key_scale, query_scale = _ONE, _ONE / np.sqrt(np.float32(n))
            if is_normed:
                key_scale, query_scale = _inverse_length(key), query_scale * _inverse_length(query)
            change, total = np.zeros(size, np.float32), np.zeros(size, np.float32)
            for k in range(n):
                weight = widen(key[k]) * key_scale * decay
                for i in range(size):
                    change[i] += weight * widen(state[k, i])
            for i in range(size):
                change[i] = (widen(value[i]) - change[i]) * rate
            for k in range(n):
                weight, share = widen(key[k]) * key_scale, widen(query[k]) * query_scale
                for i in range(size):
                    changed = widen(state[k, i]) * decay + weight * change[i]
                    state[k, i] = narrow(changed, state[k, i])
                    total[i] += changed * share
            for i in range(size):
                outputs[row, id_, head, i] = narrow(total[i], value[i])


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _inverse_length(x: Any) -> Any:
    squares = _ZERO
    for i in range(len(x)):
        squares += widen(x[i]) * widen(x[i])
    return _ONE / np.sqrt(squares + _NORM_EPSILON)
