"""Wrong requests to the V2 protocol's `infer`: tensors in JSON, and as binary data behind it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random

from tests.fuzz.case import Case, HttpCall
from tests.fuzz.json_values import NO_TEXT, Wrong, bad_transport, broken_body, either, joined, nested, one_of
from tests.fuzz.text_cases import JSON

_LENGTH = "inference-header-content-length"
# A valid input of each model, as raw JSON by field.
_INPUTS: Mapping[str, Mapping[str, str]] = {
    "identity": {"name": '"x"', "datatype": '"INT16"', "shape": "[2,2]", "data": "[1,2,3,4]"},
    "declared": {"name": '"x"', "datatype": '"FP32"', "shape": "[1,3]", "data": "[1.5,2,3]"},
    "embedder": {"name": '"input_ids"', "datatype": '"INT64"', "shape": "[1,3]", "data": "[5,6,7]"},
    "classifier": {"name": '"input_ids"', "datatype": '"INT32"', "shape": "[3]", "data": "[5,6,7]"},
    "storyteller": {"name": '"text_input"', "datatype": '"BYTES"', "shape": "[1]", "data": '["Once"]'},
}
_BAD_SHAPES = one_of(
    "null", '"x"', "{}", "5", "[-1]", "[4,-1]", "[2.5]", "[9223372036854775808]", "[4611686018427387904,2]",
    "[0]", "[7]", "[1000000000000]", '["2"]', "[[2,2]]", "[true]", json.dumps([1] * 33), json.dumps([2] * 60),
)  # fmt: skip
_BAD_DATA = either(
    one_of("null", "{}", "[]", "[[1],[1,2]]", "[1,[2],3,4]", "[1,null,3,4]", "[[],[]]", '[{"a":1}]', "[1,2,3,4,5,6]"),
    one_of("5", "[1,2,3,4e400]", json.dumps([0] * 5000), '["\\ud800"]', "[true,1,1,1]", '[1,"2",3,4]'),
    nested,
)
_WRONG: Mapping[str, Wrong] = {
    "name": either(NO_TEXT, one_of('""', "null")),
    "datatype": either(NO_TEXT, one_of('"INT128"', '""', '"int16"', "null", '"FP16"', '"BF16"', '"UINT8 "')),
    "shape": _BAD_SHAPES,
    "data": _BAD_DATA,
    "parameters": one_of("5", "[]", '{"binary_data_size":4}', '{"shared_memory_region":"x"}', '"x"'),
}
_OUT_OF_RANGE = {
    "INT8": ("128", "-129", "1.5", "1e2", "99999999999999999999"), "UINT8": ("256", "-1"), "INT16": ("32768", "-32769"),
    "UINT64": ("-1", "18446744073709551616"), "INT64": ("9223372036854775808",), "BOOL": ("1", "0", "2", '"true"'),
    "FP32": ("1e39", '"1"', "true", "[]"), "FP64": ('"x"', "null"), "BYTES": ("1", "true", "null", "[]"),
    "INT32": ("2147483648", "true", "NaN", "Infinity"),
}  # fmt: skip
_TOP: Mapping[str, Wrong] = {
    "inputs": either(one_of("null", "{}", "5", '"x"', "[5]", "[[]]", "[null]"), nested),
    "outputs": one_of('[{"name":"nope"}]', "[5]", '"x"', "[{}]", '[{"name":5}]', '[{"name":""}]'),
    "parameters": one_of('{"triton_x":1}', '{"a":[1]}', '{"a":{}}', "5", "[]", '{"a":null}'),
    "id": either(one_of("5", "[]", "{}", "true"), one_of(json.dumps("i" * 300))),
}
_PATHS = (
    "/v2/models/nobody/infer",
    "/v2/models/%20/infer",
    "/v2/models/identity/versions/9/infer",
    "/v2/models//infer",
)


def infer_json(random: Random) -> Case:
    """Tensors in JSON."""
    model = random.choice(list(_INPUTS))
    path, tensor = f"/v2/models/{model}/infer", dict(_INPUTS[model])
    good = {"inputs": f"[{_object(tensor)}]"} | ({"parameters": '{"max_tokens":1}'} if model == "storyteller" else {})
    way = random.random()
    if way < 0.4:
        name = random.choice(list(_WRONG))
        tensor[name] = _WRONG[name](random)
        what = f"{model}, {name}={tensor[name][:80]}"
        return Case(what, HttpCall(path, joined({**good, "inputs": f"[{_object(tensor)}]"}), JSON))
    if way < 0.5:
        datatype = random.choice(list(_OUT_OF_RANGE))
        value = random.choice(_OUT_OF_RANGE[datatype])
        odd = {"name": '"x"', "datatype": f'"{datatype}"', "shape": "[1]", "data": f"[{value}]"}
        body = joined({"inputs": f"[{_object(odd)}]"})
        return Case(f"{datatype} {value}", HttpCall("/v2/models/identity/infer", body, JSON))
    if way < 0.65:
        name = random.choice(list(_TOP))
        value = _TOP[name](random)
        return Case(f"{model}, {name}={value[:80]}", HttpCall(path, joined({**good, name: value}), JSON))
    if way < 0.72:
        many = random.choice((2, 1025, 3000))
        body = joined({**good, "inputs": "[" + ",".join([_object(tensor)] * many) + "]"})
        return Case(f"{model}, {many} inputs of one name", HttpCall(path, body, JSON))
    if way < 0.76:
        return Case("path", HttpCall(random.choice(_PATHS), joined(good), JSON))
    if way < 0.92:
        what, body = broken_body(random, joined(good))
        return Case(f"body: {what}", HttpCall(path, body, JSON))
    return bad_transport(random, path, joined(good), JSON)


def infer_binary(random: Random) -> Case:
    """Tensors behind the JSON; each change breaks the arithmetic between header, sizes and body."""
    datatype, element = random.choice((("INT32", 4), ("FP16", 2), ("BOOL", 1), ("FP64", 8), ("BYTES", 0)))
    count = random.randint(1, 50)
    data = _elements(random, datatype, element, count)
    size: object = len(data)
    shape: object = [count]
    length: str | None = None
    way = random.choice(
        (
            "length cut",
            "length grown",
            "length odd",
            "no length",
            "size",
            "tail cut",
            "tail grown",
            "shape",
            "bytes",
            "noise",
        )
    )
    if way == "size":
        size = random.choice((len(data) + random.randint(1, 99), len(data) - 1, -1, "4", 1.5, 2**64, True, [], {}))
    elif way == "tail cut":
        data = data[: random.randrange(len(data))]
    elif way == "tail grown":
        data += random.randbytes(random.randint(1, 99))
    elif way == "shape":
        shape = random.choice(([count + 1], [-count], [count, 2], [2**62, 2**62], [0], [count, 0], "x"))
    elif way == "bytes":  # Impossible raw contents.
        datatype = random.choice(("BYTES", "BOOL"))
        data = b"\xff\xff\xff\x7f" + data if datatype == "BYTES" else bytes([2] * count)
        size, shape = len(data), [count]
    tensor = {"name": "x", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}
    text = json.dumps({"inputs": [tensor]}).encode()
    if way == "length cut":
        length = str(random.randrange(1, len(text)))
    elif way == "length grown":
        length = str(len(text) + random.randint(1, len(data) + 99))
        data = b"\x01" + data[1:]  # No space, which JSON may end with.
    elif way == "length odd":
        length = random.choice(("-1", "abc", "1e3", "0x10", str(2**64), "9" * 100, "1.0", f"+{len(text)}"))
    elif way == "noise":
        text = random.randbytes(random.randint(1, 200))
    headers = {"content-type": "application/octet-stream"}
    if way != "no length":
        headers[_LENGTH] = str(len(text)) if length is None else length
    body = text + (b"\x01" if way == "no length" else b"") + data
    return Case(f"{way}: {datatype} {shape}", HttpCall("/v2/models/identity/infer", body, headers))


def _elements(random: Random, datatype: str, element: int, count: int) -> bytes:
    if datatype == "BYTES":
        items = [random.randbytes(random.randint(0, 9)) for _ in range(count)]
        return b"".join(len(item).to_bytes(4, "little") + item for item in items)
    return bytes(random.choices(range(2), k=count)) if datatype == "BOOL" else random.randbytes(element * count)


def _object(fields: Mapping[str, str]) -> str:
    return joined(fields).decode()
