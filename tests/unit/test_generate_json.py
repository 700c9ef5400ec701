"""The JSON of a Generate by REST: it is read as the gRPC message, or refused."""

import json

import pytest

from headrace.errors import ContextLengthError, InvalidRequestError
from headrace_protos.headrace_pb2 import GenerateRequest
from headrace_transformer.frontends.grpc.generate_json import read_generate_request


def read(**fields):
    return read_generate_request(json.dumps({"model": "m", **fields}).encode())


def test_both_spellings_and_numbers_as_text_are_read():
    wanted = GenerateRequest(model="m", prompt="p", max_tokens=5, top_p=0.5, seed=2**64 - 1, stop=["a"])
    assert read(prompt="p", max_tokens=5, top_p=0.5, seed=2**64 - 1, stop=["a"], min_p=None) == wanted
    assert read(prompt="p", maxTokens="5", topP=0.5, seed=str(2**64 - 1), stop=["a"]) == wanted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"promt": "p"}, "unknown field 'promt'"),
        ({"messages": [{"role": "user", "contnet": "p"}]}, "contnet"),
        ({"temperature": True}, "temperature must be a number"),
        ({"topP": False}, "topP must be a number"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"max_tokens": 1, "maxTokens": 2}, "multiple"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"text": "p"}}, "prompt"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["a"] * 17}, "17 stop strings"),
        ({"messages": [{}] * 5000}, "5000 messages"),
    ],
)
def test_malformed_messages_are_refused(fields, message):
    with pytest.raises(InvalidRequestError, match=message):
        read(**fields)


def test_a_body_larger_than_any_prompt_is_not_parsed():
    with pytest.raises(ContextLengthError, match="more than any prompt"):
        read_generate_request(b" " * (8 * 1024 * 1024 + 1))
