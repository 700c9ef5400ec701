"""How the HTTP server reads a request's head."""

import pytest

from headrace.rpc.http2.request import read_head


def head(*headers):
    return read_head([(name.encode(), value) for name, value in headers])


def test_metadata_are_all_headers_but_those_of_the_protocol():
    read = head((":method", b"POST"), (":path", b"/x"), ("te", b"trailers"), ("x-a", b"1"), ("x-a", b"2"))
    assert (read.verb, read.path, read.metadata) == ("POST", "/x", (("x-a", "1"), ("x-a", "2")))
    assert read.timeout_s is None


@pytest.mark.parametrize(("value", "text"), [("é".encode(), "é"), (b"\xe9", "é"), (b"\xff\xfe", "ÿþ")])
def test_a_value_that_is_not_utf_8_is_read_as_latin_1(value, text):
    assert dict(head(("x-a", value)).metadata) == {"x-a": text}


@pytest.mark.parametrize(
    ("value", "timeout_s"),
    [(b"100m", 0.1), (b"2S", 2), (b"1M", 60), (b"1H", 3600), (b"5u", 5e-6), (b"5n", 5e-9), (b"99999999m", 99999.999)],
)
def test_the_deadline_is_read_from_the_grpc_timeout_header(value, timeout_s):
    read = head(("grpc-timeout", value))
    assert read.timeout_s == pytest.approx(timeout_s)
    assert read.metadata == ()


@pytest.mark.parametrize("value", [b"", b"m", b"1", b"-1m", b"123456789m", b"1x", "\u0661m".encode()])
def test_a_malformed_deadline_is_ignored(value):
    assert head(("grpc-timeout", value)).timeout_s is None
