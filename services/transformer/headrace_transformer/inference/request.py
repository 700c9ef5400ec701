"""A `ModelInferRequest` of which only the head is parsed until its tensors are needed.

The head has what routing needs: model name and version, id and parameters. A relayed request is forwarded as its
original bytes; its tensors are neither copied nor parsed. A head that cannot be parsed raises protobuf's DecodeError,
as the generated parser does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from google.protobuf.message import DecodeError

from headrace.errors import InvalidRequestError
from headrace.oip.raw_contents import Contents, scan, split
from headrace.rpc.server.call_context import ServedModel
from headrace_protos import inference_pb2 as pb

_HEAD_FIELDS = 4  # The first ones: model_name, model_version, id, parameters.
_NO_VERSION = b"\x12\x00"  # Field 2, empty, which protobuf would not write.


class InferRequest:
    """See the module; `data` is the whole request as it came over the wire. Raises DecodeError."""

    _message: pb.ModelInferRequest | None  # Once it is parsed.

    def __init__(self, data: bytes) -> None:
        found = scan(data)
        if found is None:
            head = self._message = pb.ModelInferRequest.FromString(data)
        else:
            parts = [data[start:end] for field, start, _, end in found if field <= _HEAD_FIELDS]
            head, self._message = pb.ModelInferRequest.FromString(b"".join(parts)), None
        self.data = data
        self.model_name = head.model_name
        self.model_version = head.model_version
        self.id = head.id
        self.parameters: Mapping[str, pb.InferParameter] = head.parameters

    def for_model(self, served: ServedModel) -> InferRequest:
        """The same request to another model; protobuf uses the last value of a repeated scalar field."""
        names = pb.ModelInferRequest(model_name=served.model, model_version=served.version)
        return InferRequest(self.data + _NO_VERSION + names.SerializeToString())

    @property
    def message(self) -> pb.ModelInferRequest:
        """The whole request, parsed at the first call; raises InvalidRequestError."""
        if self._message is None:
            with _parsing():
                self._message = pb.ModelInferRequest.FromString(self.data)
        return self._message

    def without_contents(self) -> tuple[pb.ModelInferRequest, Sequence[Contents]]:
        """The parsed request, and the raw contents of its inputs; raises InvalidRequestError."""
        with _parsing():
            return split(pb.ModelInferRequest, self.data)


@contextmanager
def _parsing() -> Iterator[None]:
    try:
        yield
    except DecodeError:
        raise InvalidRequestError("the request is not the message that the method takes") from None
