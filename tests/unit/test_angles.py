"""The rotary embedding's cosines and sines: right, and the same bits everywhere."""

import hashlib
import math

import numpy as np
import pytest

from headrace_predictor.engine.cpu.angles import cosines_and_sines, inverse_frequencies


@pytest.mark.parametrize(("theta", "first"), [(1e4, 0), (5e5, 3000), (1e6, 40_000), (1e6, 2**20 - 300)])
def test_they_are_right_to_the_last_place(theta, first):
    positions, frequencies = np.arange(first, first + 300), inverse_frequencies(theta, 64)
    angles = (positions[:, None].astype(np.float32) * frequencies).ravel().tolist()
    for results, exact in zip(cosines_and_sines(positions, frequencies), (math.cos, math.sin), strict=True):
        wanted = np.array([exact(angle) for angle in angles])
        assert (np.abs(results.ravel() - wanted) <= np.spacing(np.abs(wanted).astype(np.float32))).all()


def test_frequencies_are_the_powers():
    np.testing.assert_allclose(inverse_frequencies(1e6, 64), [1e6 ** (-i / 32) for i in range(32)], rtol=6e-8)


def test_they_are_the_same_everywhere():
    cosines, sines = cosines_and_sines(np.arange(2048), inverse_frequencies(1e6, 128), 0.9)
    assert hashlib.sha256(cosines.tobytes() + sines.tobytes()).hexdigest()[:16] == "748844a63ea3406c"
