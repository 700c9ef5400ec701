"""A `ModelInferRequest` of which only the head is parsed until its tensors are needed.

The head has what routing needs: model name and version, id and parameters. A relayed request is forwarded as its
original bytes; its tensors are neither copied nor parsed. A head that cannot be parsed raises protobuf's DecodeError,
as the generated parser does.

Source of the format: protobuf's wire encoding; every field of these messages is length-delimited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from google.protobuf.message import DecodeError

from headrace.errors import InvalidRequestError
from headrace.oip.raw_contents import MAX_SCANNED_FIELDS, Contents, split
from headrace.oip.wire_fields import fields
from headrace.rpc.server.call_context import ServedModel
from headrace_protos import inference_pb2 as pb

# model_name, model_version, id, parameters.
_HEAD_FIELDS = frozenset({1, 2, 3, 4})
_NO_VERSION = b"\x12\x00"  # Field 2, empty, which protobuf would not write.


class InferRequest:
    """See the module. Made by `received` or `parsed`."""

    def __init__(self, head: pb.ModelInferRequest, data: bytes | None, message: pb.ModelInferRequest | None) -> None:
        self.model_name = head.model_name
        self.model_version = head.model_version
        self.id = head.id
        self.parameters: Mapping[str, pb.InferParameter] = head.parameters
        self.received_data = data  # As it came, or None where a front end has made it.
        self._message = message

    @classmethod
    def received(cls, data: bytes) -> InferRequest:
        """A request as it came over the wire."""
        parts = []
        for count, (field, start, _, end) in enumerate(fields(data)):
            if count >= MAX_SCANNED_FIELDS:
                message = pb.ModelInferRequest.FromString(data)
                return cls(message, data, message)
            if field in _HEAD_FIELDS:
                parts.append(data[start:end])
        return cls(pb.ModelInferRequest.FromString(b"".join(parts)), data, None)

    @classmethod
    def parsed(cls, message: pb.ModelInferRequest) -> InferRequest:
        """A request that a front end has made."""
        return cls(message, None, message)

    def for_model(self, served: ServedModel) -> InferRequest:
        """The same request to another model; protobuf uses the last value of a repeated scalar field."""
        names = pb.ModelInferRequest(model_name=served.model, model_version=served.version)
        return InferRequest.received(self.data + _NO_VERSION + names.SerializeToString())

    @property
    def message(self) -> pb.ModelInferRequest:
        """The whole request, parsed at the first call; raises InvalidRequestError."""
        if self._message is None:
            with _parsing():
                self._message = pb.ModelInferRequest.FromString(self.received_data or b"")
        return self._message

    def without_contents(self) -> tuple[pb.ModelInferRequest, Sequence[Contents]]:
        """The parsed request, and the raw contents of its inputs; raises InvalidRequestError."""
        if self._message is not None or self.received_data is None:
            return self.message, self.message.raw_input_contents
        with _parsing():
            return split(pb.ModelInferRequest, self.received_data)

    @property
    def data(self) -> bytes:
        """The whole request as bytes."""
        if self.received_data is None:
            self.received_data = self.message.SerializeToString()
        return self.received_data


@contextmanager
def _parsing() -> Iterator[None]:
    try:
        yield
    except DecodeError:
        raise InvalidRequestError("the request is not the message that the method takes") from None
