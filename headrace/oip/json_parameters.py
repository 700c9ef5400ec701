"""Parameters in JSON: an object of names to booleans, numbers and strings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import InvalidRequestError
from headrace.oip.parameters import RESERVED, set_parameters
from headrace_protos import inference_pb2 as pb

_MAX_PARAMETERS = 1024


def write_parameters(target: Any, given: Mapping[str, Any]) -> None:
    """Writes a request's parameters to the protocol's map; raises InvalidRequestError."""
    if len(given) > _MAX_PARAMETERS:
        raise InvalidRequestError(f"{len(given)} parameters, at most {_MAX_PARAMETERS} are allowed")
    for name, value in given.items():
        if name.startswith(RESERVED):
            raise InvalidRequestError(f"parameter {name!r}: names that begin with {RESERVED} are the server's own")
        if not isinstance(value, (bool, int, float, str)):
            raise InvalidRequestError(f"parameter {name!r} must be true, false, a number or a string")
        if type(value) is int and not -(2**63) <= value < 2**64:
            raise InvalidRequestError(f"parameter {name!r} does not fit 64 bits")
    set_parameters(target, given)


def plain_parameters(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """A response's parameters, except reserved ones."""
    values = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is not None and not name.startswith(RESERVED):
            values[name] = getattr(parameter, choice)
    return values
