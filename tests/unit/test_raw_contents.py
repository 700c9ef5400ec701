"""Raw contents pass by reference, and the messages are those of the generated classes."""

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from headrace.oip.raw_contents import joined, raw_contents, split
from headrace.oip.tensors import BF16, BYTES, Tensor, encode_raw
from headrace_protos import inference_pb2 as pb

LARGE = 5000
CONTENTS = st.lists(st.one_of(st.binary(max_size=40), st.integers(LARGE, 2 * LARGE).map(bytes)), max_size=4)


def request(contents=()):
    message = pb.ModelInferRequest(model_name="m", id="7", raw_input_contents=contents)
    message.inputs.add(name="x", datatype="FP32", shape=[2, 3])
    message.outputs.add(name="y")
    message.parameters["seed"].int64_param = 7
    return message


def answer(contents=()):
    message = pb.ModelInferResponse(model_name="m", id="7", raw_output_contents=contents)
    message.outputs.add(name="x", datatype="FP32", shape=[2, 3])
    return message


def without(message, field):
    message.ClearField(field)
    return message


@given(CONTENTS)
def test_a_message_is_split_and_joined_again(contents):
    for message, field in ((request(contents), "raw_input_contents"), (answer(contents), "raw_output_contents")):
        found, found_contents = split(type(message), message.SerializeToString())
        assert [bytes(each) for each in found_contents] == contents
        rest = without(found, field)
        serialized = joined(rest, found_contents)
        assert rest == without(type(message).FromString(serialized), field)
        assert type(message).FromString(serialized) == message


@pytest.mark.parametrize("message", [request([bytes(LARGE)]), answer([bytes(LARGE)])])
def test_large_contents_are_views_of_the_message(message):
    data = message.SerializeToString()
    found, [contents] = split(type(message), data)
    assert contents.obj is data
    assert found.ByteSize() < LARGE


def test_a_message_of_very_many_fields_is_parsed_whole():
    message = request([b"12345678"] * LARGE)
    found, contents = split(pb.ModelInferRequest, message.SerializeToString())
    assert list(contents) == [b"12345678"] * LARGE
    assert found == message


@given(st.binary(max_size=3 * LARGE))
def test_any_bytes_are_a_message_or_refused(data):
    try:
        expected = pb.ModelInferRequest.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            split(pb.ModelInferRequest, data)
        return
    found, contents = split(pb.ModelInferRequest, data)
    assert [bytes(each) for each in contents] == list(expected.raw_input_contents)
    assert without(found, "raw_input_contents") == without(expected, "raw_input_contents")


WIDE = np.arange(2 * LARGE, dtype=np.float32).reshape(100, 100)


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("x", "FP32", WIDE),
        Tensor("x", "FP32", WIDE.T),
        Tensor("x", "FP32", WIDE[:, ::2]),
        Tensor("x", "FP32", WIDE[:0]),
        Tensor("x", "FP32", np.float32(7).reshape(())),
        Tensor("x", BF16, WIDE.astype("<u2")),
        Tensor("x", "BOOL", WIDE % 2 == 0),
        Tensor("x", BYTES, np.array([b"one", "two"] * LARGE, dtype=object)),
    ],
    ids=("large", "transposed", "strided", "empty", "scalar", "BF16", "BOOL", "BYTES"),
)
def test_contents_are_those_of_the_array(tensor):
    assert bytes(raw_contents(tensor)) == encode_raw(tensor)


def test_contents_of_a_large_array_are_not_copied():
    contents = raw_contents(Tensor("x", "FP32", WIDE))
    assert np.shares_memory(np.frombuffer(contents, np.float32), WIDE)
