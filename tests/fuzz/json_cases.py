"""Wrong JSON to every front end: a value of another type, a missing field, a broken body, a wrong transport.

Values are raw text, since a JSON library would not write most of them. The limits of single fields have unit tests.
"""

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from random import Random

from tests.fuzz.case import Case, HttpCall, Maker

Wrong = Callable[[Random], str]

JSON = {"content-type": "application/json"}
_TIMEOUTS = ("abc", "-1", "0", "1e3", "1.5", "123456789", "٣", "1 2")
_CONTENT_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "nonsense")


def _one_of(*texts: str) -> Wrong:
    return lambda random: random.choice(texts)


def _either(*makers: Wrong) -> Wrong:
    return lambda random: random.choice(makers)(random)


def _nested(random: Random) -> str:
    """Deeply nested lists or objects."""
    depth = random.choice((40, 200, 900, 1100, 5000))
    return "[" * depth + "]" * depth if random.random() < 0.5 else '{"a":' * depth + "1" + "}" * depth


_NO_NUMBER = _one_of('"hot"', "[]", "{}", "[1]", "true", '"1,5"', '""', '{"a":1}')
_NO_WHOLE = _either(_NO_NUMBER, _one_of("1.5", '"1.5"', "NaN", "1e999", "-1e999"), _nested)
_NO_REAL = _either(_NO_NUMBER, _one_of("NaN", "Infinity", "-Infinity", "1e999", '"NaN"', '"inf"', "1e308"), _nested)
_NO_TRUTH = _either(_one_of("2", '"maybe"', "[]", "{}", "-1", "0.5"), _nested)
_NO_TEXT = _either(_one_of("5", "1.5", "true", "[]", "{}", "[1]", '{"a":"b"}', '["a"]'), _nested)
_NO_IDS = _one_of("{}", '"x"', "[-1]", "[true]")

_REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_WHOLES = ("top_k", "max_tokens", "min_tokens", "seed", "priority", "chunk_tokens", "chunk_ms")
_SAMPLING: Mapping[str, Wrong] = {
    **dict.fromkeys(_REALS, _NO_REAL),
    **dict.fromkeys(_WHOLES, _NO_WHOLE),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids", "bad_token_ids"), _NO_IDS),
    "logit_bias": _one_of("[]", "5", '{"x":1}', '{"5":true}', '"{5"'),
    "bad_words": _one_of("5", "{}", '[""]', "[5]"),
    "cache_salt": _one_of("5", "[]"),
}
_MODELS = _one_of("null", "5", "[]", "{}", '""', '"nobody"', '"../../etc/passwd"', json.dumps("m" * 5000), '"a\\u0000"')
_OPENAI: Mapping[str, Wrong] = {
    **_SAMPLING,
    "ignore_eos": _NO_TRUTH,
    "model": _MODELS,
    "stop": _one_of("5", "true", "{}", "[5]", '[""]', '""', "[[]]"),
    "n": _either(_NO_WHOLE, _one_of("0", "17", '"2"')),
    "stream": _either(_NO_TRUTH, _one_of("1", '"true"')),
    "stream_options": _one_of("5", "[]", '"x"', '{"include_usage":5}'),
    "response_format": _one_of('{"type":"structural_tag"}', '{"type":"json_schema"}', "5", "[]"),
    "structured_outputs": _one_of("{}", "5", "[]", '{"regex":"("}', '{"json":{"not":{}}}', '{"grammar":"start: x"}'),
}
_LONG = json.dumps("once " * 1500)
_COMPLETION: Mapping[str, Wrong] = {
    **_OPENAI,
    "prompt": _either(
        _one_of("null", '""', "{}", "5", "true", "[]", "[[]]", "[[-1]]", "[1.5]", '["a",1]', "[99999999]", "[true]"),
        _one_of(json.dumps(["x"] * 65), "[2147483648]", _LONG, json.dumps([5] * 2000), '"\\ud800"', "[{}]"),
        _nested,
    ),
    "logprobs": _NO_WHOLE,
    "echo": _either(_NO_TRUTH, _one_of('"yes"', "1")),
    "suffix": _one_of('"x"', "5"),
}
_CHAT: Mapping[str, Wrong] = {
    **_OPENAI,
    "messages": _either(
        _one_of("null", "[]", "{}", '"x"', "[5]", "[{}]", '[{"role":5}]', '[{"role":""}]'),
        _one_of('[{"role":"alien","content":"x"}]', '[{"role":"user","content":5}]', '[{"role":"user","content":[5]}]'),
        _one_of('[{"role":"user","content":[{"type":"image_url"}]}]', '[{"role":"user","content":"\\ud800"}]'),
        _one_of(json.dumps([{"role": "user", "content": "x"}] * 5000), f'[{{"role":"user","content":{_LONG}}}]'),
        _nested,
    ),
    "logprobs": _either(_NO_TRUTH, _one_of("1", '"true"')),
    "top_logprobs": _NO_WHOLE,
    "tools": _one_of('[{"type":"function"}]', "5"),
    "chat_template_kwargs": _one_of("5", "[]", '"x"', '{"tokenize":true}'),
}
_EMBEDDING: Mapping[str, Wrong] = {
    # Without a name the only embedding model is used.
    "model": _one_of("5", "[]", "{}", '"nobody"', '"a\\u0000"', '"storyteller"', '"identity"', '"classifier"'),
    "input": _either(
        _one_of("null", "{}", "5", "true", "[]", "[[]]", "[[-1]]", "[1.5]", '["a",1]', "[120]", "[true]", "[{}]"),
        _one_of(json.dumps(["x"] * 2049), json.dumps([5] * 500), json.dumps("the fox " * 300), '"\\ud800"'),
        _nested,
    ),
    "encoding_format": _either(_NO_TEXT, _one_of('"int8"', '""', '"FLOAT"')),
    "dimensions": _one_of("5", '"x"', "0"),
}
_GENERATE: Mapping[str, Wrong] = {
    **_SAMPLING,
    "ignore_eos": _one_of("2", '"maybe"', "{}"),
    "text_input": _either(_one_of("null", "5", "true", "[]", "{}", "[5]", '["a","b"]', '[["a"],["b"]]', '""'), _nested),
    "stream": _either(_NO_TRUTH, _one_of("1", '"true"', "[true,false]")),
    "sampling_parameters": _one_of("5", "true", '"{"', '"[]"', '"5"', '"{\\"temperature\\":-1}"', '{"bogus":1}', "[1]"),
    "stop": _one_of("5", "{}", "[5]", '[""]', "true"),
    "parameters": _one_of("5", "true", "[1]", '"x"', '{"bogus":1}', '{"a":[{}]}', '{"temperature":-1}'),
    "bogus": _either(_one_of("1", '"x"', "true", "[1]", "{}"), _nested),
    "id": _NO_TEXT,
}
# It is read as protobuf's JSON, in which numbers may be text.
_HEADRACE: Mapping[str, Wrong] = {
    "model": _one_of('""', '"nobody"', "[]", "{}", '["a"]'),
    "prompt": _one_of('""', "{}", "[]", '["a","b"]', _LONG),
    "messages": _one_of('"x"', "5", '[{"role":"user","content":"x"}]', "[5]", '[{"role":{}}]', '{"role":5}'),
    "temperature": _one_of('"hot"', "{}", "[]", "true", '"NaN"', "-0.5", "101"),
    "max_tokens": _one_of('"x"', "{}", "1.5", "true", "0", "-1", "1025", "4294967296"),
    "seed": _one_of('"x"', "{}", "1.5", "-1", "18446744073709551616"),
    "stop": _one_of('[""]', json.dumps(["a"] * 17), "[{}]"),
    "ignore_eos": _one_of('"maybe"', "{}", "[]", "5"),
    "stop_token_ids": _one_of("[-1]", "[4294967296]", "[99999]", '["x"]'),
    "logit_bias": _one_of("[]", "5", '{"x":1}', '{"5":101}', '{"5":{}}', '{"-1":1}', '{"99999":1}'),
}
# A valid input of each model, as raw JSON by field.
_INPUTS: Mapping[str, Mapping[str, str]] = {
    "identity": {"name": '"x"', "datatype": '"INT16"', "shape": "[2,2]", "data": "[1,2,3,4]"},
    "declared": {"name": '"x"', "datatype": '"FP32"', "shape": "[1,3]", "data": "[1.5,2,3]"},
    "embedder": {"name": '"input_ids"', "datatype": '"INT64"', "shape": "[1,3]", "data": "[5,6,7]"},
    "classifier": {"name": '"input_ids"', "datatype": '"INT32"', "shape": "[3]", "data": "[5,6,7]"},
    "storyteller": {"name": '"text_input"', "datatype": '"BYTES"', "shape": "[1]", "data": '["Once"]'},
}
_TENSOR: Mapping[str, Wrong] = {
    "name": _either(_NO_TEXT, _one_of('""', "null")),
    "datatype": _either(_NO_TEXT, _one_of('"INT128"', '""', '"int16"', "null", '"FP16"', '"BF16"')),
    "shape": _one_of("null", '"x"', "{}", "5", "[-1]", "[2.5]", "[4611686018427387904,2]", "[7]", '["2"]', "[[2,2]]"),
    "data": _either(_one_of("null", "{}", "[]", "5", "[[1],[1,2]]", "[1,null,3,4]", "[1,2,3,4e400]"), _nested),
    "parameters": _one_of("5", "[]", '{"binary_data_size":4}', '{"shared_memory_region":"x"}', '"x"'),
}
_INFER: Mapping[str, Wrong] = {
    "inputs": _either(_one_of("null", "{}", "5", '"x"', "[5]", "[[]]", "[null]"), _nested),
    "outputs": _one_of('[{"name":"nope"}]', "[5]", '"x"', "[{}]", '[{"name":5}]', '[{"name":""}]'),
    "parameters": _one_of('{"triton_x":1}', '{"a":[1]}', '{"a":{}}', "5", "[]", '{"a":null}'),
    "id": _one_of("5", "[]", "{}", "true", json.dumps("i" * 300)),
}


def _joined(fields: Mapping[str, str]) -> bytes:
    """An object of raw values."""
    inside = ",".join(f"{json.dumps(name)}:{value}" for name, value in fields.items())
    return f"{{{inside}}}".encode()


def _maker(paths: Sequence[str], good: Mapping[str, str], wrong: Mapping[str, Wrong], required: str) -> Maker:
    """Cases of one endpoint: a field that is wrong or missing, a broken body, a wrong transport, an unusual request."""

    def make(random: Random) -> Case:
        path = random.choice(paths)
        way = random.random()
        if way < 0.6:
            name = random.choice(list(wrong))
            value = wrong[name](random)
            return Case(f"{name}={value[:80]}", HttpCall(path, _joined({**good, name: value}), JSON))
        if way < 0.65:
            body = _joined({key: value for key, value in good.items() if key != required})
            return Case(f"{required} missing", HttpCall(path, body, JSON))
        if way < 0.9:
            what, body = _broken_body(random, _joined(good))
            return Case(f"body: {what}", HttpCall(path, body, JSON))
        if way < 0.97:
            return bad_transport(random, path, _joined(good), JSON)
        kind, extra = random.choice(_CONTENT_TYPES), {f"x{random.randrange(99)}": _nested(random)}
        return Case("unusual", HttpCall(path, _joined({**good, **extra}), {"content-type": kind}), must_fail=False)

    return make


_PROMPT = {"model": '"storyteller"', "prompt": '"Once"', "max_tokens": "1"}
_CONVERSATION = {"model": '"storyteller"', "messages": '[{"role":"user","content":"Hi"}]', "max_tokens": "1"}
_TEXT = {"text_input": '"Once"', "max_tokens": "1"}


def _openai(tail: str) -> tuple[str, str]:
    return f"/v1/{tail}", f"/openai/v1/{tail}"


def _streamed(maker: Maker) -> Maker:
    """The same, with half of the bodies requesting a stream."""

    def make(random: Random) -> Case:
        case = maker(random)
        call = case.call
        assert isinstance(call, HttpCall)
        if b'"stream' in call.body or not call.body.startswith(b'{"model"') or random.random() < 0.5:
            return case
        body = call.body.replace(b'{"model"', b'{"stream":true,"model"', 1)
        return Case(f"{case.what}, streamed", HttpCall(call.path, body, call.headers, call.method), case.must_fail)

    return make


completions = _streamed(_maker(_openai("completions"), _PROMPT, _COMPLETION, "prompt"))
chat_completions = _streamed(_maker(_openai("chat/completions"), _CONVERSATION, _CHAT, "messages"))
embeddings = _maker(_openai("embeddings"), {"model": '"embedder"', "input": '"the fox"'}, _EMBEDDING, "input")
generate = _maker(("/v2/models/storyteller/generate",), _TEXT, _GENERATE, "text_input")
generate_stream = _maker(("/v2/models/storyteller/generate_stream",), _TEXT, _GENERATE, "text_input")
headrace_generate = _maker(("/headrace/v1/generate",), _PROMPT, _HEADRACE, "prompt")


def infer_json(random: Random) -> Case:
    """Tensors in the JSON of the V2 protocol's `infer`."""
    model = random.choice(list(_INPUTS))
    tensor, path = dict(_INPUTS[model]), f"/v2/models/{model}/infer"
    parameters = {"parameters": '{"max_tokens":1}'} if model == "storyteller" else {}
    if random.random() < 0.5:
        return _maker((path,), {"inputs": f"[{_joined(tensor).decode()}]", **parameters}, _INFER, "inputs")(random)
    name = random.choice(list(_TENSOR))
    tensor[name] = _TENSOR[name](random)
    body = _joined({"inputs": f"[{_joined(tensor).decode()}]", **parameters})
    return Case(f"{model}, {name}={tensor[name][:80]}", HttpCall(path, body, JSON))


def infer_binary(random: Random) -> Case:
    """Tensors behind the JSON; each change breaks the arithmetic between header, sizes and body."""
    datatype, element = random.choice((("INT32", 4), ("FP16", 2), ("FP64", 8)))
    count = random.randint(1, 50)
    data, size, shape = random.randbytes(element * count), element * count, [count]
    way = random.choice(("length cut", "length odd", "size", "tail cut", "tail grown", "shape", "noise"))
    if way == "size":
        size = random.choice((size + random.randint(1, 99), size - 1, -1, 2**64))
    elif way == "tail cut":
        data = data[: random.randrange(len(data))]
    elif way == "tail grown":
        data += random.randbytes(random.randint(1, 99))
    elif way == "shape":
        shape = random.choice(([count + 1], [-count], [count, 2], [2**62, 2**62], [0], [count, 0]))
    tensor = {"name": "x", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}
    text = json.dumps({"inputs": [tensor]}).encode()
    length = str(len(text))
    if way == "length cut":
        length = str(random.randrange(1, len(text)))
    elif way == "length odd":
        length = random.choice(("-1", "abc", "1e3", "0x10", str(2**64), "9" * 100, "1.0", f"+{len(text)}"))
    elif way == "noise":
        text = random.randbytes(len(text))
    headers = {"content-type": "application/octet-stream", "inference-header-content-length": length}
    return Case(f"{way}: {datatype} {shape}", HttpCall("/v2/models/identity/infer", text + data, headers))


def _is_object(body: bytes) -> bool:
    """Whether a body is a JSON object, by a lenient parser."""
    try:
        return isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return False


_BREAKS: Mapping[str, Callable[[Random, bytes], bytes]] = {
    "noise": lambda random, good: random.randbytes(random.randint(1, 300)),
    "cut": lambda random, good: good[: random.randrange(1, len(good))],
    "no UTF-8": lambda random, good: good[:-2] + random.choice((b"\xff", b"\xc3", b"\xed\xa0\x80")) + good[-2:],
    "more behind it": lambda random, good: good + random.choice((b"}", b"{}", b"x", b"\x00", b",", good)),
    "no object": lambda random, good: random.choice(
        (b"[]", b"5", b'"x"', b"true", b"null", b"[" + good + b"]", b"NaN")
    ),
    "other encoding": lambda random, good: good.decode().encode(random.choice(("utf-16", "utf-32", "utf-16-be"))),
    "deep": lambda random, good: random.choice((b"[", b'{"a":', b'[{"a":')) * random.choice((2000, 200_000)),
}


def _broken_body(random: Random, good: bytes) -> tuple[str, bytes]:
    """The name of a change, and a body that is no JSON object after it."""
    what = random.choice(list(_BREAKS))
    body = _BREAKS[what](random, good)
    return ("brace", b"{") if _is_object(body) else (what, body)


def bad_transport(random: Random, path: str, good: bytes, headers: Mapping[str, str]) -> Case:
    """A valid body with a wrong transport."""
    way = random.choice(("timeout", "method", "encoding", "gzip", "path", "grpc"))
    match way:
        case "timeout":
            changed = {"x-timeout-ms": random.choice(_TIMEOUTS).encode("ascii", "replace").decode()}
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
