"""The time of attention in one layer, by the compiled kernel on one thread: a long prompt in chunks, and decode steps.

Heads of 64 in bfloat16: 4 that each have their own keys and values, as in llama-10M, and 8 that share 2. Every case is
measured once in each round; figures are medians.

`python -m bench.attention` writes bench/results/attention.json; 1 minute.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import Tensor

from bench.runs import machine, parser, write
from headrace_predictor.engine.cpu import kernel
from headrace_predictor.engine.state.cache import BLOCK_TOKENS, CacheShape, KeyValueCache, array_of

_SIZE = 64
_HEADS = ((4, 4), (8, 2))  # Query heads, key heads.
_PROMPT = 2000
_CHUNKS = (64, 128, 256, 2000)
_DECODES = ((1, 100), (8, 100), (32, 100), (1, 1000), (8, 1000), (32, 1000))  # Sequences, tokens before each.
_REPEATS = 20  # Of a decode step in one measurement.


def main() -> None:
    options = parser(__doc__, "attention")
    options.add_argument("--rounds", type=int, default=9)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    measured: dict[str, list[float]] = defaultdict(list)
    cases = [case for heads in _HEADS for case in _cases(*heads)]
    for number in range(-1, arguments.rounds):
        for name, repeats, run in cases:
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            if number >= 0:  # The first round warms up.
                measured[name].append((time.perf_counter() - start) / repeats)
    report = {name: round(1e3 * median(times), 4) for name, times in measured.items()}
    for name, milliseconds in report.items():
        print(f"{name:50}{milliseconds:>10.3f} ms")
    write(arguments.out, {"machine": machine(), "rounds": arguments.rounds, "milliseconds": report})


def _cases(query_heads: int, key_heads: int) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Names, repeats and calls."""
    layer = f"{query_heads} heads / {key_heads}"
    sequences = max(count for count, _ in _DECODES)
    blocks = -(-(_PROMPT + 1) // BLOCK_TOKENS)
    shape = CacheShape(1, key_heads, _SIZE, torch.bfloat16)
    cache = KeyValueCache(shape, sequences * blocks + 1, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for pool in (*cache.keys, *cache.values):
        pool.copy_(torch.randn(pool.shape, generator=generator))
    # A sequence's blocks are rarely neighbours.
    table = torch.randperm(sequences * blocks, generator=generator).view(sequences, blocks).int() + 1
    packed = torch.randn(_PROMPT, query_heads + 2 * key_heads, _SIZE, generator=generator).bfloat16()
    angles = torch.rand(_PROMPT, _SIZE, generator=generator)
    cosines, sines = array_of(angles.cos().bfloat16()), array_of(angles.sin().bfloat16())
    attention = kernel.Attention(query_heads, _SIZE**-0.5)

    def attend(owners: Tensor, ends: Tensor) -> None:
        count = len(ends)
        ranges = kernel.Ranges.of(table, owners.int(), torch.zeros_like(ends).int(), ends.int())
        output = kernel.Buffer((count, query_heads, _SIZE), packed.dtype)
        attention(cache.arrays[0], ranges, packed[:count], output, (cosines[:count], sines[:count]))

    def prefill(chunk: int) -> None:
        for start in range(0, _PROMPT, chunk):
            ends = torch.arange(start, min(start + chunk, _PROMPT)) + 1
            attend(torch.zeros_like(ends), ends)

    def decode(count: int, context: int) -> None:
        attend(torch.arange(count), torch.full((count,), context + 1))

    for chunk in _CHUNKS:
        yield f"{layer}, {_PROMPT} tokens in chunks of {chunk}", 1, lambda chunk=chunk: prefill(chunk)
    for count, context in _DECODES:
        name = f"{layer}, {count} x 1 token after {context}"
        yield name, _REPEATS, lambda count=count, context=context: decode(count, context)


if __name__ == "__main__":
    main()
