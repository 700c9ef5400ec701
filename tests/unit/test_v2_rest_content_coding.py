"""Compressed bodies: they decompress to the original, and no small body becomes a large one."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidRequestError, TooLargeError
from headrace_transformer.frontends.v2_rest import infer_body
from headrace_transformer.frontends.v2_rest.infer_body import inflated, is_small


@given(st.binary(max_size=4000))
def test_a_decompressed_body_equals_the_original(data):
    assert inflated(zlib.compress(data)) == data
    compressed = zlib.compress(data)
    assert is_small(compressed, 1000) == (max(len(data), len(compressed)) <= 1000)


def test_a_body_that_would_become_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(infer_body, "MAX_BYTES", 1000)
    assert len(inflated(zlib.compress(bytes(1000)))) == 1000
    with pytest.raises(TooLargeError, match="more than 1000 bytes"):
        inflated(zlib.compress(bytes(100_000)))


@pytest.mark.parametrize("data", [b"", b"{}", zlib.compress(b"abc" * 100)[:-5], zlib.compress(b"abc") + b"more"])
def test_a_body_in_another_coding_is_refused(data):
    with pytest.raises(InvalidRequestError, match="not compressed by deflate"):
        inflated(data)
