"""Colours are for terminals alone, and for those who want them."""

from __future__ import annotations

import io

import pytest

from runner.report import has_colours


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "coloured"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False),
    ],
)
def test_colours(stream: io.StringIO, environment: dict[str, str], coloured: bool) -> None:
    assert has_colours(stream, environment) is coloured
