"""Bodies between transformer and a server of V2 REST: writing, reading, and whose fault a malformed one is."""

import json
from contextlib import suppress

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headrace.errors import HopBrokenError, InvalidRequestError, TooLargeError
from headrace.oip.tensors import Tensor, add_input, decode_outputs
from headrace_protos import inference_pb2 as pb
from services.transformer.predictors.answers import BrokenAnswerError
from services.transformer.predictors.v2_rest import bodies
from services.transformer.predictors.v2_rest.bodies import binary_body, read_answer, split_request, write_json_body


def request_of(*tensors, **fields):
    request = pb.ModelInferRequest(model_name="m", **fields)
    for tensor in tensors:
        add_input(request, tensor)
    return request.SerializeToString()


def answer(*outputs, **fields):
    return orjson.dumps({"model_name": "m", "outputs": outputs, **fields})


def read(body, header_length=None):
    return pb.ModelInferResponse.FromString(read_answer(body, header_length)[1])


HALVES = {"FP16": np.uint16, "BF16": np.uint16}


@pytest.mark.parametrize("datatype", HALVES)
@given(bits=hnp.arrays(np.uint16, st.integers(0, 20)))
def test_half_precision_numbers_are_equal_after_writing_and_reading(datatype, bits):
    exponent = 0x7C00 if datatype == "FP16" else 0x7F80
    array = np.where((bits & exponent) == exponent, bits & 0x8000, bits).astype(np.uint16)  # No NaN.
    if datatype == "FP16":
        array = array.view(np.float16)
    _, body = write_json_body(request_of(Tensor("x", datatype, array)))
    (entry,) = json.loads(body)["inputs"]
    assert all(type(number) is float for number in entry["data"])
    assert read(answer(entry)).raw_output_contents[0] == array.tobytes()


@pytest.mark.parametrize("number", [3.4e38, 1e39])
def test_a_number_beyond_half_precision_is_the_servers_fault(number):
    for datatype in HALVES:
        with pytest.raises(BrokenAnswerError, match="does not fit"):
            read(answer({"name": "x", "datatype": datatype, "shape": [1], "data": [number]}))


def test_nan_and_infinity_are_read():
    array = np.array([np.nan, np.inf, -np.inf], np.float32)
    for datatype, given_array in (("FP32", array), ("FP16", array.astype(np.float16))):
        _, body = write_json_body(request_of(Tensor("x", datatype, given_array)))
        echoed = json.dumps({"outputs": json.loads(body)["inputs"]}).encode()
        back = decode_outputs(read(echoed))["x"]
        assert repr(back.array.tolist()) == repr(given_array.tolist())


def test_a_binary_body_copies_no_tensor():
    data = request_of(Tensor("x", "INT8", np.arange(5, dtype=np.int8)), id="r")
    length, parts = binary_body(*split_request(data))
    assert json.loads(parts[0]) == {
        "id": "r",
        "parameters": {"binary_data_output": True},
        "inputs": [{"name": "x", "parameters": {"binary_data_size": 5}, "datatype": "INT8", "shape": [5]}],
    }
    assert length == len(parts[0])
    assert parts[1].obj is data


def test_a_request_for_classification_is_passed_on():
    request = pb.ModelInferRequest(model_name="m")
    request.outputs.add(name="x").parameters["classification"].int64_param = 3
    _, parts = binary_body(*split_request(request.SerializeToString()))
    assert json.loads(parts[0])["outputs"] == [{"name": "x", "parameters": {"classification": 3}}]


def test_binary_and_json_outputs_mix():
    outputs = [
        {"name": "a", "datatype": "INT8", "shape": [2], "parameters": {"binary_data_size": 2}},
        {"name": "b", "datatype": "BYTES", "shape": [1], "data": ["é"]},
    ]
    head = answer(*outputs)
    tensors = decode_outputs(read(head + b"\x01\x02", len(head)))
    assert tensors["a"].array.tolist() == [1, 2]
    assert tensors["b"].array.tolist() == ["é".encode()]


def test_too_large_bodies_are_refused_in_both_directions(monkeypatch):
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 100)
    with pytest.raises(TooLargeError, match="as JSON"):
        write_json_body(request_of(Tensor("x", "INT8", np.full(60, 7, np.int8))))
    with pytest.raises(TooLargeError) as caught:
        read(answer({"name": "x", "datatype": "FP64", "shape": [13], "data": [0] * 13}))
    assert caught.value.hop == "predictor"


@pytest.mark.parametrize("data", [b"\xff", b"\x3a\x7f", b"\x0a\x01\xff"])
def test_malformed_requests_are_refused(data):
    with pytest.raises(InvalidRequestError):
        binary_body(*split_request(data))
    with pytest.raises(InvalidRequestError):
        write_json_body(data)


def test_a_request_of_too_many_fields_is_refused():
    with pytest.raises(InvalidRequestError, match="more than 4096"):
        split_request(b"\x3a\x00" * 5000)


NAMES = st.sampled_from(["outputs", "name", "datatype", "shape", "data", "parameters", "id"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
)


@given(
    body=st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()),
    length=st.none() | st.integers(0, 250),
)
def test_every_answer_becomes_a_response_or_the_hops_fault(body, length):
    with suppress(HopBrokenError):
        read(body, length)
