"""The protocol's parameters: maps of names to bool, int, float and str in requests, responses and configurations."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from headrace.errors import InvalidRequestError
from headrace_protos import inference_pb2 as pb

RESERVED = "triton_"  # Names that begin with this are for the server, not for the model.
# What clients of Triton send beside sampling parameters.
_TRANSPORT = frozenset(("timeout", "sequence_id", "sequence_start", "sequence_end", "binary_data_output"))
_MAX_PARAMETERS = 1024  # In JSON.


def read_parameters(
    parameters: Mapping[str, pb.InferParameter], besides: Collection[str] = frozenset()
) -> dict[str, Any]:
    """The parameters as plain values, without reserved names and those in `besides`; raises InvalidRequestError."""
    values: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if name.startswith(RESERVED) or name in besides:
            continue
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidRequestError(f"parameter {name!r} has no value")
        values[name] = getattr(parameter, choice)
    return values


def read_sampling(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """The sampling parameters as plain values; raises InvalidRequestError."""
    return read_parameters(parameters, _TRANSPORT)


def set_parameters(target: Any, values: Mapping[str, Any]) -> None:
    """Writes plain values to a map of parameters, lists and objects as JSON; None is left out."""
    for name, value in values.items():
        if isinstance(value, bool):
            target[name].bool_param = value
        elif isinstance(value, int):
            if value < 2**63:
                target[name].int64_param = value
            else:
                target[name].uint64_param = value
        elif isinstance(value, float):
            target[name].double_param = value
        elif isinstance(value, (list, tuple, dict)):
            target[name].string_param = json.dumps(value)
        elif value is not None:
            target[name].string_param = str(value)


def write_parameters(target: Any, given: Mapping[str, Any]) -> None:
    """Writes a request's parameters in JSON to the protocol's map; raises InvalidRequestError."""
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
    """A response's parameters for JSON, except reserved ones."""
    values = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is not None and not name.startswith(RESERVED):
            values[name] = getattr(parameter, choice)
    return values
