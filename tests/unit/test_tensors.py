"""The tensor codec: every datatype both ways, raw without a copy, and each mismatch is refused with a message."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headrace.errors import InvalidRequestError
from headrace.oip.tensors import (
    MAX_BYTES_ELEMENTS,
    RawTensor,
    Tensor,
    add_input,
    add_output,
    add_raw_output,
    bytes_tensor,
    decode_inputs,
    decode_outputs,
    decode_raw,
    raw_inputs,
)
from headrace_protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from headrace_transformer.inference.processed import elements_by_one

NUMPY = {
    "BOOL": "?", "INT8": "i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8", "UINT8": "u1", "UINT16": "<u2",
    "UINT32": "<u4", "UINT64": "<u8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "BF16": "<u2",
}  # fmt: skip
TYPED = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
SHORT = st.binary(max_size=20)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


def arrays_of(datatype, elements=SHORT):
    if datatype == "BYTES":
        return hnp.arrays(object, SHAPES, elements=elements, fill=st.nothing())
    return hnp.arrays(NUMPY[datatype], SHAPES)


def same(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and repr(left.tolist()) == repr(right.tolist())


def raw_request(datatype, shape, raw, name="x"):
    request = ModelInferRequest(raw_input_contents=[raw])
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    return request


def typed_request(datatype, shape, **contents):
    request = ModelInferRequest()
    tensor = request.inputs.add(name="x", datatype=datatype, shape=shape)
    tensor.contents.SetInParent()
    for field, values in contents.items():
        getattr(tensor.contents, field).extend(values)
    return request


def refused(request, text):
    for read in (decode_inputs, raw_inputs):
        with pytest.raises(InvalidRequestError) as caught:
            read(request)
        assert text in caught.value.message


@pytest.mark.parametrize("datatype", [*NUMPY, "BYTES"])
@given(data=st.data())
def test_raw_contents_come_back_the_same(datatype, data):
    array = data.draw(arrays_of(datatype))
    request, response = ModelInferRequest(), ModelInferResponse()
    add_input(request, Tensor("x", datatype, array))
    add_output(response, Tensor("x", datatype, array))
    request = ModelInferRequest.FromString(request.SerializeToString())
    for decoded in (decode_inputs(request)["x"], decode_outputs(response)["x"]):
        assert (decoded.name, decoded.datatype) == ("x", datatype)
        assert same(decoded.array, array)


@pytest.mark.parametrize("datatype", TYPED)
@given(data=st.data())
def test_typed_contents_come_back_the_same(datatype, data):
    array = data.draw(arrays_of(datatype))
    request = typed_request(datatype, array.shape, **{TYPED[datatype]: array.ravel().tolist()})
    decoded = decode_inputs(ModelInferRequest.FromString(request.SerializeToString()))["x"]
    assert decoded.datatype == datatype
    assert same(decoded.array, array)


@pytest.mark.parametrize("datatype", [*NUMPY, "BYTES"])
@given(data=st.data())
def test_raw_contents_pass_through_unchanged_and_can_be_decoded_later(datatype, data):
    array = data.draw(arrays_of(datatype))
    request, response = ModelInferRequest(), ModelInferResponse()
    add_input(request, Tensor("x", datatype, array))
    tensor = raw_inputs(request)["x"]
    assert tensor == RawTensor(datatype, array.shape, request.raw_input_contents[0])
    assert same(decode_raw("x", tensor), array)
    add_raw_output(response, "x", tensor)
    assert same(decode_outputs(response)["x"].array, array)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_is_raw_only(datatype):
    refused(typed_request(datatype, [1], fp32_contents=[1.0]), f"{datatype} can only be sent in raw contents")


@pytest.mark.parametrize("datatype", NUMPY)
def test_raw_contents_are_a_read_only_view_of_the_message(datatype):
    raw = bytes(np.dtype(NUMPY[datatype]).itemsize * 6)
    request = raw_request(datatype, [2, 3], raw)
    array = decode_inputs(request)["x"].array
    assert not array.flags.writeable
    assert not array.flags.owndata
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base, bytes), "the message's own bytes"


def test_raw_contents_are_little_endian_and_row_by_row():
    array = np.array([[1, 2], [3, 4]], dtype="<i4")
    for given_array in (array, np.asfortranarray(array), np.array([[1, 9, 2], [3, 9, 4]], dtype="<i4")[:, ::2]):
        request = ModelInferRequest()
        add_input(request, Tensor("x", "INT32", given_array))
        assert request.raw_input_contents[0] == struct.pack("<4i", 1, 2, 3, 4)


def test_bytes_elements_may_be_given_as_text():
    request = ModelInferRequest()
    add_input(request, Tensor("x", "BYTES", np.array(["é", b"\x00"], dtype=object)))
    assert request.raw_input_contents[0] == b"\x02\x00\x00\x00\xc3\xa9\x01\x00\x00\x00\x00"
    assert decode_inputs(request)["x"].array.tolist() == ["é".encode(), b"\x00"]


@given(st.lists(st.binary(max_size=10)))
def test_a_bytes_tensor_has_one_dimension(values):
    tensor = bytes_tensor("x", values)
    assert tensor.array.shape == (len(values),)
    assert tensor.array.tolist() == values


def test_arrays_must_have_the_datatype_of_their_tensor():
    with pytest.raises(InvalidRequestError, match="int64 is not INT32"):
        add_input(ModelInferRequest(), Tensor("x", "INT32", np.array([1])))


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "text"),
    [
        ("FLOAT", [1], b"1234", "unknown datatype 'FLOAT'"),
        ("", [1], b"1234", "unknown datatype ''"),
        ("INT32", [2], b"1234", "INT32 of shape [2] is 8 bytes, got 4"),
        ("INT32", [], b"", "INT32 of shape [] is 4 bytes, got 0"),
        ("FP32", [1], b"12345", "FP32 of shape [1] is 4 bytes, got 5"),
        ("INT32", [-1], b"1234", "negative size in shape [-1]"),
        ("INT32", [-2, -2], bytes(16), "negative size in shape [-2, -2]"),
        ("INT32", [1] * 33, b"1234", "33 dimensions, at most 32"),
        ("INT8", [2**62, 2**62], b"", "is too large"),
        ("BOOL", [2], b"\x01\x02", "BOOL bytes must be 0 or 1"),
        ("BYTES", [1], b"\x01", "end inside a length"),
        ("BYTES", [1], b"\xff\xff\xff\xff", "BYTES element of 4294967295 bytes ends beyond"),
        ("BYTES", [2], b"\x00\x00\x00\x00", "shape [2] holds 2 elements, got 1"),
    ],
)
def test_raw_contents_that_do_not_fit_are_refused(datatype, shape, raw, text):
    refused(raw_request(datatype, shape, raw), text)


@pytest.mark.parametrize("datatype", ["INT8", "FP64", "BYTES"])
def test_an_empty_tensor_has_its_shape_unless_that_is_beyond_memory(datatype):
    for shape in ([0], [3, 0, 2], [2**50, 0]):
        for request in (raw_request(datatype, shape, b""), typed_request(datatype, shape)):
            assert decode_inputs(request)["x"].array.shape == tuple(shape)
    for shape in ([2**62, 0], [2**40, 2**40, 0], [0, 2**63 - 1]):
        for request in (raw_request(datatype, shape, b""), typed_request(datatype, shape)):
            refused(request, f"shape {shape} is too large")


@pytest.mark.parametrize(
    ("datatype", "shape", "contents", "text"),
    [
        ("INT32", [1], {"int64_contents": [1]}, "INT32 belongs in int_contents, not in int64_contents"),
        ("FP64", [1], {"fp64_contents": [1], "fp32_contents": [1]}, "FP64 belongs in fp64_contents"),
        ("INT32", [2], {"int_contents": [1]}, "shape [2] holds 2 elements, got 1"),
        ("BYTES", [2], {"bytes_contents": [b"a"]}, "shape [2] holds 2 elements, got 1"),
        ("INT8", [1], {"int_contents": [128]}, "a value does not fit INT8"),
        ("INT16", [1], {"int_contents": [-32769]}, "a value does not fit INT16"),
        ("UINT8", [1], {"uint_contents": [256]}, "a value does not fit UINT8"),
        ("INT32", [1], {}, "shape [1] holds 1 elements, got 0"),
        ("COMPLEX", [1], {}, "unknown datatype 'COMPLEX'"),
    ],
)
def test_typed_contents_that_do_not_fit_are_refused(datatype, shape, contents, text):
    refused(typed_request(datatype, shape, **contents), text)


def test_raw_contents_must_hold_every_input():
    request = raw_request("INT8", [1], b"1")
    request.inputs.add(name="y", datatype="INT8", shape=[1])
    refused(request, "2 inputs but 1 raw contents: raw must hold every input")


def test_raw_and_typed_contents_do_not_mix():
    request = raw_request("INT8", [1], b"1")
    request.inputs[0].contents.int_contents.append(1)
    refused(request, "'x' has both raw and typed contents")


def test_names_are_required_and_unique():
    refused(raw_request("INT8", [1], b"1", name=""), "input 0 has no name")
    request = raw_request("INT8", [1], b"1")
    request.inputs.add(name="x", datatype="INT8", shape=[1])
    request.raw_input_contents.append(b"1")
    refused(request, "input 'x' is given twice")


@given(
    datatype=st.sampled_from([*NUMPY, "BYTES", "", "junk"]),
    shape=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 4), max_size=4),
    raw=st.binary(max_size=64),
)
def test_any_contents_are_decoded_or_refused(datatype, shape, raw):
    try:
        tensor = decode_inputs(raw_request(datatype, shape, raw))["x"]
    except InvalidRequestError:
        return
    assert tensor.array.shape == tuple(shape)


def test_texts_beyond_the_bound_are_refused_by_shape_without_a_look_at_them():
    raw = b"\0\0\0\0" * (MAX_BYTES_ELEMENTS + 1)
    for shape in ([MAX_BYTES_ELEMENTS + 1], [2, MAX_BYTES_ELEMENTS]):
        request = raw_request("BYTES", shape, raw)
        assert elements_by_one(request.inputs) == 0
        for read in (decode_inputs, raw_inputs):
            with pytest.raises(InvalidRequestError, match="at most 65536"):
                read(request)
    request = raw_request("BYTES", [MAX_BYTES_ELEMENTS], raw[4:])
    assert elements_by_one(request.inputs) == MAX_BYTES_ELEMENTS
    assert decode_inputs(request)["x"].array.shape == (MAX_BYTES_ELEMENTS,)
    half = MAX_BYTES_ELEMENTS // 2 + 1
    request = raw_request("BYTES", [half], raw[: 4 * half])
    request.inputs.add(name="y", datatype="BYTES", shape=[half])
    request.raw_input_contents.append(raw[: 4 * half])
    refused(request, "more than 65536 BYTES elements together")


def test_no_more_texts_are_read_than_the_shape_has():
    # The fifth ends beyond the contents, but is not looked at.
    with pytest.raises(InvalidRequestError, match="holds 3 elements, got more"):
        decode_raw("x", RawTensor("BYTES", (3,), b"\0\0\0\0" * 4 + b"\xff\0\0\0"))


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("FP32", "fp32_contents", np.linspace(-1, 1, 30_000, dtype=np.float32)),
        ("FP64", "fp64_contents", np.linspace(-1, 1, 30_000)),
        ("INT16", "int_contents", np.arange(-15_000, 15_000, dtype=np.int16)),
        ("UINT64", "uint64_contents", np.arange(2**64 - 30_000, 2**64 - 1, dtype=np.uint64)),
        ("BOOL", "bool_contents", np.arange(30_000) % 3 == 0),
    ],
)
def test_many_typed_numbers_are_decoded_exactly(datatype, field, values):
    request = ModelInferRequest()
    tensor = request.inputs.add(name="x", datatype=datatype, shape=[len(values)])
    getattr(tensor.contents, field).extend(values.tolist())
    array = decode_inputs(request)["x"].array
    assert array.dtype == values.dtype
    assert np.array_equal(array, values)


def test_a_number_that_does_not_fit_is_refused_at_any_position():
    request = ModelInferRequest()
    tensor = request.inputs.add(name="x", datatype="UINT8", shape=[20_000])
    tensor.contents.uint_contents.extend([1] * 19_999 + [256])
    with pytest.raises(InvalidRequestError, match="does not fit UINT8"):
        decode_inputs(request)
