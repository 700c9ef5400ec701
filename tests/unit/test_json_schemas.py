"""Schemas of arguments: objects are closed where that excludes nothing that the schema allows by name."""

import datetime
import decimal
import enum
import ipaddress
import pathlib
import uuid
from typing import Annotated, Any, Literal

import pydantic
import pytest

from millrace.grammars import check_grammar
from millrace.json_schemas import enforceable
from millrace.structured_outputs import read_structured_outputs

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
    "tuples": (
        {"prefixItems": [{"properties": X}], "properties": 5},
        {"prefixItems": [CLOSED], "properties": 5},
    ),
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
    *(bool, int, float, str, bytes, None, Any, object, complex, decimal.Decimal, Color, uuid.UUID, pathlib.Path, dict),
    *(
        datetime.datetime,
        datetime.date,
        datetime.time,
        datetime.timedelta,
        ipaddress.IPv4Network,
        ipaddress.IPv6Address,
    ),
    *(pydantic.UUID4, pydantic.SecretStr, pydantic.HttpUrl, pydantic.Json, pydantic.Base64Bytes, pydantic.ByteSize),
    *(set[int], tuple[int, str], tuple[int, ...], dict[int, str], dict[Literal["a", "b"], int], list[Cat], int | None),
    Annotated[int, pydantic.Field(ge=-(2**63), le=2**63 - 1, multiple_of=5)],
    Annotated[float, pydantic.Field(gt=-1.7e308, lt=1.7e308)],
    Annotated[decimal.Decimal, pydantic.Field(max_digits=6, decimal_places=2)],
    Annotated[str, pydantic.Field(json_schema_extra={"pattern": r"^(?=[a-z]+$).{2,5}$", "format": "color", "x-a": 1})],
    Annotated[Cat | Dog, pydantic.Field(discriminator="kind")],
]


@pytest.mark.parametrize("mode", ["validation", "serialization"])
@pytest.mark.parametrize("kind", FIELDS, ids=str)
def test_each_type_of_a_field_of_pydantic_can_be_enforced(kind, mode):
    made = pydantic.create_model(
        "Made", a=(kind, ...), b=(kind | None, None) if kind not in (None, Any) else (Any, None)
    )
    read = {}
    for is_strict, closes in ((True, False), (False, True)):
        dropped: set[str] = set()
        read = enforceable(made.model_json_schema(mode=mode), dropped, is_strict, closes)
        assert dropped <= {"format", "uniqueItems"}
        if not (is_strict and "uniqueItems" in str(read)):  # Of sets.
            check_grammar(read_structured_outputs({"json": read}))
    assert enforceable(read, closes=True) == read
