"""A request's head is read without its tensors, and its bytes are forwarded unchanged."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.errors import InvalidRequestError
from headrace_protos import inference_pb2 as pb
from headrace_transformer.inference.request import InferRequest

NAMES = st.text(max_size=20)


def examples(values):
    """Checks these values too."""

    def decorate(test):
        for value in values:
            test = example(value)(test)
        return test

    return decorate


REQUESTS = st.builds(
    lambda model, version, id, flags, shapes, outputs, raw: pb.ModelInferRequest(
        model_name=model,
        model_version=version,
        id=id,
        parameters={name: pb.InferParameter(bool_param=value) for name, value in flags.items()},
        inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=shape) for shape in shapes],
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in outputs],
        raw_input_contents=raw,
    ),
    NAMES,
    NAMES,
    NAMES,
    st.dictionaries(NAMES, st.booleans(), max_size=4),
    st.lists(st.lists(st.integers(-1, 2**40), max_size=3), max_size=3),
    st.lists(NAMES, max_size=3),
    st.lists(st.binary(max_size=300), max_size=3),
)


@given(REQUESTS)
def test_the_head_equals_that_of_the_parsed_message(message):
    data = message.SerializeToString()
    request = InferRequest(data)
    assert (request.model_name, request.model_version, request.id) == (
        message.model_name,
        message.model_version,
        message.id,
    )
    assert dict(request.parameters) == dict(message.parameters)
    assert request.data is data
    assert request.message == message


# Of another type, of 8 and of 4 bytes, a text, and a group with a group in it: fields that are not known.
SKIPPED = (b"\xf8\x07\x96\x01", b"\x08\x01", b"\xf9\x07" + bytes(8), b"\xfd\x07" + bytes(4), b"\xfa\x07\x03abc")
SKIPPED += (b"\xfb\x07" + b"\x0b\x0a\x01x\x0c" + b"\x10\x01" + b"\xfc\x07",)
OTHER = (b"\x0a", b"\x0a\x05abc", b"\x08", b"\xff" * 11, b"\x0a\x02\xff\xfe", b"\x0a\x01b")


@given(st.binary(max_size=200))
@examples(SKIPPED + OTHER)
def test_exactly_the_messages_that_the_parser_accepts_are_accepted_and_forwarded_as_they_are(data):
    known = pb.ModelInferRequest(model_name="m").SerializeToString()
    try:
        expected = pb.ModelInferRequest.FromString(known + data)
    except DecodeError:
        expected = None
    try:
        request = InferRequest(known + data)
        message = request.message
    except (DecodeError, InvalidRequestError):
        assert expected is None
    else:
        assert (message, request.data) == (expected, known + data)
        assert request.model_name == expected.model_name


def test_malformed_tensors_are_refused_when_they_are_needed():
    request = InferRequest(b"\x0a\x01m" + b"\x2a\x02\x0a\x05")
    assert request.model_name == "m"
    with pytest.raises(InvalidRequestError, match="not the message"):
        request.message  # noqa: B018
