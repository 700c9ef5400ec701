"""`Generate` by REST: the request message in protobuf's JSON mapping.

Unknown fields are refused, because a misspelt parameter would have no effect.
"""

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor

from headrace.errors import ContextLengthError, InvalidRequestError
from headrace.oip.json_text import load_object
from headrace.structured_outputs import read_structured_outputs
from headrace_protos.headrace_pb2 import GenerateRequest
from headrace_transformer.generation.requests import check_message_count, check_stop_count

MAX_BODY_BYTES = 8 * 1024 * 1024  # Larger than any prompt.
_NAMES = frozenset(GenerateRequest.DESCRIPTOR.fields_by_name)
_STRUCTURED = ("structured_outputs", "structuredOutputs")
_FIELDS = _NAMES | frozenset(GenerateRequest.DESCRIPTOR.fields_by_camelcase_name)
_REALS = {
    name
    for field in GenerateRequest.DESCRIPTOR.fields
    for name in (field.name, field.camelcase_name)
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
}


def read_generate_request(body: bytes) -> GenerateRequest:
    """The message in a JSON body; raises InvalidRequestError."""
    if len(body) > MAX_BODY_BYTES:
        raise ContextLengthError(f"the body has {len(body)} bytes, more than any prompt")
    fields = load_object(body)
    if isinstance(messages := fields.get("messages"), list):
        check_message_count(len(messages))
    if isinstance(stop := fields.get("stop"), list):
        check_stop_count(len(stop))
    for name, value in fields.items():
        if name not in _FIELDS:
            raise InvalidRequestError(f"unknown field {name[:64]!r}; there are {', '.join(sorted(_NAMES))}")
        if isinstance(value, bool) and name in _REALS:  # json_format takes it for a number.
            raise InvalidRequestError(f"{name} must be a number", param=name)
        if name in _STRUCTURED and isinstance(value, dict):  # The message has it as text.
            try:
                fields[name] = read_structured_outputs(value)
            except ValueError as error:
                raise InvalidRequestError(f"structured_outputs: {error}", param="structured_outputs") from None
    try:
        return json_format.ParseDict(fields, GenerateRequest())
    except (json_format.ParseError, RecursionError) as error:
        raise InvalidRequestError((str(error).splitlines() or ["the request is nested too deep"])[0]) from None


def read_large(body: bytes) -> tuple[None, bytes]:
    """As `read_generate_request`, for BodyProcesses: the message as bytes."""
    return None, read_generate_request(body).SerializeToString()
