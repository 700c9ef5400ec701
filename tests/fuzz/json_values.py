"""Wrong JSON: values as raw text, since a JSON library would not write most of it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from random import Random

from tests.fuzz.case import Case, HttpCall

Wrong = Callable[[Random], str]

TIMEOUTS = ("abc", "-1", "0", "1e3", "1.5", "123456789", "٣", "1 2")


def one_of(*texts: str) -> Wrong:
    return lambda random: random.choice(texts)


def whole(low: int, high: int) -> Wrong:
    return lambda random: str(random.randint(low, high))


def real(low: float, high: float) -> Wrong:
    return lambda random: repr(random.uniform(low, high))


def either(*makers: Wrong) -> Wrong:
    return lambda random: random.choice(makers)(random)


def nested(random: Random) -> str:
    """Deeply nested lists or objects."""
    depth = random.choice((40, 200, 900, 1100, 5000))
    return "[" * depth + "]" * depth if random.random() < 0.5 else '{"a":' * depth + "1" + "}" * depth


NO_NUMBER = one_of('"hot"', "[]", "{}", "[1]", "true", '"1,5"', '""', '{"a":1}')
NO_WHOLE = either(NO_NUMBER, one_of("1.5", '"1.5"', "NaN", "1e999", "-1e999"), nested)
NO_REAL = either(NO_NUMBER, one_of("NaN", "Infinity", "-Infinity", "1e999", '"NaN"', '"inf"', "1e308"), nested)
NO_TRUTH = either(one_of("2", '"maybe"', "[]", "{}", "-1", "0.5"), nested)
NO_TEXT = either(one_of("5", "1.5", "true", "[]", "{}", "[1]", '{"a":"b"}', '["a"]'), nested)
NO_OBJECT = one_of("5", "true", "[]", "[1]", '"x"', "1.5", '""')
HUGE = whole(2**64, 2**200)

# Wrong values of the sampling parameters of every front end.
SAMPLING: Mapping[str, Wrong] = {
    "temperature": either(NO_REAL, real(-1e6, -1e-3), real(100.1, 1e9)),
    "top_p": either(NO_REAL, real(-5, 0), real(1.0001, 9)),
    "top_k": either(NO_WHOLE, whole(-(2**63), -2)),
    "min_p": either(NO_REAL, real(-9, -1e-6), real(1.0001, 9)),
    "max_tokens": either(NO_WHOLE, whole(-(2**63), 0), whole(1025, 2**40), HUGE),
    "min_tokens": either(NO_WHOLE, whole(-(2**63), -1), whole(2000, 2**40)),
    "seed": either(NO_WHOLE, HUGE, whole(-(2**100), -(2**63) - 1)),
    "repetition_penalty": either(NO_REAL, real(-9, 0.009), real(100.1, 1e6)),
    "presence_penalty": either(NO_REAL, real(100.1, 1e6), real(-1e6, -100.1)),
    "frequency_penalty": either(NO_REAL, real(100.1, 1e6), real(-1e6, -100.1)),
    "stop_token_ids": one_of("[-1]", "[2147483648]", "[99999]", "{}", "[1.5]", '"x"', json.dumps([1] * 65), "[true]"),
    "logit_bias": one_of(
        "[]", "5", '{"x":1}', '{"5":101}', '{"5":true}', '{"5":{}}', '{"-1":1}', '{"99999":1}', '"{5"'
    ),
    "allowed_token_ids": one_of("[-1]", "[99999]", "{}", "[1.5]", '"x"', json.dumps([1] * 1025), "[true]"),
    "bad_token_ids": one_of("[1]", "[[]]", "[[-1]]", "[[99999]]", "{}", "[[1.5]]", '"x"', json.dumps([[1] * 4097])),
    "bad_words": one_of("5", "{}", '[""]', "[5]", json.dumps(["a"] * 65), json.dumps(["x" * 257])),
    "ignore_eos": NO_TRUTH,
    "cache_salt": one_of("5", "[]", json.dumps("x" * 257)),
    "priority": either(NO_WHOLE, whole(2**31, 2**40), whole(-(2**40), -(2**31) - 1)),
    "chunk_tokens": either(NO_WHOLE, whole(-9, 0), whole(4097, 2**31)),
    "chunk_ms": either(NO_WHOLE, whole(-9, -1), whole(600_001, 2**31)),
}


def joined(fields: Mapping[str, str]) -> bytes:
    """An object of raw values."""
    inside = ",".join(f"{json.dumps(name)}:{value}" for name, value in fields.items())
    return f"{{{inside}}}".encode()


def is_object(body: bytes) -> bool:
    """Whether a body is a JSON object, by a lenient parser."""
    try:
        return isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return False


def broken_body(random: Random, good: bytes) -> tuple[str, bytes]:
    """The name of a change, and a body that is no JSON object after it; never empty."""
    way = random.choice(_WAYS)
    for _ in range(20):
        body = way(random, good)
        if body and not is_object(body):
            return way.__name__.strip("_"), body
    return "brace", b"{"


def _noise(random: Random, good: bytes) -> bytes:
    return random.randbytes(random.randint(1, 300))


def _truncated(random: Random, good: bytes) -> bytes:
    return good[: random.randrange(1, len(good))]


def _invalid_utf8(random: Random, good: bytes) -> bytes:
    at = good.rindex(b'"')
    return good[:at] + random.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88")) + good[at:]


def _trailing(random: Random, good: bytes) -> bytes:
    return good + random.choice((b"}", b"{}", b"x", b"\x00", b",", good))


def _other_value(random: Random, good: bytes) -> bytes:
    return random.choice((b"[]", b"5", b'"x"', b"true", b"null", b"[" + good + b"]", b"NaN", b"1e999"))


def _other_encoding(random: Random, good: bytes) -> bytes:
    return good.decode().encode(random.choice(("utf-16", "utf-32", "utf-16-be")))


def _replaced(random: Random, good: bytes) -> bytes:
    at = random.randrange(len(good))
    return good[:at] + random.choice((b"\x00", b"'", b"{", b"]", b",,", b"\\", b"\n\x01")) + good[at + 1 :]


def _deep(random: Random, good: bytes) -> bytes:
    depth = random.choice((2000, 20_000, 200_000))
    return random.choice((b"[", b'{"a":', b'[{"a":')) * depth


_WAYS = (_noise, _truncated, _invalid_utf8, _trailing, _other_value, _other_encoding, _replaced, _deep)


def bad_transport(random: Random, path: str, good: bytes, headers: Mapping[str, str]) -> Case:
    """A valid body with a wrong transport."""
    way = random.choice(("timeout", "method", "encoding", "gzip", "path", "grpc"))
    match way:
        case "timeout":
            changed = {"x-timeout-ms": random.choice(TIMEOUTS).encode("ascii", "replace").decode()}
            return Case("x-timeout-ms", HttpCall(path, good, {**headers, **changed}))
        case "method":
            method = random.choice(("GET", "PUT", "DELETE", "PATCH"))
            return Case(f"method {method}", HttpCall(path, b"", headers, method))
        case "encoding":
            coding = random.choice(("br", "zstd", "compress", "x" * 100, "gzip, br"))
            return Case("content-encoding", HttpCall(path, good, {**headers, "content-encoding": coding}))
        case "gzip":
            whole_gzip = gzip.compress(good, mtime=0)
            noise = b"\x02" + random.randbytes(random.randint(1, 200))
            # The last twelve bytes are a checksum, which is not checked, and a part of the data.
            cut = whole_gzip[: random.randrange(10, len(whole_gzip) - 12)]
            body = random.choice((noise, b"\x1f\x8b\x08\x00" + noise, cut, cut + b"\xff" * 10))
            return Case("body that is no gzip", HttpCall(path, body, {**headers, "content-encoding": "gzip"}))
        case "path":
            tail = random.choice(("/x", "%00", "/..;/", "%2e%2e", "/" + "a" * 3000))
            return Case("path", HttpCall(path + tail, good, headers))
        case _:
            kind = random.choice(("application/grpc", "application/grpc+proto", "application/grpc-web"))
            return Case("content-type of gRPC", HttpCall(path, good, {**headers, "content-type": kind}))
