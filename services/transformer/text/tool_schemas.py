"""The schema of a function's arguments as a grammar has it.

An object with `properties` has no others unless its schema says more about them, which is how vLLM's grammars read
schemas too: a function knows no other arguments, and few declarations state it. `multipleOf` is left out, for which
llguidance builds automata of any size. Pure.
"""

from __future__ import annotations

from typing import Any

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not")
# Beside these, other schemas may name more properties.
_OPEN = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties", "unevaluatedProperties"}


def arguments_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object, as the module says."""
    closed: dict[str, Any] = _closed({"type": "object", **schema}, is_whole=True)
    return closed


def _closed(schema: Any, is_whole: bool) -> Any:
    """A schema with closed objects; one that is not the whole of its object stays open."""
    if not isinstance(schema, dict):
        return schema
    is_alone = is_whole and "properties" not in schema
    closed: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _BY_NAME and isinstance(value, dict):
            closed[name] = {key: _closed(item, True) for key, item in value.items()}
        elif name in _LISTS and isinstance(value, list):
            is_choice = name != "allOf" or len(value) == 1
            closed[name] = [_closed(item, (is_alone and is_choice) or name == "prefixItems") for item in value]
        elif name in _SINGLE:
            closed[name] = _closed(value, name != "not")
        elif name != "multipleOf":
            closed[name] = value
    if is_whole and isinstance(closed.get("properties"), dict) and not closed.keys() & _OPEN:
        closed["additionalProperties"] = False
    return closed
