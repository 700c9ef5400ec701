"""Bodies of V2 REST's infer: every datatype in JSON and as binary data, both ways, and refusals with a message."""

import json
import math
import struct
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HopBrokenError, InvalidRequestError, TooLargeError
from headrace.oip import json_text
from headrace.oip.tensors import BYTES, Tensor, add_output, bytes_tensor, decode_inputs, encode_raw
from headrace_protos import inference_pb2 as pb
from headrace_transformer.frontends.v2_rest import infer_body, tensors
from headrace_transformer.frontends.v2_rest.infer_body import OutputForm, read_body, read_raw_body, write_body
from tests.unit.test_tensors import NUMPY, arrays_of, same

IN_JSON = [name for name in NUMPY if name not in ("FP16", "BF16")]


class Call(NamedTuple):
    form: OutputForm
    data: bytes = b""

    @property
    def request(self):
        return pb.ModelInferRequest.FromString(self.data)


def read(body, header_length=None):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Call(*read_body(data, "m", "", header_length))


def json_input(datatype, shape, data, name="x", **more):
    return {"name": name, "datatype": datatype, "shape": list(shape), "data": data, **more}


def refused(body, text, header_length=None):
    with pytest.raises(InvalidRequestError) as caught:
        read(body, header_length)
    assert text in caught.value.message


def with_binary(inputs, data, **fields):
    header = json.dumps({"inputs": inputs, **fields}).encode()
    return header + data, len(header)


def answer_of(call, *tensors, **fields):
    response = pb.ModelInferResponse(model_name="m", model_version="1", **fields)
    for tensor in tensors:
        add_output(response, tensor)
    return written(call, response)


def written(call, response):
    length, body = write_body(response, call.form)
    return body, length


CALL = Call(OutputForm(binary=False))
BINARY_CALL = Call(OutputForm(binary=True))


@pytest.mark.parametrize("datatype", [*NUMPY, BYTES])
@given(data=st.data())
def test_binary_data_comes_back_the_same(datatype, data):
    array = data.draw(arrays_of(datatype))
    raw = encode_raw(Tensor("x", datatype, array))
    described = {"name": "x", "datatype": datatype, "shape": list(array.shape)}
    call = read(*with_binary([described | {"parameters": {"binary_data_size": len(raw)}}], raw))
    assert same(decode_inputs(call.request)["x"].array, array)

    body, length = answer_of(BINARY_CALL, Tensor("x", datatype, array))
    (output,) = json.loads(body[:length])["outputs"]
    assert output == described | {"parameters": {"binary_data_size": len(raw)}}
    assert body[length:] == raw


@pytest.mark.parametrize("datatype", IN_JSON)
@pytest.mark.parametrize("nested", [False, True])
@given(data=st.data())
def test_numbers_in_json_come_back_the_same(datatype, nested, data):
    array = data.draw(arrays_of(datatype))
    values = array.tolist() if nested else array.ravel().tolist()
    call = read({"inputs": [json_input(datatype, array.shape, values)]})
    assert same(decode_inputs(call.request)["x"].array, array)

    body, length = answer_of(CALL, Tensor("x", datatype, array))
    assert length is None
    (output,) = json.loads(body)["outputs"]
    assert (output["datatype"], output["shape"]) == (datatype, list(array.shape))
    assert same(np.array(output["data"], array.dtype).reshape(array.shape), array)


@given(data=st.data())
def test_strings_in_json_come_back_the_same(data):
    array = data.draw(arrays_of(BYTES, st.text(max_size=20)))
    call = read({"inputs": [json_input(BYTES, array.shape, array.tolist())]})
    decoded = decode_inputs(call.request)["x"].array
    assert [item.decode() for item in decoded.ravel()] == array.ravel().tolist()
    body, _ = answer_of(CALL, Tensor("x", BYTES, array))
    assert json.loads(body)["outputs"][0]["data"] == array.ravel().tolist()


def test_large_tensors_are_the_same_across_the_bounds_of_slices(monkeypatch):
    monkeypatch.setattr(json_text, "SLICE", 3)
    monkeypatch.setattr(tensors, "SLICE", 3)
    array = np.arange(10, dtype=np.float32) / 7
    array[4] = np.nan
    call = read(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[10],"data":%s}]}' % json_text.dump_array(array))
    assert same(decode_inputs(call.request)["x"].array, array)
    words = [str(number) for number in range(7)]
    call = read({"inputs": [json_input(BYTES, [7], words)]})
    assert decode_inputs(call.request)["x"].array.tolist() == [word.encode() for word in words]


def test_json_and_binary_data_mix_in_the_order_of_the_tensors():
    inputs = [
        {"name": "a", "datatype": "INT8", "shape": [2], "parameters": {"binary_data_size": 2}},
        json_input("FP32", [1], [0.5], name="b"),
        {"name": "c", "datatype": BYTES, "shape": [1], "parameters": {"binary_data_size": 6}},
    ]
    call = read(*with_binary(inputs, b"\x01\x02" + struct.pack("<I", 2) + b"ok"))
    tensors = decode_inputs(call.request)
    assert [tensor.array.tolist() for tensor in tensors.values()] == [[1, 2], [0.5], [b"ok"]]
    assert list(tensors) == ["a", "b", "c"]


def test_outputs_have_the_requested_order_and_form():
    outputs = [
        {"name": "c"},
        {"name": "a", "parameters": {"binary_data": True}},
        {"name": "b", "parameters": {"binary_data": False}},
    ]
    call = read({"id": "7", "inputs": [], "outputs": outputs, "parameters": {"binary_data_output": True}})
    assert [output.name for output in call.request.outputs] == ["c", "a", "b"]
    assert not call.request.parameters
    tensors = [Tensor(name, "INT8", np.array([at], np.int8)) for at, name in enumerate("abcd")]
    body, length = answer_of(call, *tensors, id="7")
    assert json.loads(body[:length]) == {
        "id": "7",
        "model_name": "m",
        "model_version": "1",
        "outputs": [
            {"name": "c", "datatype": "INT8", "shape": [1], "parameters": {"binary_data_size": 1}},
            {"name": "a", "datatype": "INT8", "shape": [1], "parameters": {"binary_data_size": 1}},
            {"name": "b", "datatype": "INT8", "shape": [1], "data": [1]},
        ],
    }
    assert body[length:] == b"\x02\x00"
    # By default outputs are JSON, and all of them are sent.
    body, length = answer_of(read({"inputs": []}), *tensors)
    assert length is None
    assert [output["data"] for output in json.loads(body)["outputs"]] == [[0], [1], [2], [3]]


def test_a_bare_value_is_a_tensor_of_one_element():
    assert decode_inputs(read({"inputs": [json_input("INT32", [1], 5)]}).request)["x"].array.tolist() == [5]


def test_nan_and_infinity_are_read_and_written_as_triton_does():
    call = read(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[4],"data":[NaN,Infinity,-Infinity,1]}]}')
    array = decode_inputs(call.request)["x"].array
    assert repr(array.tolist()) == "[nan, inf, -inf, 1.0]"
    assert b'"data":[NaN,Infinity,-Infinity,1.0]' in answer_of(CALL, Tensor("x", "FP32", array))[0]


def test_parameters_are_passed_on_with_the_request():
    parameters = {"sequence_id": 7, "sequence_start": True, "timeout": 1.5, "name": "n", "big": 2**63}
    request = read({"id": "i", "inputs": [], "parameters": parameters}).request
    sent = {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in request.parameters.items()}
    assert (request.id, sent) == ("i", parameters)


def test_parameters_of_a_response_are_returned_except_those_of_streams():
    response = pb.ModelInferResponse(model_name="m")
    response.parameters["finish_reason"].string_param = "stop"
    response.parameters["triton_final_response"].bool_param = True
    assert json.loads(written(CALL, response)[0])["parameters"] == {"finish_reason": "stop"}


INPUTS = {
    "not JSON": (b"{", "not JSON"),
    "not an object": (b"[]", "not a JSON object"),
    "not UTF-8": (b'{"id":"\xff"}', "not JSON"),
    "nested beyond reason": (b'{"inputs":' + b"[" * 100_000, "not JSON"),
    "half of a surrogate pair beside a name": (rb'{"inputs":[{"name":"x\ud800","data":[NaN]}]}', "not JSON"),
    "such a name of a field": (rb'{"inputs":[NaN],"\udfff":1}', "not JSON"),
    "nested beyond reason with a name": (b'{"inputs":[NaN,' + b"[" * 100_000, "not JSON"),
    "no inputs": ({}, "inputs: Field required"),
    "inputs of another type": ({"inputs": {}}, "inputs"),
    "too many inputs": ({"inputs": [json_input("INT8", [0], [])] * 1025}, "inputs: List should have at most 1024"),
    "no name": ({"inputs": [json_input("INT8", [1], [1], name="")]}, "inputs.0.name"),
    "the same name": ({"inputs": [json_input("INT8", [1], [1])] * 2}, "'x' is given twice"),
    "no data": ({"inputs": [json_input("INT8", [1], None)]}, "neither data nor binary_data_size"),
    "unknown datatype": ({"inputs": [json_input("INT7", [1], [1])]}, "unknown datatype 'INT7'"),
    "FP16": ({"inputs": [json_input("FP16", [1], [1.0])]}, "FP16 has no JSON form"),
    "BF16": ({"inputs": [json_input("BF16", [1], [1.0])]}, "BF16 has no JSON form"),
    "negative size": ({"inputs": [json_input("INT8", [-1], [1])]}, "inputs.0.shape.0"),
    "size of truth": ({"inputs": [json_input("INT8", [True], [1])]}, "inputs.0.shape.0"),
    "a fraction for a size": ({"inputs": [json_input("INT8", [1.5], [1])]}, "inputs.0.shape.0"),
    "33 dimensions": ({"inputs": [json_input("INT8", [1] * 33, [1])]}, "inputs.0.shape"),
    "a shape larger than any memory": ({"inputs": [json_input("FP64", [2**62], [1])]}, "too large"),
    "a shape larger than the data": ({"inputs": [json_input("FP64", [2**40], [1])]}, "elements, got 1"),
    "an empty shape of immense others": ({"inputs": [json_input("FP64", [0, 2**62], [])]}, "too large"),
    "too few elements": ({"inputs": [json_input("INT8", [3], [1, 2])]}, "shape [3] holds 3 elements, got 2"),
    "ragged lists": ({"inputs": [json_input("INT8", [3], [[1, 2], [3]])]}, "differ in length"),
    "lists and elements": ({"inputs": [json_input("INT8", [2], [[1], 2])]}, "differ in length or in depth"),
    "elements and lists": ({"inputs": [json_input("INT8", [2], [1, [2]])]}, "INT8 takes whole numbers"),
    "data nested 40 deep": ({"inputs": [json_input("INT8", [1], json.loads("[" * 40 + "1" + "]" * 40))]}, "32 deep"),
    "too small": ({"inputs": [json_input("INT8", [1], [-129])]}, "does not fit INT8"),
    "too large": ({"inputs": [json_input("UINT16", [1], [65536])]}, "does not fit UINT16"),
    "below zero": ({"inputs": [json_input("UINT64", [1], [-1])]}, "does not fit UINT64"),
    "beyond INT64": ({"inputs": [json_input("INT64", [1], [2**63])]}, "does not fit INT64"),
    "beyond 64 bits": ({"inputs": [json_input("UINT64", [1], [2**64])]}, "UINT64 takes whole numbers"),
    "a fraction for a whole number": ({"inputs": [json_input("INT64", [1], [1.5])]}, "INT64 takes whole numbers"),
    "truth for a number": ({"inputs": [json_input("INT64", [2], [1, True])]}, "INT64 takes whole numbers"),
    "truth for a float": ({"inputs": [json_input("FP32", [1], [True])]}, "FP32 takes numbers"),
    "a number for truth": ({"inputs": [json_input("BOOL", [1], [1])]}, "BOOL takes true or false"),
    "text for a number": ({"inputs": [json_input("FP32", [1], ["1"])]}, "FP32 takes numbers"),
    "null for a number": ({"inputs": [json_input("FP32", [1], [None])]}, "FP32 takes numbers"),
    "a number for text": ({"inputs": [json_input(BYTES, [1], [1])]}, "BYTES takes strings"),
    "beyond FP32": ({"inputs": [json_input("FP32", [1], [1e39])]}, "does not fit FP32"),
    "beyond FP64": (b'{"inputs":[{"name":"x","datatype":"FP64","shape":[1],"data":[1e400]}]}', "not JSON"),
    "NaN for a whole number": (b'{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"data":[NaN]}]}', "whole"),
    "shared memory": (
        {"inputs": [json_input("INT8", [1], None, parameters={"shared_memory_region": "r"})]},
        "shared memory is not supported",
    ),
    "classification": (
        {"inputs": [], "outputs": [{"name": "y", "parameters": {"classification": 3}}]},
        "classification extension is not supported",
    ),
    "an output twice": ({"inputs": [], "outputs": [{"name": "y"}] * 2}, "'y' is given twice"),
    "binary_data of another type": ({"inputs": [], "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, "tr"),
    "a parameter of the server's": ({"inputs": [], "parameters": {"triton_x": 1}}, "begin with triton_"),
    "a list as parameter": ({"inputs": [], "parameters": {"p": [1]}}, "'p' must be"),
    "an object as parameter": ({"inputs": [], "parameters": {"p": {}}}, "'p' must be"),
    "null as parameter": ({"inputs": [], "parameters": {"p": None}}, "'p' must be"),
    "an id that is no text": ({"id": 5, "inputs": []}, "id"),
}  # fmt: skip


@pytest.mark.parametrize("case", INPUTS)
def test_a_body_that_cannot_be_served_is_refused(case):
    refused(*INPUTS[case])


def binary_input(size, shape=(2,), datatype="INT8", **more):
    return {"name": "x", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}, **more}


BINARY = {
    "a size beyond the body": ([binary_input(2**62)], b"12", "the body has 2 bytes left"),
    "a negative size": ([binary_input(-1)], b"12", "must be a whole number"),
    "a size that is no number": ([binary_input("2")], b"12", "must be a whole number"),
    "a size of truth": ([binary_input(True)], b"1", "must be a whole number"),
    "fewer bytes than the shape": ([binary_input(1)], b"1", "is 2 bytes, binary_data_size is 1"),
    "a shape beyond any body": ([binary_input(2, [2**40])], b"12", f"is {2**40} bytes"),
    "data as well": ([binary_input(2, data=[1, 2])], b"12", "both data and binary_data_size"),
    "bytes that no input claims": ([binary_input(2)], b"123", "take 2 bytes of binary data, the body has 3"),
    "unknown datatype": ([binary_input(2, datatype="INT7")], b"12", "unknown datatype"),
}


@pytest.mark.parametrize("case", BINARY)
def test_binary_data_that_does_not_fit_is_refused(case):
    inputs, data, text = BINARY[case]
    body, length = with_binary(inputs, data)
    refused(body, text, length)


def test_a_header_longer_than_the_body_is_refused():
    refused(b"{}", "inference-header-content-length is 1000, the body has 2 bytes", 1000)
    refused(b'{"inputs":[]}', "not JSON", 5)


def metadata(*inputs):
    tensor = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name="m", inputs=[tensor(name=name, datatype=datatype, shape=shape) for name, datatype, shape in inputs]
    )


def test_a_raw_binary_request_is_the_one_input_of_the_model():
    values = np.arange(6, dtype="<f4")
    call = Call(*read_raw_body(values.tobytes(), "m", "1", metadata(("x", "FP32", [-1, -1, 3]))))
    assert decode_inputs(call.request)["x"].array.tolist() == [values.reshape(2, 3).tolist()]
    assert (call.request.model_name, call.request.model_version, call.form.binary) == ("m", "1", True)
    call = Call(*read_raw_body(b"word", "m", "", metadata(("x", BYTES, [1]))))
    assert decode_inputs(call.request)["x"].array.tolist() == [b"word"]
    for inputs, body, text in (
        ([], b"", "has 0"),
        ([("x", "FP32", [-1]), ("y", "FP32", [-1])], b"", "has 2"),
        ([("x", "FP32", [-1])], b"123", "not a whole number of elements"),
        ([("x", "FP32", [-1, 3])], b"1234", "do not fill the shape [-1, 3]"),
        ([("x", "FP32", [0, -1])], b"1234", "do not fill the shape"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            read_raw_body(body, "m", "", metadata(*inputs))
        assert text in caught.value.message


def test_an_output_that_json_cannot_hold_is_refused_with_advice():
    for tensor in (Tensor("x", "FP16", np.zeros(1, "<f2")), bytes_tensor("x", [b"\xff"])):
        with pytest.raises(InvalidRequestError, match="ask for binary_data"):
            answer_of(CALL, tensor)
        assert answer_of(BINARY_CALL, tensor)[0].endswith(encode_raw(tensor))


def test_an_output_that_the_model_does_not_give_is_refused():
    call = read({"inputs": [], "outputs": [{"name": "y"}]})
    with pytest.raises(InvalidRequestError, match="unknown output 'y'; the model gives x"):
        answer_of(call, bytes_tensor("x", [b""]))


def test_an_answer_too_large_for_the_gateway_is_refused_before_it_is_written(monkeypatch):
    monkeypatch.setattr(infer_body, "MAX_BODY_BYTES", 100)
    monkeypatch.setattr(infer_body, "json_of", None)
    for call in (CALL, BINARY_CALL):
        with pytest.raises(TooLargeError, match="at most 100"):
            answer_of(call, Tensor("x", "INT8", np.zeros(101, np.int8)))


def test_malformed_contents_of_an_output_are_the_models_fault():
    response = pb.ModelInferResponse(model_name="m", raw_output_contents=[b"123"])
    response.outputs.add(name="x", datatype="FP32", shape=[1])
    with pytest.raises(HopBrokenError, match="4 bytes, got 3", check=lambda error: error.hop == "predictor"):
        written(CALL, response)
    response.outputs[0].datatype = "INT7"
    with pytest.raises(HopBrokenError, match="unknown datatype"):
        written(CALL, response)


def test_typed_contents_of_another_server_are_written_too():
    response = pb.ModelInferResponse(model_name="m")
    response.outputs.add(name="x", datatype="INT32", shape=[2]).contents.int_contents.extend([1, -1])
    assert json.loads(written(CALL, response)[0])["outputs"][0]["data"] == [1, -1]
    assert written(BINARY_CALL, response)[0].endswith(struct.pack("<ii", 1, -1))


@given(st.binary(max_size=200), st.one_of(st.none(), st.integers(1, 300)))
def test_every_body_becomes_a_call_or_is_refused(body, length):
    with suppress(InvalidRequestError):
        read_body(body, "m", "", length)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=10,
    ),
    st.sampled_from([*NUMPY, BYTES]),
    st.lists(st.integers(0, 4), max_size=3),
)
def test_any_data_becomes_a_tensor_or_is_refused(data, datatype, shape):
    try:
        call = read({"inputs": [json_input(datatype, shape, data)]})
    except InvalidRequestError:
        return
    assert decode_inputs(call.request)["x"].array.size == math.prod(shape)


def test_an_object_of_numbers_is_written_as_orjson_does():
    array = np.array([0.1, 1e-30, 3e38], np.float32)
    assert json_text.dump_array(array) == orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
