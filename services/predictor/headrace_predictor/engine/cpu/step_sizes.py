"""The numbers of tokens that steps with prompts or proposals have: few, so that measured durations say more."""

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
