"""The JSON of V2 REST's other paths in Triton's field names and forms, and compressed bodies."""

import json
import zlib
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidRequestError, TooLargeError
from headrace_protos import inference_pb2 as pb
from headrace_transformer.frontends.v2_rest import documents, infer_body
from headrace_transformer.frontends.v2_rest.infer_body import inflated, is_small

load_request = partial(documents.repository_request, pb.RepositoryModelLoadRequest)
unload_request = partial(documents.repository_request, pb.RepositoryModelUnloadRequest)


def posted(value):
    return json.dumps(value).encode()


def test_an_index_leaves_out_unknown_fields():
    response = pb.RepositoryIndexResponse()
    response.models.add(name="a", version="1", state="READY")
    response.models.add(name="b", state="UNAVAILABLE", reason="unloaded")
    assert documents.index_of(response) == [
        {"name": "a", "version": "1", "state": "READY"},
        {"name": "b", "state": "UNAVAILABLE", "reason": "unloaded"},
    ]
    assert documents.index_request(b"").ready is False
    assert documents.index_request(posted({"ready": True})).ready is True


def test_a_load_carries_its_configuration_and_files():
    parameters = {"config": "{}", "file:1/model.py": "AAE=", "number": 3, "flag": True}
    request = load_request("m", posted({"parameters": parameters}))
    assert request.model_name == "m"
    assert request.parameters["config"].string_param == "{}"
    assert request.parameters["file:1/model.py"].bytes_param == b"\x00\x01"
    assert request.parameters["number"].int64_param == 3
    assert request.parameters["flag"].bool_param is True
    assert load_request("m", b"") == pb.RepositoryModelLoadRequest(model_name="m")
    unload = unload_request("m", posted({"parameters": {"unload_dependents": False}}))
    assert unload.parameters["unload_dependents"].WhichOneof("parameter_choice") == "bool_param"


INDEX, LOG = documents.index_request, documents.log_request
LOAD, UNLOAD, TRACE = (partial(read, "m") for read in (load_request, unload_request, documents.trace_request))


@pytest.mark.parametrize(
    ("read", "value"),
    [
        *((INDEX, value) for value in ({"ready": "yes"}, [])),
        *((LOAD, {"parameters": value}) for value in ([1], {"p": 1.5}, {"p": 2**63}, {"file:x": "?"}, {"file:x": 5})),
        (UNLOAD, {"parameters": {"p": None}}),
        *((TRACE, {"trace_rate": value}) for value in ({}, True)),
        *((LOG, value) for value in ({"log_info": None}, {"log_verbose_level": -1})),
    ],
)
def test_bodies_of_another_form_are_refused(read, value):
    with pytest.raises(InvalidRequestError):
        read(posted(value))


@pytest.mark.parametrize("read", [INDEX, LOAD, UNLOAD, TRACE, LOG])
def test_a_document_larger_than_any_settings_is_refused_unparsed(read):
    with pytest.raises(TooLargeError, match="the body has 60000000 bytes, at most 65536 are allowed"):
        read(bytes(60_000_000))


@given(st.binary(max_size=4000))
def test_a_decompressed_body_equals_the_original(data):
    assert inflated(zlib.compress(data))[1] == data
    compressed = zlib.compress(data)
    assert is_small(compressed, 1000) == (max(len(data), len(compressed)) <= 1000)


def test_a_body_that_would_become_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(infer_body, "MAX_BYTES", 1000)
    assert len(inflated(zlib.compress(bytes(1000)))[1]) == 1000
    with pytest.raises(TooLargeError, match="more than 1000 bytes"):
        inflated(zlib.compress(bytes(100_000)))


@pytest.mark.parametrize("data", [b"", b"{}", zlib.compress(b"abc" * 100)[:-5], zlib.compress(b"abc") + b"more"])
def test_a_body_in_another_coding_is_refused(data):
    with pytest.raises(InvalidRequestError, match="not compressed by deflate"):
        inflated(data)
