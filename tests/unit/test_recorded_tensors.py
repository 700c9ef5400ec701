"""Tensors of a message are recorded alike in whichever form they were sent, and no message makes recording fail."""

import struct
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.oip.tensors import Tensor, add_input, add_output
from headrace.payload.encoding import Encoder
from headrace.payload.parts import Begin, Chunk, DeferredTensors, OpenRecord, size_of
from headrace.payload.rules import PayloadRules
from headrace.payload.tensors import answer_tensors, request_tensors, streamed_tensors
from headrace_protos import inference_pb2 as pb
from headrace_protos.headrace_pb2 import PayloadRecord

TYPED = {
    "BOOL": ("bool_contents", "?", [True, False]),
    "INT8": ("int_contents", "<i1", [-128, 0, 127]),
    "INT16": ("int_contents", "<i2", [-(2**15), 5]),
    "INT32": ("int_contents", "<i4", [-(2**31), -1, 2**31 - 1]),
    "INT64": ("int64_contents", "<i8", [-(2**63), -1, 0, 2**63 - 1]),
    "UINT8": ("uint_contents", "<u1", [0, 255]),
    "UINT16": ("uint_contents", "<u2", [2**16 - 1]),
    "UINT32": ("uint_contents", "<u4", [2**32 - 1, 127, 128]),
    "UINT64": ("uint64_contents", "<u8", [2**64 - 1, 0]),
    "FP32": ("fp32_contents", "<f4", [1.5, -2.0]),
    "FP64": ("fp64_contents", "<f8", [1e300]),
}


def typed(datatype, field, values):
    request = pb.ModelInferRequest(model_name="m")
    tensor = request.inputs.add(name="t", datatype=datatype, shape=[len(values)])
    getattr(tensor.contents, field).extend(values)
    return request


def contents_of(tensors):
    return [(t.name, t.datatype, tuple(t.shape), None if t.data is None else bytes(t.data)) for t in tensors.read()]


@pytest.mark.parametrize("datatype", TYPED)
def test_typed_contents_are_recorded_as_raw_ones(datatype):
    field, dtype, values = TYPED[datatype]
    expected = [("t", datatype, (len(values),), np.array(values, dtype).tobytes())]
    request = typed(datatype, field, values)
    assert (
        contents_of(request_tensors(request)) == contents_of(request_tensors(request.SerializeToString())) == expected
    )
    raw = pb.ModelInferRequest()
    add_input(raw, Tensor("t", datatype, np.array(values, dtype)))
    assert contents_of(request_tensors(raw.SerializeToString())) == expected


def test_raw_contents_are_not_copied():
    request = pb.ModelInferRequest()
    add_input(request, Tensor("t", "UINT8", np.zeros(1 << 20, np.uint8)))
    data = request.SerializeToString()
    tensors = request_tensors(data)
    (tensor,) = tensors.read()
    assert isinstance(tensor.data, memoryview)
    assert tensor.data.obj is data
    assert tensors.size == len(data)


def test_tensors_of_whole_and_of_streamed_answers_are_recorded():
    answer = pb.ModelInferResponse(model_name="m")
    add_output(answer, Tensor("o", "INT32", np.array([3], "<i4")))
    expected = [("o", "INT32", (1,), b"\x03\0\0\0")]
    streamed = pb.ModelStreamInferResponse(infer_response=answer).SerializeToString()
    for tensors in (
        answer_tensors(answer),
        answer_tensors(answer.SerializeToString()),
        streamed_tensors(answer),
        streamed_tensors(streamed),
    ):
        assert contents_of(tensors) == expected
    assert contents_of(streamed_tensors(pb.ModelStreamInferResponse().SerializeToString())) == []


def test_tensors_that_cannot_be_read_are_recorded_without_contents():
    missing_raw = pb.ModelInferRequest(raw_input_contents=[b"a"])
    missing_raw.inputs.add(name="a", datatype="FP16", shape=[1])
    missing_raw.inputs.add(name="b", datatype="FP16", shape=[1])
    assert [data for *_, data in contents_of(request_tensors(missing_raw))] == [None, None]
    unknown = pb.ModelInferRequest()
    unknown.inputs.add(name="a", datatype="COMPLEX", shape=[1]).contents.fp32_contents.append(1)
    assert [data for *_, data in contents_of(request_tensors(unknown))] == [None]
    large = typed("INT64", "int64_contents", [2**62] * (1 << 18))
    assert [
        (data, tensor.size)
        for (*_, data), tensor in zip(contents_of(request_tensors(large)), request_tensors(large).read(), strict=True)
    ] == [(None, 8 << 18)]


def heads(tensors, most_bytes=0):
    """The recorded tensors without large contents, with the sizes of these."""
    taken = tensors.heads(most_bytes) if tensors.heads else tensors
    read = taken.read() if isinstance(taken, DeferredTensors) else taken
    return [(t.name, t.datatype, tuple(t.shape), t.data and bytes(t.data), t.size) for t in read]


@pytest.mark.parametrize("datatype", TYPED)
def test_heads_have_the_sizes_of_contents_that_are_not_kept(datatype):
    field, dtype, values = TYPED[datatype]
    array = np.array(values * 10_000, dtype)
    expected = [("t", datatype, array.shape, None, array.nbytes)]
    raw = pb.ModelInferRequest()
    add_input(raw, Tensor("t", datatype, array))
    for request in (typed(datatype, field, array.tolist()), raw):
        assert heads(request_tensors(request)) == heads(request_tensors(request.SerializeToString())) == expected


def test_heads_have_contents_up_to_a_size_and_do_not_keep_the_message():
    request = pb.ModelInferRequest(model_name="m", id="r")
    for count in (8, 100_000, 16):
        add_input(request, Tensor(f"of {count}", "UINT8", np.full(count, 7, np.uint8)))
    data = request.SerializeToString()
    references = sys.getrefcount(data)
    taken = request_tensors(data).heads(16)
    assert sys.getrefcount(data) == references
    assert size_of(taken) < 1000
    assert heads(request_tensors(data), 16) == [
        ("of 8", "UINT8", (8,), b"\7" * 8, 8),
        ("of 100000", "UINT8", (100_000,), None, 100_000),
        ("of 16", "UINT8", (16,), b"\7" * 16, 16),
    ]


def test_heads_of_small_typed_contents_have_them():
    request = typed("INT64", "int64_contents", [1, -2])
    add_text = request.inputs.add(name="text", datatype="BYTES", shape=[1])
    add_text.contents.bytes_contents.append(b"x" * 10_000)
    assert [(name, size) for name, *_, size in heads(request_tensors(request))] == [("t", 16), ("text", None)]
    (_, _, _, data, _), (*_, large, size) = heads(request_tensors(request.SerializeToString()), 16)
    assert (data, large, size) == (struct.pack("<2q", 1, -2), None, None)


def test_heads_of_answers_from_a_stream():
    answer = pb.ModelInferResponse(model_name="m")
    add_output(answer, Tensor("o", "FP32", np.zeros(10_000, np.float32)))
    streamed = pb.ModelStreamInferResponse(infer_response=answer).SerializeToString()
    expected = [("o", "FP32", (10_000,), None, 40_000)]
    assert heads(streamed_tensors(streamed)) == heads(streamed_tensors(answer)) == expected
    assert heads(answer_tensors(answer.SerializeToString())) == expected


def test_each_chunk_of_a_stream_has_its_own_tensors():
    values = [("a", [1]), ("a", [2]), ("b", [3]), ("b", [4, 5]), ("b", [6, 7]), ("", []), ("c", [8]), ("c", [9])]
    chunks = []
    for number, (name, numbers) in enumerate(values):
        answer = pb.ModelInferResponse(id="r", model_name="m")
        for each in [name] * bool(name) + ["d"] * (number == 7):
            add_output(answer, Tensor(each, "INT64", np.array(numbers, "<i8")))
        message = pb.ModelStreamInferResponse(infer_response=answer).SerializeToString()
        chunks.append(Chunk(0, float(number), "", (), (), streamed_tensors(message)))
    for rules in (PayloadRules(), PayloadRules(tensor_bytes=8)):
        encoder, record = Encoder(rules, 0), OpenRecord(bytes(16), Begin("", "", ""), ())
        together = encoder.chunks(chunks, record)
        assert together == b"".join(encoder.chunks([chunk], record) for chunk in chunks)
    found = PayloadRecord.FromString(together).chunks
    assert [[(t.name, list(t.shape)) for t in chunk.outputs] for chunk in found[1:6]] == [
        [("a", [1])], [("b", [1])], [("b", [2])], [("b", [2])], [],
    ]  # fmt: skip


def test_a_message_of_very_many_tensors_is_left_to_the_writer():
    request = pb.ModelInferRequest()
    for number in range(100):
        add_input(request, Tensor(f"t{number}", "FP32", np.zeros(1, np.float32)))
    tensors = request_tensors(request.SerializeToString())
    assert tensors.heads(0).size == tensors.size
    assert len(tensors.heads(0).read()) == 100


@pytest.mark.parametrize("shape", [[-1], [2**62, 2**62], [1] * 1000])
def test_an_impossible_shape_has_no_size(shape):
    request = pb.ModelInferRequest()
    request.inputs.add(name="t", datatype="FP32", shape=shape)
    assert [size for *_, size in heads(request_tensors(request))] == [None]


@given(st.binary(max_size=200))
def test_no_bytes_make_recording_fail(data):
    for tensors in (request_tensors(data), answer_tensors(data), streamed_tensors(data)):
        tensors.read()
        heads(tensors)


@given(st.data())
def test_no_damaged_request_makes_recording_fail(data):
    request = typed("INT32", "int_contents", [1, 2, 300]).SerializeToString()
    at = data.draw(st.integers(0, len(request) - 1))
    damaged = request[:at] + bytes([data.draw(st.integers(0, 255))]) + request[at + 1 :]
    request_tensors(damaged).read()
    heads(request_tensors(damaged))
