"""The numbers of tokens that steps with prompts compute.

oneDNN compiles its products anew for each number of rows, which takes up to 10 ms and 3 MB for a model of a few layers.
With few sizes all are compiled soon; a step with another number of tokens is padded to the next size, but one of a few
rows without prompts.
"""

_STEPS = ((128, 8), (512, 16))  # Sizes up to the first number are multiples of the second.
_LARGE_STEP = 32


def size_above(tokens: int) -> int:
    """The smallest size of at least `tokens`."""
    unit = _unit(tokens)
    return -(-tokens // unit) * unit


def size_below(tokens: int) -> int:
    """The largest size of at most `tokens`; 0 if there is none."""
    unit = _unit(tokens)
    return tokens // unit * unit


def _unit(tokens: int) -> int:
    return next((unit for largest, unit in _STEPS if tokens <= largest), _LARGE_STEP)
