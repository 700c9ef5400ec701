"""The methods of OpenAI's API for the HTTP server.

The gateway rewrites each path to the name of its method (envoy/envoy.yaml), which is in records, spans and metrics.
"""

from __future__ import annotations

import orjson
from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty

from millrace.errors import MillraceError
from millrace.rpc.http2.methods import HttpMethod
from millrace_protos.rest_pb2 import DESCRIPTOR, ModelRequest
from services.transformer.frontends.openai.errors import openai_error
from services.transformer.frontends.openai.servicer import OpenAIServicer

_SERVICE = DESCRIPTOR.services_by_name["OpenAI"]


def _body(data: bytes) -> HttpBody:
    return HttpBody(data=data)


def _model(name: bytes) -> ModelRequest:
    return ModelRequest(model=name.decode())


def _empty(_: bytes) -> Empty:
    return Empty()


# By the type of the request in protos/rest.proto: its parser, and whether it is the body.
_READING = {
    HttpBody.DESCRIPTOR.full_name: (_body, True),
    ModelRequest.DESCRIPTOR.full_name: (_model, False),
    Empty.DESCRIPTOR.full_name: (_empty, False),
}


def error_body(error: MillraceError) -> bytes:
    return orjson.dumps(openai_error(error))


def http_methods(servicer: OpenAIServicer) -> list[HttpMethod]:
    """Every method of the service; the model of a GET is in the path, or in the query's `model`."""
    methods = []
    for method in _SERVICE.methods:
        parse, takes_body = _READING[method.input_type.full_name]
        name = f"{_SERVICE.full_name}/{method.name}"
        methods.append(HttpMethod(name, getattr(servicer, method.name), parse, takes_body, parameter="model"))
    return methods
