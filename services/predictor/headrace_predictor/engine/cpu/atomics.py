"""Atomic operations on int64 arrays, and waiting, for compiled code that several threads run at once.

All are sequentially consistent: a thread that counts itself into a slot and then reads which pass is the latest needs
both in this order, also on processors whose loads may overtake earlier stores (Arm).
"""

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_SIZE = ir.IntType(64)
_INT = ir.IntType(32)
_ORDER = "seq_cst"
_PAUSES = {"x86_64": ("llvm.x86.sse2.pause", []), "aarch64": ("llvm.aarch64.hint", [ir.Constant(_INT, 1)])}


def _place(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """A pointer to the number at an index of an array."""
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])


@intrinsic  # type: ignore[untyped-decorator]
def add_to(typing_context: Any, array: Any, index: Any) -> Any:
    """Adds 1 to a number; returns what it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _place(context, builder, signature, arguments), _SIZE(1), _ORDER)

    return types.int64(array, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def subtract_from(typing_context: Any, array: Any, index: Any) -> Any:
    """Subtracts 1 from a number; returns what it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("sub", _place(context, builder, signature, arguments), _SIZE(1), _ORDER)

    return types.int64(array, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def read(typing_context: Any, array: Any, index: Any) -> Any:
    """A number, which another thread may have written."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_place(context, builder, signature, arguments), _ORDER, 8)

    return types.int64(array, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def publish(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Writes a number; who reads it also sees what was written before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[2], _place(context, builder, signature, arguments), _ORDER, 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def pause(typing_context: Any) -> Any:
    """Lets a waiting core rest for some nanoseconds."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if known := _PAUSES.get(platform.machine()):
            name, values = known
            kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def give_way(typing_context: Any) -> Any:
    """Lets another thread run on this core, if one waits for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_INT, [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate
