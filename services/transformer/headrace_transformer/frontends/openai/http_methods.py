"""The methods of OpenAI's API, and of others beside it, for the HTTP server.

The gateway rewrites each path to the name of its method (envoy/envoy.yaml), which is in records, spans and metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import orjson
from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty

from headrace.errors import HeadraceError, InvalidRequestError
from headrace.rpc.http2.methods import ErrorBody, HttpMethod
from headrace_protos.rest_pb2 import DESCRIPTOR, ModelRequest, ResponseItemsRequest, ResponseRequest
from headrace_transformer.frontends.openai.errors import openai_error

_VERBS = {"Delete": "DELETE", "Cancel": "POST"}
_MAX_DIGITS = 9


def whole_number(values: Mapping[str, str], name: str) -> int:
    """A parameter of a query, 0 for none."""
    text = values.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise InvalidRequestError(f"{name} must be a whole number", param=name)
    return int(text)


def _body(data: bytes) -> HttpBody:
    return HttpBody(data=data)


def _model(name: bytes) -> ModelRequest:
    return ModelRequest(model=name.decode())


def _response(response_id: bytes) -> ResponseRequest:
    return ResponseRequest(response_id=response_id.decode())


def _items(query: bytes) -> ResponseItemsRequest:
    values = dict(parse_qsl(query.decode()))
    texts = {name: values[name] for name in ("after", "order") if name in values}
    return ResponseItemsRequest(response_id=values.get("id", ""), limit=whole_number(values, "limit"), **texts)


def _empty(_: bytes) -> Empty:
    return Empty()


# By the type of the request in headrace_protos/rest.proto: its parser, and whether it is the body.
_READING = {
    HttpBody.DESCRIPTOR.full_name: (_body, True),
    ModelRequest.DESCRIPTOR.full_name: (_model, False),
    ResponseRequest.DESCRIPTOR.full_name: (_response, False),
    ResponseItemsRequest.DESCRIPTOR.full_name: (_items, False),
    Empty.DESCRIPTOR.full_name: (_empty, False),
}


def error_body(error: HeadraceError) -> bytes:
    return orjson.dumps(openai_error(error))


def http_methods(
    service: str, servicer: Any, shape: Callable[[HeadraceError], dict[str, Any]] = openai_error
) -> list[HttpMethod]:
    """Every method of a service of rest.proto; the model of a GET is in the path, or in the query's `model`.

    `shape` makes the bodies of its errors.
    """
    described = DESCRIPTOR.services_by_name[service]
    methods = []
    for method in described.methods:
        parse, takes_body = _READING[method.input_type.full_name]
        name = f"{described.full_name}/{method.name}"
        behaviour = getattr(servicer, method.name)
        errors = None if shape is openai_error else _bodies_of(shape)
        method_of = partial(HttpMethod, name, behaviour, parse, takes_body, error_body=errors)
        is_list = method.input_type is ResponseItemsRequest.DESCRIPTOR
        verb = _VERBS.get(method.name, "")
        methods.append(method_of(parameter="" if is_list else "model", takes_query=is_list, verb=verb))
    return methods


def _bodies_of(shape: Callable[[HeadraceError], dict[str, Any]]) -> ErrorBody:
    return lambda error: orjson.dumps(shape(error))
