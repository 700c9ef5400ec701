"""Null is as good as absent in all objects of declared fields; free-form ones, such as JSON schemas, keep it."""

from functools import cache
from typing import Any, get_args

from pydantic import BaseModel


def without_nulls(value: Any, kind: Any) -> Any:
    """A value of an annotated kind, as JSON has it, without the nulls in the objects of its models."""
    fields = _fields_of(kind)
    if fields is not None and isinstance(value, list):
        return [without_nulls(one, kind) for one in value]
    if fields is None or not isinstance(value, dict):
        return value
    return {name: without_nulls(one, fields.get(name)) for name, one in value.items() if one is not None}


@cache
def _fields_of(kind: Any) -> dict[str, Any] | None:
    """The annotations of the fields of the model within an annotation; None for none."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    return next(filter(None, map(_fields_of, get_args(kind))), None)
