"""A pass of a gated decoder (Llama, Mistral, Qwen) over streamed weights, as one compiled program for several threads.

A pass is a row of phases, each of which is divided into chunks. Every thread takes the next chunk of the first phase
that is not done; a phase begins when the one before it is done. So a thread that comes late or is held up by another
process costs no more than its chunk. A chunk's numbers depend neither on the thread nor on the division.

A thread may be late by some passes. It then reads only what a slot has itself: all that addresses point to may be gone.

`state`, int64, is what the threads share: the number of the latest pass, whether another one may come soon, and the
slots of the latest passes. A slot has the number of threads inside, the kind of the pass, its parameters and, for each
phase, the number of chunks that were taken and that are done, each on a cache line of its own.

Hidden states, and all numbers between the products, are float32.
"""

from typing import Any

import numpy as np
from numba import njit

from headrace_predictor.engine.cpu.atomics import add_to, give_way, pause, publish, read, subtract_from
from headrace_predictor.engine.cpu.attention import attend_tile, write_tokens
from headrace_predictor.engine.cpu.compiled import OPTIONS
from headrace_predictor.engine.cpu.formats import convert_row, is_bf16, is_fp32, is_grouped, is_int4
from headrace_predictor.engine.cpu.grouped import BLOCK, GROUP, HALF, PANEL
from headrace_predictor.engine.cpu.pairs import TILES_ROWS, product_type
from headrace_predictor.engine.cpu.products import multiply, rows_at_once
from headrace_predictor.engine.cpu.vectors import add_squares, array_at, swish_times

_LINE = 8  # Numbers of a cache line.
_LATEST, _OPEN, _SLOTS = 0, _LINE, 2 * _LINE
_SLOT_COUNT = 4
_INSIDE, _KIND, _PARAMETERS, _COUNTERS = 0, _LINE, 2 * _LINE, 8 * _LINE
# Kinds of passes, by their first phase: all layers; one product; a layer's attention; the final norm and the head.
DECODER, LINEAR, HEADS, LAST = -1, 12, 2, 10

# Phases: ten of each layer, the two that end a decoder's pass, and those of one product.
_LAYER_PHASES = 10
_NORM, _PROJECT, _WRITE, _ATTEND, _CONVERT_HEADS, _PUT_OUT, _NORM_AGAIN, _OPEN_GATE, _CONVERT_INNER, _CLOSE = range(10)
_LAST_NORM, _HEAD, _CONVERT, MULTIPLY = range(_LAYER_PHASES, _LAYER_PHASES + 4)

# Parameters of a pass: numbers, then addresses.
TOKENS, SAMPLED, PARTS, SEQUENCES, WIDTH = range(5)
HIDDEN, PACKED, ATTENDED, INNER, INPUTS, SCALES, SUMS, COSINES, SINES = range(5, 14)
TABLE, OWNERS, ENDS, PLACES, LOGITS, PARTITION = range(14, 20)
PRODUCT = 20  # The numbers of a LINEAR pass's product, or the index of a HEADS pass's layer.
FIRSTS = 28
REACHES = 8  # Addresses from FIRSTS on: one for each reach that layers have.

# Numbers of a layer: four products, addresses of norms' weights (0: none), index and reach. The last layer is the final
# norm, as the first norm, and the head, as the first product. WEIGHTS of grouped weights is the address of a table:
# for each panel its address, its kind and the bytes of a block.
_PRODUCT_NUMBERS = 8
WEIGHTS, CHANNEL_SCALES, BIAS, PANELS, BLOCKS, PANEL_BYTES, OUTPUTS, ROW = range(_PRODUCT_NUMBERS)
QKV, OUTPUT, GATE_UP, DOWN = range(0, 4 * _PRODUCT_NUMBERS, _PRODUCT_NUMBERS)
FIRST_NORM, SECOND_NORM, QUERY_NORM, KEY_NORM, LAYER, REACH, LAYER_NUMBERS = range(32, 39)

EPSILON, SCORE_SCALE = 0, 1  # Numbers of the model, float32.
MODEL_SIZE, QUERY_HEADS, KEY_HEADS, HEAD_SIZE, THREADS = range(5)  # Sizes of the model, int64.

_FEW_TOKENS, _ROWS_OF_CHUNK = 16, 32  # More tokens are prepared by so many in a chunk.
_TOKENS_OF_CHUNK, _MOST_TOKENS = 64, 256  # Of a product: the second where threads have panels of their own.
ROW_GAP = 64  # Bytes between rows of inputs: at a multiple of 4096 they would share a few lines of the cache.
# The part of a panel that stays in a cache while rows are computed: in the second one for few rows, else in the first.
_BLOCKS_AT_ONCE, _BYTES_AT_ONCE = 16, 1 << 15
_CHUNK_BYTES = 1 << 20
_CHUNKS_OF_THREAD = 2
_PANELS_OF_THREAD = 8
_PAUSES = 256

_F, _I, _L, _B = np.empty(0, np.float32), np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.uint8)


# Inlined, as are the large phases: LLVM compiles a function by itself, and once more with each one that calls it.
_attend_tile = njit(inline="always", **OPTIONS)(attend_tile.py_func)


def state_of(layers: int) -> Any:
    """The memory that threads share for a model of so many layers."""
    slot = _COUNTERS + 2 * _LINE * (_LAYER_PHASES * layers + 2)
    return np.zeros(_SLOTS + _SLOT_COUNT * slot, np.int64)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def begin_pass(state: Any, kind: Any, parameters: Any) -> Any:
    """Lets threads join a pass; returns its number. For one caller at a time."""
    number = state[_LATEST] + 1
    slot = _slot(state, number)
    _wait(slot, _INSIDE, 0)
    slot[_COUNTERS:] = 0
    slot[_KIND] = kind
    for i in range(len(parameters)):
        slot[_PARAMETERS + i] = parameters[i]
    publish(state, _LATEST, number)
    return number


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def open_passes(state: Any, is_open: Any) -> None:
    """Says whether passes come soon, so that threads wait for them without sleeping."""
    publish(state, _OPEN, is_open)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def take_part(state: Any, number: Any, model: Any) -> None:
    """Computes in the pass of this number until it is done; with number 0 in every pass until none comes soon.

    `model`: layers [layers + 1, LAYER_NUMBERS], sizes, numbers, an empty array of the format's type, and the cache's
    keys and values.
    """
    layers, done, turns = model[0], np.int64(0), 0
    while number or read(state, _OPEN):
        own = number or read(state, _LATEST)
        if own == done:
            pause()
            turns += 1
            if turns % _PAUSES == 0:
                give_way()
            continue
        slot = _slot(state, own)
        add_to(slot, _INSIDE)
        # If it is not the latest any more, its slot may have been given away before this thread was inside.
        if read(state, _LATEST) == own:
            done, counter = own, np.int64(_COUNTERS)  # A literal would compile all of it once more.
            is_whole = slot[_KIND] == DECODER
            in_layers = _LAYER_PHASES * (len(layers) - 1) if is_whole else 0
            first = LAST if is_whole else slot[_KIND]
            last = slot[_PARAMETERS + PRODUCT] if first == HEADS else len(layers) - 1
            for place in range(in_layers + 2):  # One call, which is inlined: so LLVM compiles all that it calls once.
                layer, phase = place // _LAYER_PHASES, place % _LAYER_PHASES
                if place >= in_layers:
                    layer, phase = last, first + place - in_layers
                counter = _take(slot, counter, phase, layers[layer], model)
        subtract_from(slot, _INSIDE)
        if number:
            break


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _slot(state: Any, number: Any) -> Any:
    size = (len(state) - _SLOTS) // _SLOT_COUNT
    first = _SLOTS + number % _SLOT_COUNT * size
    return state[first : first + size]


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _wait(slot: Any, counter: Any, wanted: Any) -> None:
    turns = 0
    while read(slot, counter) != wanted:
        pause()
        turns += 1
        if turns % _PAUSES == 0:
            give_way()


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def _take(slot: Any, counter: Any, phase: Any, layer: Any, model: Any) -> Any:
    """Computes chunks of a phase while there are any, waits for other threads'; returns the next phase's counter."""
    parameters, threads = slot[_PARAMETERS:_COUNTERS], model[1][THREADS]
    tokens = parameters[SAMPLED] if phase in (_LAST_NORM, _HEAD) else parameters[TOKENS]
    product = _product(phase, parameters, layer)
    divisions = together = most = 1
    if phase == _ATTEND:
        chunks = parameters[PARTS]
    elif _is_product(phase):
        together, most = sizes_of_chunk(product, tokens, threads, phase == _OPEN_GATE)
        divisions = (tokens + most - 1) // most
        chunks = (product[PANELS] + together - 1) // together * divisions
    else:
        together = 1 if tokens <= _FEW_TOKENS else _ROWS_OF_CHUNK
        chunks = (tokens + together - 1) // together
    while read(slot, counter) < chunks:
        chunk = add_to(slot, counter)
        if chunk >= chunks:
            break
        if phase == _ATTEND:
            _attend(chunk, parameters, layer, model)
        elif _is_product(phase):
            panel, token = chunk // divisions * together, chunk % divisions * most
            panels, tokens_end = min(panel + together, product[PANELS]), min(token + most, tokens)
            multiply_panels(phase, product, panel, panels, token, tokens_end, parameters, model[3])
        else:
            for token in range(chunk * together, min((chunk + 1) * together, tokens)):
                if phase == _WRITE:
                    _write(token, parameters, layer, model)
                else:
                    _prepare(phase, token, tokens, product, parameters, layer, model)
        add_to(slot, counter + _LINE)
    _wait(slot, counter + _LINE, chunks)
    return counter + 2 * _LINE


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _is_product(phase: Any) -> Any:
    return phase in (_PROJECT, _PUT_OUT, _OPEN_GATE, _CLOSE, _HEAD, MULTIPLY)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _product(phase: Any, parameters: Any, layer: Any) -> Any:
    """The numbers of the product that a phase computes or prepares."""
    if phase in (_CONVERT, MULTIPLY):
        return parameters[PRODUCT : PRODUCT + _PRODUCT_NUMBERS]
    first = QKV
    if phase in (_CONVERT_HEADS, _PUT_OUT):
        first = OUTPUT
    elif phase in (_NORM_AGAIN, _OPEN_GATE):
        first = GATE_UP
    elif phase in (_CONVERT_INNER, _CLOSE):
        first = DOWN
    return layer[first : first + _PRODUCT_NUMBERS]


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def sizes_of_chunk(product: Any, tokens: Any, threads: Any, in_pairs: Any) -> Any:
    """Panels and tokens: enough to be worth the claim, and few enough that every thread has some.

    A panel that all tokens read in one chunk comes from memory once, and for one thread.
    """
    most = _CHUNK_BYTES // product[PANEL_BYTES] if tokens <= _TOKENS_OF_CHUNK else 1
    together = max(1, min(most, product[PANELS] // (_CHUNKS_OF_THREAD * threads)))
    has_many = product[PANELS] >= _PANELS_OF_THREAD * threads
    return together + together % 2 if in_pairs else together, _MOST_TOKENS if has_many else _TOKENS_OF_CHUNK


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _prepare(phase: Any, token: Any, tokens: Any, product: Any, parameters: Any, layer: Any, model: Any) -> None:
    """Norms a token's numbers, if the phase does, and converts them to the inputs of its product."""
    numbers, marker, size = model[2], model[3], product[ROW]
    if phase == _CONVERT_HEADS:
        row = array_at(parameters[ATTENDED] + token * size * 4, (size,), _F)
    elif phase == _CONVERT_INNER:
        row = array_at(parameters[INNER] + token * size * 4, (size,), _F)
    elif phase == _CONVERT:
        row = array_at(parameters[HIDDEN] + token * size * 4, (size,), _F)
    else:
        place = array_at(parameters[PLACES], (tokens,), _L)[token] if phase == _LAST_NORM else token
        row = np.empty(size, np.float32)
        weight = array_at(layer[SECOND_NORM] if phase == _NORM_AGAIN else layer[FIRST_NORM], (size,), _F)
        norm_row(array_at(parameters[HIDDEN] + place * size * 4, (size,), _F), weight, numbers[EPSILON], row)
    convert_inputs(token, row, product, parameters, marker)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def convert_inputs(token: Any, row: Any, product: Any, parameters: Any, marker: Any) -> None:
    """Converts a token's row of float32 numbers to the inputs of a product."""
    blocks = product[BLOCKS]
    inputs, sums = _strides(marker, product)
    convert_row(
        marker,
        row,
        array_at(parameters[INPUTS] + token * inputs, (inputs - ROW_GAP,), _B),
        array_at(parameters[SCALES] + token * blocks * 4, (blocks,), _F),
        array_at(parameters[SUMS] + token * sums, (sums // 4,), _I),
    )


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _strides(marker: Any, product: Any) -> Any:
    """The bytes of a row's inputs and of its sums."""
    has_groups = is_int4(marker) and product[CHANNEL_SCALES] == 0
    inputs = product[BLOCKS] * block_bytes(marker) + ROW_GAP
    return inputs, product[BLOCKS] * 4 * (BLOCK // HALF if is_grouped(marker) else BLOCK // GROUP if has_groups else 1)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def block_bytes(marker: Any) -> Any:
    """The bytes of a row's inputs in a block."""
    return BLOCK * (4 if is_fp32(marker) else 2 if is_bf16(marker) else 1)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def norm_row(x: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """The root mean square norm of x [n] times weight [n] to out [n], which may be x; float32, n a multiple of 16."""
    inverse = np.float32(1) / np.sqrt(add_squares(x) / np.float32(len(x)) + epsilon)
    for d in range(len(x)):
        out[d] = x[d] * inverse * weight[d]


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def norm_rows(x: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """`norm_row` for rows [T, n]; `weight` is an address."""
    for i in range(len(x)):
        norm_row(x[i], array_at(weight, (x.shape[1],), _F), epsilon, out[i])


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def swish_rows(gates: Any, ups: Any, out: Any) -> None:
    """`swish_times` for rows [T, n]."""
    for i in range(len(out)):
        swish_times(gates[i], ups[i], out[i])


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def multiply_panels(
    phase: Any, product: Any, panel: Any, panels: Any, first: Any, end: Any, parameters: Any, marker: Any
) -> None:
    """Multiplies tokens `first` to `end` with panels `panel` to `panels`, and puts the results where they belong."""
    blocks = product[BLOCKS]
    inputs, sums = _strides(marker, product)
    rows = rows_at_once(marker)
    results = np.zeros((panels - panel, end - first, PANEL), np.float32)
    # Nothing interrupts the reading of the weights.
    for p in range(panel, panels):
        kind, weight_bytes = np.int64(product[CHANNEL_SCALES] != 0), product[PANEL_BYTES] // blocks
        at = product[WEIGHTS] + p * product[PANEL_BYTES]
        if is_grouped(marker):
            entry = array_at(product[WEIGHTS] + p * 3 * 8, (3,), _L)
            at, kind, weight_bytes = entry[0], entry[1], entry[2]
        at_once = max(1, _BYTES_AT_ONCE // weight_bytes) if end - first > TILES_ROWS else _BLOCKS_AT_ONCE
        for block in range(0, blocks, at_once):
            for token in range(first, end, rows):
                multiply(
                    marker,
                    kind,
                    min(rows, end - token),
                    at + block * weight_bytes,
                    parameters[INPUTS] + token * inputs + block * block_bytes(marker),
                    inputs,
                    parameters[SCALES] + (token * blocks + block) * 4,
                    parameters[SUMS] + token * sums + block * (sums // blocks),
                    sums,
                    min(at_once, blocks - block),
                    results.ctypes.data + ((p - panel) * (end - first) + token - first) * PANEL * 4,
                )
    for p in range(panel, panels):
        if product[CHANNEL_SCALES]:
            scales = array_at(product[CHANNEL_SCALES] + p * PANEL * 4, (PANEL,), _F)
            for i in range(end - first):
                for n in range(PANEL):
                    results[p - panel, i, n] *= scales[n]
        if phase != _OPEN_GATE:
            _put(phase, product, p * PANEL, first, results[p - panel], parameters)
        elif p % 2:
            for i in range(end - first):
                swish_times(results[p - panel - 1, i], results[p - panel, i], results[p - panel, i])
            _put(phase, product, p // 2 * PANEL, first, results[p - panel], parameters)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _put(phase: Any, product: Any, column: Any, first: Any, results: Any, parameters: Any) -> None:
    """Adds the bias to results [tokens, PANEL], and puts them at a column of the target, or adds them to it."""
    outputs = product[OUTPUTS]
    width = min(PANEL, outputs - column)
    adds = phase in (_PUT_OUT, _CLOSE)
    target = parameters[HIDDEN] if adds else parameters[LOGITS] if phase == _HEAD else parameters[PACKED]
    if phase == _OPEN_GATE:
        target = parameters[INNER]
    for i in range(len(results)):
        if product[BIAS]:
            bias = array_at(product[BIAS] + column * 4, (width,), _F)
            for n in range(width):
                results[i, n] += bias[n]
        out = array_at(target + ((first + i) * outputs + column) * 4, (width,), _F)
        for n in range(width):
            out[n] = results[i, n] + out[n] if adds else results[i, n]


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _write(token: Any, parameters: Any, layer: Any, model: Any) -> None:
    """Norms a token's heads, if the model does, and writes its keys and values to the cache."""
    _, sizes, numbers, _, keys, values = model
    query_heads, size = sizes[QUERY_HEADS], sizes[HEAD_SIZE]
    heads = query_heads + 2 * sizes[KEY_HEADS]
    packed = array_at(parameters[PACKED] + token * heads * size * 4, (1, heads * size), _F)
    for h in range(query_heads + sizes[KEY_HEADS]):
        norm = layer[QUERY_NORM] if h < query_heads else layer[KEY_NORM]
        if norm:
            head = packed[0, h * size : (h + 1) * size]
            norm_row(head, array_at(norm, (size,), _F), numbers[EPSILON], head)
    cosines = array_at(parameters[COSINES] + token * size * 4, (1, size), _F)
    sines = array_at(parameters[SINES] + token * size * 4, (1, size), _F)
    table = array_at(parameters[TABLE], (parameters[SEQUENCES], parameters[WIDTH]), _I)
    owners = array_at(parameters[OWNERS] + token * 4, (1,), _I)
    ends = array_at(parameters[ENDS] + token * 4, (1,), _I)
    slot = 2 * layer[LAYER]  # Of a cache of equal layers: the values' is the next.
    write_tokens(packed, cosines, sines, keys, values, slot, slot + 1, table, owners, ends, query_heads)


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def _attend(chunk: Any, parameters: Any, layer: Any, model: Any) -> None:
    """Attends for a part of the step's tokens and heads: see `parts` in attention.py."""
    _, sizes, numbers, marker, keys, values = model
    query_heads, size = sizes[QUERY_HEADS], sizes[HEAD_SIZE]
    heads = query_heads + 2 * sizes[KEY_HEADS]
    part = array_at(parameters[PARTITION] + chunk * 4 * 8, (4,), _L)
    first, count = part[0], part[1] - part[0]
    owner = array_at(parameters[OWNERS], (parameters[TOKENS],), _I)[first]
    _attend_tile(
        array_at(parameters[PACKED] + first * heads * size * 4, (count, heads * size), _F),
        array_at(parameters[COSINES] + first * size * 4, (count, size), _F),
        array_at(parameters[SINES] + first * size * 4, (count, size), _F),
        keys,
        values,
        2 * layer[LAYER],
        2 * layer[LAYER] + 1,
        array_at(parameters[TABLE] + owner * parameters[WIDTH] * 4, (parameters[WIDTH],), _I),
        array_at(parameters[FIRSTS + layer[REACH]] + first * 4, (count,), _I),
        array_at(parameters[ENDS] + first * 4, (count,), _I),
        numbers[SCORE_SCALE],
        np.float32(0),
        array_at(0, (query_heads, 0), _F),
        False,
        _F,
        array_at(parameters[ATTENDED] + first * query_heads * size * 4, (count, query_heads, size), _F),
        part[2:],
        product_type(marker, keys),
    )
