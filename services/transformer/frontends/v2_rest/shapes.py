"""The shape of an input of which a request tells no more than its elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

from millrace.errors import InvalidRequestError


def fitted_shape(name: str, declared: Sequence[int], count: int) -> tuple[int, ...]:
    """The shape in which `count` elements fill what a model says of an input; raises InvalidRequestError.

    Of the sizes that are open (-1) the innermost takes what is left, the others are 1, as Triton has it.
    """
    shape = list(declared)
    is_open = [index for index, size in enumerate(shape) if size < 0]
    if is_open:
        fixed = math.prod(size for size in shape if size >= 0)
        for index in is_open:
            shape[index] = 1
        shape[is_open[-1]] = count // fixed if fixed else 0
    if math.prod(shape) != count:
        raise InvalidRequestError(f"input {name!r}: {count} elements do not fill the shape {list(declared)}")
    return tuple(shape)
