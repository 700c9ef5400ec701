"""The shape of an input of which a request tells no more than its elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

from millrace.errors import InvalidRequestError


def fitted_shape(name: str, declared: Sequence[int], count: int) -> tuple[int, ...]:
    """The shape of `count` elements for an input of a model; raises InvalidRequestError.

    Of the variable sizes (-1) the innermost takes the rest, the others are 1, as in Triton.
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
