"""Schemas of arguments: objects are closed where that excludes nothing that the schema allows by name."""

import datetime
import decimal
import enum
import ipaddress
import json
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest
import regex
from jsonschema import validators
from llguidance import LLTokenizer

from headrace.grammars import compile_grammar
from headrace.json_schemas import enforceable
from headrace.structured_outputs import read_structured_outputs
from tests.support.forms import walked

X, Y = {"x": {"type": "integer"}}, {"y": True}
CLOSED = {"properties": X, "additionalProperties": False}
NESTED = {"properties": {"properties": {"properties": X}, "multipleOf": {}}, "items": {"properties": Y}}
CASES = {
    "properties": ({"properties": X}, CLOSED),
    "none": ({}, {}),
    "said": (
        {"properties": X, "additionalProperties": {"properties": X}},
        {"properties": X, "additionalProperties": CLOSED},
    ),
    "reference": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"properties": X}}},
        {"$ref": "#/$defs/a", "$defs": {"a": CLOSED}},
    ),
    "choice": ({"anyOf": [{"properties": X}, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
    "choice beside": ({"properties": Y, "anyOf": [{"properties": X}]}, {"properties": Y, "anyOf": [{"properties": X}]}),
    "all": ({"allOf": [{"properties": X}, {"properties": Y}]}, {"allOf": [{"properties": X}, {"properties": Y}]}),
    "all of one": ({"allOf": [{"properties": X}]}, {"allOf": [CLOSED]}),
    "names like keywords": (
        NESTED,
        {
            "properties": {"properties": CLOSED, "multipleOf": {}},
            "items": {"properties": Y, "additionalProperties": False},
            "additionalProperties": False,
        },
    ),
    "values": ({"enum": [{"properties": X, "multipleOf": 2}]}, {"enum": [{"properties": X, "multipleOf": 2}]}),
    "tuples": ({"prefixItems": [{"properties": X}], "properties": 5}, {"prefixItems": [CLOSED], "properties": 5}),
}


@pytest.mark.parametrize("case", CASES)
def test_objects_are_closed(case):
    schema, closed = CASES[case]
    assert enforceable(schema, closes=True) == closed


Color = enum.Enum("Color", {"RED": "red", "BLUE": "blue"})


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    friends: list["Cat"] = []


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"


FIELDS = [
    *(bool, int, float, str, bytes, None, Any, object, complex, decimal.Decimal, Color, uuid.UUID, Path, dict),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta),
    *(ipaddress.IPv4Network, ipaddress.IPv6Address),
    *(pydantic.UUID4, pydantic.SecretStr, pydantic.HttpUrl, pydantic.Json, pydantic.Base64Bytes, pydantic.ByteSize),
    *(set[int], tuple[int, str], tuple[int, ...], dict[int, str], dict[Literal["a", "b"], int], list[Cat], int | None),
    Annotated[int, pydantic.Field(ge=-(2**63), le=2**63 - 1, multiple_of=5)],
    Annotated[float, pydantic.Field(gt=-1.7e308, lt=1.7e308)],
    Annotated[decimal.Decimal, pydantic.Field(max_digits=6, decimal_places=2)],
    Annotated[str, pydantic.Field(json_schema_extra={"pattern": r"^(?=[a-z]+$).{2,5}$", "format": "color", "x-a": 1})],
    Annotated[Cat | Dog, pydantic.Field(discriminator="kind")],
]


ZOD = json.loads((Path(__file__).parent / "data" / "zod_schemas.json").read_text())
WAYS = {
    "field": lambda kind: kind,
    "optional": lambda kind: kind | None if kind not in (None, Any) else Any,
    "list": lambda kind: list[kind],
    "by name": lambda kind: dict[str, kind],
}


def _nullable(check):
    def checked(validator, value, instance, schema):
        if instance is not None or not schema.get("nullable"):
            yield from check(validator, value, instance, schema)

    return checked


def _pattern(_validator, pattern, instance, _schema):
    if isinstance(instance, str) and not regex.search(pattern, instance):  # Which knows the properties of Unicode.
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def validator_of(schema, is_openapi):
    if not is_openapi:
        kind = validators.validator_for(schema, jsonschema.Draft202012Validator)
        return validators.extend(kind, {"pattern": _pattern})(schema)
    kind = jsonschema.Draft4Validator
    known = {name: _nullable(kind.VALIDATORS[name]) for name in ("type", "enum", "allOf", "anyOf", "$ref")}
    return validators.extend(kind, {**known, "pattern": _pattern})(schema)


def check_answers(schema, seeds, is_openapi=False):
    """Answers are valid in the form of a response, and as arguments; what is not enforced only annotates."""
    valid = validator_of(schema, is_openapi)
    for is_strict, closes in ((True, False), (False, True)):
        dropped: set[str] = set()
        read = enforceable(schema, dropped, is_strict, closes)
        assert enforceable(read, closes=closes) == read
        assert dropped <= {"format", "uniqueItems"}
        if is_strict and "uniqueItems" in str(read):  # Of sets: refused by name.
            continue
        form = read_structured_outputs({"json": read})
        for seed in seeds:
            answer = json.loads(walked(form, seed))
            if "uniqueItems" not in dropped:
                valid.validate(answer)


@pytest.mark.parametrize("kind", FIELDS, ids=str)
def test_answers_in_the_schemas_of_pydantic_are_valid(kind):
    for way, of in WAYS.items():
        made = pydantic.create_model("Made", a=(of(kind), ...), b=(int, 3))
        checked = []
        for mode in ("validation", "serialization"):
            schema = made.model_json_schema(mode=mode)
            if (fields := {**schema, "required": None}) not in checked:
                checked.append(fields)
                check_answers(schema, (way,))


@pytest.mark.parametrize(("name", "schema"), ZOD, ids=[name for name, _ in ZOD])
def test_answers_in_the_schemas_of_zod_are_valid(name, schema):
    check_answers(schema, (1, 2), is_openapi=name.endswith("openapi-3.0"))


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^[A-Z]{2}(?!00|01|99)\d{2}$", ["AB02", "AB98", "AB10"], ["AB00", "AB01", "AB99"]),
        (r"^(?!\.)[a-z.]+$", ["a.", "b"], [".a"]),
        (r"^(?!ab|a)(?=.*c)[abc]+$", ["bc", "cab"], ["abc", "acb", "b"]),
    ],
)
def test_what_must_not_follow_a_fixed_place_is_enforced(pattern, good, bad):
    matcher = compile_grammar(
        read_structured_outputs({"json": {"type": "string", "pattern": pattern}}), LLTokenizer("byte")
    )
    for text in good + bad:
        quoted = list(json.dumps(text).encode())
        assert (matcher.validate_tokens(quoted) == len(quoted)) is (text in good)


@pytest.mark.parametrize(
    "choices",
    [
        [{"type": "object", "properties": X, "required": ["x"]}, {"type": "object", "properties": X}],
        [{"properties": X, "required": ["x"]}, {"properties": Y, "required": ["y"]}],
        [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}],
    ],
)
def test_choices_that_nothing_tells_apart_are_refused_or_ignored_by_name(choices):
    schema = {"oneOf": choices, "$defs": {"a": {"type": "object", "properties": X, "required": ["x"]}}}
    assert "oneOf" in enforceable(schema)
    enforceable(schema, dropped := set(), is_strict=False)
    assert dropped == {"oneOf"}
