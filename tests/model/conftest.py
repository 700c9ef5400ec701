"""Engines with stand-ins for models."""

import pytest

from tests.model.fakes import engines


@pytest.fixture
def engine_of():
    with engines() as make:
        yield make
