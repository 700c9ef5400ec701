"""The methods of the Batch API for the HTTP server; the gateway rewrites each path to a method's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

from google.api.httpbody_pb2 import HttpBody

from headrace.rpc.http2.methods import HttpMethod
from headrace_protos.rest_pb2 import DESCRIPTOR, ListRequest, ObjectRequest
from headrace_transformer.batches.servicer import BatchesServicer
from headrace_transformer.frontends.openai.http_methods import whole_number

_SERVICE = DESCRIPTOR.services_by_name["Batches"]
_VERBS = {"DeleteFile": "DELETE", "CancelBatch": "POST"}


def _object(name: bytes) -> ObjectRequest:
    return ObjectRequest(id=name.decode())


def _list(query: bytes) -> ListRequest:
    """The parameters of a list; others are ignored."""
    values = dict(parse_qsl(query.decode()))
    texts = {name: values[name] for name in ("after", "order", "purpose") if name in values}
    return ListRequest(limit=whole_number(values, "limit"), **texts)


_READING: dict[str, Callable[[bytes], Any]] = {
    HttpBody.DESCRIPTOR.full_name: bytes,
    ObjectRequest.DESCRIPTOR.full_name: _object,
    ListRequest.DESCRIPTOR.full_name: _list,
}


def http_methods(servicer: BatchesServicer) -> list[HttpMethod]:
    """Every method of the service; an id is in the path."""
    methods = []
    for method in _SERVICE.methods:
        of = method.input_type.full_name
        methods.append(
            HttpMethod(
                f"{_SERVICE.full_name}/{method.name}",
                getattr(servicer, method.name),
                _READING[of],
                takes_body=of == HttpBody.DESCRIPTOR.full_name,
                takes_query=of == ListRequest.DESCRIPTOR.full_name,
                verb=_VERBS.get(method.name, ""),
            )
        )
    return methods
