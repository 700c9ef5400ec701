"""The memory that a message will take is known before it is parsed, for any contents."""

import time

import pytest
from google.protobuf.message import DecodeError

from headrace.errors import InvalidRequestError
from headrace.rpc.limits.wire_limits import MAX_FIELDS, MAX_PACKED_BYTES, Walk, schema_of
from headrace_protos import headrace_pb2, inference_pb2

INFER = schema_of(inference_pb2.ModelInferRequest.DESCRIPTOR)
GENERATE = schema_of(headrace_pb2.GenerateRequest.DESCRIPTOR)


def walked(data, schema, at_once=1_000_000):
    walk = Walk(data, schema)
    while not walk.proceed(at_once):
        pass
    return walk


def delimited(number, contents):
    size, length = len(contents), b""
    while size >= 0x80:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + contents


def test_a_finished_walk_stays_finished():
    walk = Walk(b"\x2a\x00" * 10, INFER)
    while not walk.proceed(4):
        walk.proceed(8)
    assert walk.fields == 10
    assert walk.proceed(1)


BOMBS = {
    "inputs": (b"\x2a\x00", INFER),
    "outputs": (b"\x32\x00", INFER),
    "raw contents": (b"\x3a\x00", INFER),
    "parameters": (b"\x22\x00", INFER),
    "stop": (
        delimited(next(f.number for f in headrace_pb2.GenerateRequest.DESCRIPTOR.fields if f.name == "stop"), b""),
        GENERATE,
    ),
    "unknown numbers": (b"\xf8\x01\x00", INFER),
    "groups": (b"\xfb\x01\xfc\x01", INFER),
}


@pytest.mark.parametrize(("field", "schema"), BOMBS.values(), ids=BOMBS)
def test_too_many_fields_are_refused_at_any_depth(field, schema):
    assert walked(field * 1000, schema).fields in (1000, 2000)
    with pytest.raises(InvalidRequestError, match="protobuf fields"):
        walked(field * (MAX_FIELDS + 1), schema)


def test_a_number_that_does_not_end_ends_the_walk():
    endless = b"\x08" + b"\x80" * 10_000_000
    began = time.thread_time()
    assert walked(endless, INFER).fields == 1
    assert time.thread_time() - began < 0.05  # Reading all of the number takes 0.3 s.
    # The longest valid number does not end the walk.
    assert walked((b"\x08" + b"\xff" * 9 + b"\x01") * 3, INFER).fields == 3


def test_fields_of_messages_within_messages_count():
    inputs = delimited(5, delimited(5, b"\x42\x00" * 30_000))
    with pytest.raises(InvalidRequestError, match="protobuf fields"):
        walked(inputs * 3, INFER)
    assert walked(inputs, INFER).fields == 30_002


def test_packed_numbers_count_by_their_bytes_and_those_of_fixed_width_do_not():
    request = inference_pb2.ModelInferRequest()
    request.inputs.add().contents.int64_contents.extend([1] * (MAX_PACKED_BYTES + 1))
    with pytest.raises(InvalidRequestError, match="raw contents"):
        walked(request.SerializeToString(), INFER)
    request = inference_pb2.ModelInferRequest()
    request.inputs.add().contents.fp32_contents.extend([1.0] * MAX_PACKED_BYTES)
    assert walked(request.SerializeToString(), INFER).fields == 3


def test_a_walk_in_pieces_counts_the_same():
    request = inference_pb2.ModelInferRequest(model_name="m" * 300, id="é")
    for number in range(50):
        request.inputs.add(name=f"x{number}", datatype="INT64", shape=[1, 2**40]).contents.int64_contents.append(-1)
        request.parameters[str(number)].double_param = 0.5
        request.raw_input_contents.append(bytes(number))
    data = request.SerializeToString()
    whole = walked(data, INFER)
    assert whole.fields > 500
    for pieces in (1, 2, 7):
        walk = walked(data, INFER, pieces)
        assert walk.proceed(pieces)  # At its end it stays there.
        assert (walk.fields, walk.packed_bytes, walk.memory) == (whole.fields, whole.packed_bytes, whole.memory)


def test_malformed_messages_are_left_to_the_parser():
    for data in (b"\xff" * 20, b"\x2a\x05\x00", b"\x2a", b"\x2f", b"\x2a" + b"\xff" * 11, b"\x2a\x01\x0d"):
        walked(data, INFER)
        with pytest.raises(DecodeError):
            inference_pb2.ModelInferRequest.FromString(data)
