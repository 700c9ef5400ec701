"""Compiles the Triton kernels for a GPU that need not be there: `python -m tests.support.compile_kernels 90 bf16`.

Prints a line for each kernel, with FULL=1 for each of its forms, with its bytes of code and of shared memory. Triton's
interpreter accepts what its compiler refuses.
"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headrace_predictor.engine.gpu import kernels, paged_attention
from tests.support.full import FULL

FLOATS = {"scale", "cap", "epsilon"}
SIZES = {("i32", name) for name in ("block_size", "outputs", "inputs", "size")}
ATTENTION = {"group": 2, "size": 128, "value_size": 128, "page": 32, "width": 128, "value_width": 128}
ATTENTION["by_position"] = False
LINEAR = ("tile_rows", "tile_outputs", "tile_inputs", "num_stages")


def cases(dtype):
    """Kernels with the types of their arguments, and their constants."""
    pointer = f"*{dtype}"
    attend = dict.fromkeys(("queries", "keys", "values", "sinks"), pointer) | {"totals": "*fp32"}
    attend |= dict.fromkeys(("table", "owners", "tiles", "firsts", "ends"), "*i32") | {"bias": "*fp32"}
    for rows, lanes, left_out in ((64, 1, {}), (64, 1, {"sinks": None, "bias": None}), (16, 16, {})):
        own = attend | {"out": pointer if lanes == 1 else "*fp32"}
        yield paged_attention._attend, own, ATTENTION | left_out | {"tile_rows": rows, "lanes": lanes}
    joined = {"parts": "*fp32", "totals": "*fp32", "out": pointer}
    yield paged_attention._join, joined, {"value_size": 128, "lanes": 16, "value_width": 128}
    names = ("packed", "queries", "cosines", "sines", "norms", "keys", "values")
    turn = dict.fromkeys(names, pointer) | dict.fromkeys(("table", "owners", "ends"), "*i32")
    for norms in ({}, {"norms": None}):
        constants = {"query_heads": 16, "key_heads": 8, "size": 128, "page": 32, "width": 128} | norms
        yield kernels._turn_and_store, turn, constants
    yield kernels._gate, {"gate_up": pointer, "out": pointer}, {"width": 1024}
    linear = dict.fromkeys(("x", "weight", "bias", "out"), pointer)
    for tile in (kernels._FEW_ROWS_TILE, kernels._INT8_TILE):
        constants = dict(zip(LINEAR, tile, strict=True)) | {"adds": False}
        yield kernels._linear, linear | {"weight": "*i8", "scales": "*fp32"}, constants
    for left_out in ({"scales": None, "adds": False}, {"scales": None, "bias": None, "adds": True}):
        yield kernels._linear, linear, dict(zip(LINEAR, kernels._FLOAT_TILE, strict=True)) | left_out


def main(capability: int, dtypes: list[str]) -> None:
    for dtype in dtypes:
        done = set()
        for kernel, pointers, constants in cases(dtype):
            form = kernel.__name__, constants.get("lanes"), constants.get("tile_outputs")
            if form in done and not FULL:
                continue
            done.add(form)
            options = {"num_stages": constants.pop("num_stages", 3)}
            known = pointers | dict.fromkeys(FLOATS, "fp32") | dict.fromkeys(constants, "constexpr")
            signature = {name: known.get(name, "i32") for name in kernel.arg_names}
            places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
            # Addresses and sizes are multiples of 16, as in a launch: so several blocks are loaded ahead.
            aligned = [name for name, kind in signature.items() if kind[0] == "*" or (kind, name) in SIZES]
            source = ASTSource(
                kernel,
                signature,
                {places[name]: value for name, value in constants.items()},
                {places[name]: [["tt.divisibility", 16]] for name in aligned},
            )
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            print(kernel.__name__, dtype, len(compiled.asm["cubin"]), compiled.metadata.shared)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
