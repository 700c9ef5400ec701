"""Schemas of arguments: objects are closed where that excludes nothing that the schema allows by name."""

import pytest

from millrace.json_schemas import enforceable

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
