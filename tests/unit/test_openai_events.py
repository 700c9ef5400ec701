"""Stream events that are written from a template equal those of a JSON encoder."""

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_transformer.frontends.http import event
from headrace_transformer.frontends.openai.answers import ChatFormat, CompletionFormat
from headrace_transformer.frontends.openai.bodies import _PlainEvents
from headrace_transformer.generation.chunks import TextChunk

HEAD = {"id": "cmpl-1", "created": 5, "model": 'a "model"', "object": "text_completion"}


@pytest.mark.parametrize("shape", [CompletionFormat(), ChatFormat()], ids=["completion", "chat"])
@pytest.mark.parametrize("usage", [{}, {"usage": None}], ids=["without usage", "with usage"])
@given(text=st.text(st.characters(exclude_categories=["Cs"])), index=st.integers(0, 3))
def test_an_event_with_only_text_equals_the_encoded_one(shape, usage, text, index):
    plain = _PlainEvents(HEAD, usage, shape)
    expected = event(HEAD | {"choices": [shape.chunk(index, TextChunk(text, [1], [], []), False)]} | usage)
    for _ in range(2):
        written = plain.event(index, text)
        assert written == expected
    assert orjson.loads(written.removeprefix(b"data: "))["choices"][0]["index"] == index


def test_no_event_has_a_character_that_ends_a_line_elsewhere():
    text = "a\u2028b\u2029c\u0085d\x0b\x0c\x1cé\r\n"
    written = event({"type": "t", "x": text})
    assert len(written.decode().splitlines()) == 2
    assert json.loads(written.removeprefix(b"data: "))["x"] == text
