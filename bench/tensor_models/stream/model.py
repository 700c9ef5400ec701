"""A decoupled model: 64 answers to each request, the n-th with the number n."""

import numpy as np


async def execute(request):
    for number in range(64):
        yield {"n": np.array([number])}
