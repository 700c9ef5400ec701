"""Colours are for terminals alone; control characters in foreign text do not reach a terminal."""

import io

import pytest

from headrace_runner.terminal import has_colours, one_line, printable


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
def test_colours_are_for_terminals_only(stream: io.StringIO, environment: dict[str, str], coloured: bool) -> None:
    assert has_colours(stream, environment) is coloured


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[2Jb\n\u200bé") == "a\\x1b[2Jb\n\\u200bé"
    assert one_line("two\nlines \x9b31m", 80) == "two lines \\x9b31m"
    assert one_line("abcdef", 4) == "abc…"
