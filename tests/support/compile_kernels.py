"""Compiles the Triton kernels for a GPU that need not be there: `python -m tests.support.compile_kernels 90 bf16`.

Prints a line for each kernel, with its bytes of code and of shared memory. Triton's interpreter accepts what its
compiler refuses.
"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headrace_predictor.engine.gpu import kernels, paged_attention

FLOATS = {"scale", "cap", "epsilon"}
ATTENTION = {
    "group": 2,
    "size": 128,
    "value_size": 128,
    "page": 32,
    "least_part": 256,
    "key_count": 32,
    "width": 128,
    "value_width": 128,
}


def cases(dtype):
    """Kernels with the types of their arguments, and their constants."""
    pointer = f"*{dtype}"
    attend = dict.fromkeys(("queries", "keys", "values", "sinks", "out"), pointer)
    attend |= dict.fromkeys(("table", "tiles", "firsts", "ends"), "*i32") | {"parts": "*fp32", "weights": "*fp32"}
    for rows, lanes, is_special in ((16, 16, True), (64, 1, False), (64, 1, True)):
        flags = {"has_tiles": lanes == 1, "has_cap": is_special, "has_sinks": is_special}
        yield paged_attention._attend, attend, ATTENTION | flags | {"tile_rows": rows, "lanes": lanes}
    joined = dict.fromkeys(("sinks", "out"), pointer) | {"parts": "*fp32", "weights": "*fp32"}
    for has_sinks in (True, False):
        yield (
            paged_attention._join,
            joined,
            {"value_size": 128, "lanes": 16, "value_width": 128, "has_sinks": has_sinks},
        )
    names = ("packed", "queries", "cosines", "sines", "query_norm", "key_norm", "keys", "values")
    turn = dict.fromkeys(names, pointer) | dict.fromkeys(("table", "owners", "ends"), "*i32")
    for has_norms in (True, False):
        constants = {"query_heads": 16, "key_heads": 8, "size": 128, "page": 32, "width": 128, "has_norms": has_norms}
        yield kernels._turn_and_store, turn | {"epsilon": "fp32"}, constants
    norm = dict.fromkeys(("hidden", "added", "weight", "total", "normed"), pointer) | {"epsilon": "fp32"}
    for adds in (True, False):
        yield kernels._add_norm, norm, {"size": 1024, "width": 1024, "adds": adds}
    yield kernels._gate, {"gate_up": pointer, "out": pointer}, {"width": 1024}
    for has_bias in (True, False):
        constants = {"tile_rows": 64, "tile_outputs": 32, "tile_inputs": 64, "has_bias": has_bias}
        yield kernels._linear, dict.fromkeys(("x", "weight", "bias", "out"), pointer), constants


def main(capability: int, dtypes: list[str]) -> None:
    for dtype in dtypes:
        for kernel, pointers, constants in cases(dtype):
            known = dict.fromkeys(constants, "constexpr") | pointers | dict.fromkeys(FLOATS, "fp32")
            signature = {name: known.get(name, "i32") for name in kernel.arg_names}
            source = ASTSource(
                kernel, signature, {(kernel.arg_names.index(name),): value for name, value in constants.items()}
            )
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
            print(kernel.__name__, dtype, len(compiled.asm["cubin"]), compiled.metadata.shared)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
