"""Whether the tests run in their long form, as `make test-all` runs them; and which of their cases they have else."""

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

FULL = os.environ.get("FULL") == "1"


def usually(usual: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The parameters of a test: of `cases` those that are not in `usual` run with FULL=1 only."""
    return [pytest.param(case, marks=() if case in usual else pytest.mark.full) for case in cases]
