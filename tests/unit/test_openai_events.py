"""Stream events that are written from a template equal those of a JSON encoder."""

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_transformer.frontends.http import event
from headrace_transformer.frontends.openai.answers import ChatFormat, CompletionFormat
from headrace_transformer.frontends.openai.bodies import _Events
from headrace_transformer.frontends.openai.generation_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    StreamOptions,
)
from tests.support.text_chunks import text_chunk

HEAD = {"id": "cmpl-1", "created": 5, "model": 'a "model"', "object": "text_completion"}


@pytest.mark.parametrize(
    ("shape", "request_of"),
    [
        (CompletionFormat, CompletionRequest(prompt="p", stream=True)),
        (ChatFormat, ChatCompletionRequest(messages=[{"role": "user", "content": "Hello."}], stream=True)),
    ],
    ids=["completion", "chat"],
)
@pytest.mark.parametrize("includes_usage", [False, True], ids=["without usage", "with usage"])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1), index=st.integers(0, 3))
def test_an_event_with_only_text_equals_the_encoded_one(shape, request_of, includes_usage, text, index):
    request = request_of.model_copy(update={"stream_options": StreamOptions(include_usage=includes_usage)})
    written, usage = _Events(HEAD, request, shape(request), None), {"usage": None} if includes_usage else {}
    written.of(index, text_chunk("first", [1]))
    head = HEAD | {"object": shape.chunk_object}
    expected = event(head | {"choices": [shape(request).chunk(index, text_chunk(text, [1]), False)]} | usage)
    for _ in range(2):
        assert written.of(index, text_chunk(text, [1])) == expected
    assert orjson.loads(expected.removeprefix(b"data: "))["choices"][0]["index"] == index


def test_no_event_has_a_character_that_ends_a_line_elsewhere():
    text = "a\u2028b\u2029c\u0085d\x0b\x0c\x1cé\r\n"
    written = event({"type": "t", "x": text})
    assert len(written.decode().splitlines()) == 2
    assert json.loads(written.removeprefix(b"data: "))["x"] == text
