"""Triton's generate extension: which field becomes a tensor, which a parameter, and what an answer looks like."""

import json

import numpy as np
import pytest

from headrace.errors import InvalidRequestError
from headrace.oip.tensors import BYTES, Tensor, add_output, bytes_tensor, decode_inputs
from headrace_protos import inference_pb2 as pb
from headrace_transformer.frontends.v2_rest.generate_body import read_generate, write_answer


def metadata(**inputs):
    tensor = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name="m",
        inputs=[tensor(name=name, datatype=datatype, shape=shape) for name, (datatype, shape) in inputs.items()],
    )


TEXT = metadata(
    text_input=(BYTES, [1]),
    stream=("BOOL", [1]),
    sampling_parameters=(BYTES, [1]),
    exclude_input_in_output=("BOOL", [1]),
)


def read(model, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = pb.ModelInferRequest.FromString(read_generate(data, "m", "1", model.SerializeToString())[1])
    tensors = {name: tensor.array for name, tensor in decode_inputs(request).items()}
    parameters = {
        name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in request.parameters.items()
    }
    return request, tensors, parameters


def refused(model, body, text):
    with pytest.raises(InvalidRequestError) as caught:
        read(model, body)
    assert text in caught.value.message


@pytest.mark.parametrize("nested", [False, True])
def test_fields_of_a_text_model_are_its_inputs_or_parameters_at_either_level(nested):
    options = {"stream": False, "temperature": 0.5, "max_tokens": 7, "exclude_input_in_output": None}
    body = {"text_input": "Once", "id": "7"} | ({"parameters": options} if nested else options)
    request, tensors, parameters = read(TEXT, body)
    assert (request.model_name, request.model_version, request.id) == ("m", "1", "7")
    assert {name: array.tolist() for name, array in tensors.items()} == {"text_input": [b"Once"], "stream": [False]}
    assert parameters == {"temperature": 0.5, "max_tokens": 7}


def test_values_that_a_parameter_cannot_hold_go_into_the_sampling_parameters():
    _, tensors, parameters = read(TEXT, {"text_input": "Once", "stop": ["a", "b"], "seed": 1})
    assert json.loads(tensors["sampling_parameters"][0]) == {"stop": ["a", "b"]}
    assert parameters == {"seed": 1}
    _, tensors, _ = read(
        TEXT, {"text_input": "Once", "parameters": {"sampling_parameters": {"seed": 1}, "stop": ["a"]}}
    )
    assert json.loads(tensors["sampling_parameters"][0]) == {"seed": 1, "stop": ["a"]}
    _, tensors, _ = read(TEXT, {"text_input": "Once", "sampling_parameters": '{"seed": 2}'})
    assert tensors["sampling_parameters"].tolist() == [b'{"seed": 2}']
    body = {"sampling_parameters": "{}", "stop": ["a"]}
    refused(TEXT, body, "'stop' is a list or an object: put it into sampling_parameters")


SHAPED = metadata(
    open=("INT64", [-1]), rows=("FP32", [-1, 3]), batch=("FP32", [-1, -1]), fixed=("INT32", [1, 2]), word=(BYTES, [1])
)


@pytest.mark.parametrize(
    ("field", "value", "array"),
    [
        ("open", 5, [5]),
        ("open", [5, 6], [5, 6]),
        ("open", [], []),
        ("rows", [1, 2, 3, 4, 5, 6], [[1, 2, 3], [4, 5, 6]]),
        ("rows", [[1, 2, 3]], [[1, 2, 3]]),
        ("batch", [1, 2], [[1, 2]]),
        ("batch", 1, [[1]]),
        ("batch", [[1], [2]], [[1], [2]]),
        ("fixed", [1, 2], [[1, 2]]),
        ("word", "ä", ["ä".encode()]),
        ("word", ["a"], [b"a"]),
    ],
)
def test_values_and_lists_fill_the_declared_shape(field, value, array):
    _, tensors, parameters = read(SHAPED, {field: value})
    assert tensors[field].tolist() == array
    assert parameters == {}


@pytest.mark.parametrize(
    ("model", "body", "text"),
    [
        (SHAPED, {"rows": [1, 2]}, "2 elements do not fill the shape [-1, 3]"),
        (SHAPED, {"fixed": 1}, "1 elements do not fill the shape [1, 2]"),
        (SHAPED, {"word": ["a", "b"]}, "do not fill the shape [1]"),
        (SHAPED, {"open": 1.5}, "INT64 takes whole numbers"),
        (SHAPED, {"open": {"a": 1}}, "INT64 takes whole numbers"),
        (SHAPED, {"other": [1]}, "parameter 'other' must be"),
        (SHAPED, {"open": 1, "parameters": {"open": 2}}, "'open' is given twice"),
        (SHAPED, {"parameters": [1]}, "parameters must be an object"),
        (SHAPED, {"triton_final_response": True}, "begin with triton_"),
        (SHAPED, {"id": 5}, "id must be a string"),
        (SHAPED, b"[]", "not a JSON object"),
        (SHAPED, b"{", "not JSON"),
        (metadata(), {"x": {"a": 1}}, "'x' must be a number"),
        (metadata(), {"x": [1, "a"]}, "'x' must be a number"),
        (metadata(half=("FP16", [1])), {"half": 1}, "FP16 has no JSON form"),
        (metadata(none=("INT8", [0, -1])), {"none": 1}, "do not fill the shape"),
    ],
)
def test_fields_that_fit_no_input_are_refused(model, body, text):
    refused(model, body, text)


def test_fields_of_a_model_that_declares_nothing_are_tensors():
    body = {"word": "a", "ids": [1, 2], "rows": [[0.5, 1]], "flag": True, "parameters": {"n": 3}}
    request, tensors, parameters = read(metadata(), body)
    assert {name: array.tolist() for name, array in tensors.items()} == {
        "word": [b"a"],
        "ids": [1, 2],
        "rows": [[0.5, 1.0]],
        "flag": [True],
    }
    assert [tensor.datatype for tensor in request.inputs] == [BYTES, "INT64", "FP64", "BOOL"]
    assert parameters == {"n": 3}


def test_an_empty_body_is_a_request_without_inputs():
    assert read(metadata(), b"")[1:] == ({}, {})


def test_an_answer_has_each_output_by_its_name():
    response = pb.ModelInferResponse(model_name="m", model_version="1", id="7")
    response.parameters["finish_reason"].string_param = "stop"
    response.parameters["triton_final_response"].bool_param = True
    add_output(response, bytes_tensor("text_output", ["fin\u2014".encode()]))
    add_output(response, Tensor("ids", "INT32", np.array([[1, 2]], np.int32)))
    add_output(response, Tensor("scalar", "FP32", np.array(0.5, np.float32)))
    add_output(response, Tensor("nothing", "INT8", np.zeros(0, np.int8)))
    assert json.loads(write_answer(response)[1]) == {
        "id": "7",
        "model_name": "m",
        "model_version": "1",
        "finish_reason": "stop",
        "text_output": "fin\u2014",
        "ids": [1, 2],
        "scalar": 0.5,
        "nothing": [],
    }
