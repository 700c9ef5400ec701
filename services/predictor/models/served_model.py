"""What every served model can do, whatever its kind, and how the protocol describes it.

A request is answered by `infer` with one response or by `stream` with any number of them, each with
the parameter `triton_final_response`. Both raise MillraceError; cancelling the one and closing the
other cancels the request. What `options` say concerns models that generate, whose streams can go on
elsewhere; see millrace/oip/resumable.py. They run on the event loop and never block it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from millrace.deadline import Deadline
from millrace.oip.resumable import CallOptions
from millrace_protos import inference_pb2 as pb
from millrace_protos import model_config_pb2

VERSION = "1"  # The one version that each model has.
NO_OPTIONS = CallOptions()


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a model takes or gives; -1 in the shape is any size."""

    name: str
    datatype: str
    shape: Sequence[int]
    optional: bool = False


@dataclass(frozen=True)
class ModelDescription:
    """What metadata and configuration say of a model; a decoupled one may give several responses to a request.

    With a `max_batch_size` the first dimension of every tensor is the batch; 0 means that there is none.
    """

    platform: str
    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()
    decoupled: bool = False
    max_batch_size: int = 0
    parameters: Mapping[str, str] = field(default_factory=dict)


class Counts(Protocol):
    """What only the model itself can count, since it was made; durations in nanoseconds."""

    steps: int
    queue_ns: int
    compute_ns: int

    @property
    def ended(self) -> int:
        """Requests that are done, however they ended; what was refused at once is not among them."""


class ServedModel(Protocol):
    """See the module."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> ModelDescription: ...

    @property
    def statistics(self) -> Counts: ...

    async def infer(
        self, request: pb.ModelInferRequest, deadline: Deadline, options: CallOptions
    ) -> pb.ModelInferResponse:
        """The one answer to a request."""

    def stream(
        self, request: pb.ModelInferRequest, deadline: Deadline, options: CallOptions
    ) -> AsyncGenerator[pb.ModelInferResponse, None]:
        """The answers to a request, as they are made; heartbeats among them, where the options ask for them."""

    def offer(self) -> None:
        """Says in each stream whose caller can go on elsewhere that it may do so now; the streams go on."""

    def hand_back(self) -> None:
        """Ends each stream whose caller goes on elsewhere with DrainingError, after what has been made of it."""

    async def warm_up(self) -> None:
        """Proves that the model works; raises StartupError."""

    async def died(self) -> None:
        """Waits until the model can serve no more, for ever if need be, then raises EngineDeadError."""

    def close(self) -> None:
        """Stops the model; what is in flight ends with NotReadyError; blocks for seconds at most."""


def metadata_of(model: ServedModel) -> pb.ModelMetadataResponse:
    """The answer of ModelMetadata."""

    def tensors_of(specs: Sequence[TensorSpec]) -> list[pb.ModelMetadataResponse.TensorMetadata]:
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return [tensor(name=spec.name, datatype=spec.datatype, shape=spec.shape) for spec in specs]

    description = model.description
    return pb.ModelMetadataResponse(
        name=model.name,
        versions=[VERSION],
        platform=description.platform,
        inputs=tensors_of(description.inputs),
        outputs=tensors_of(description.outputs),
    )


def config_of(model: ServedModel) -> model_config_pb2.ModelConfig:
    """What ModelConfig says of a model; a batch's dimension is not among its dims, as Triton has it."""
    description = model.description
    batch_dimensions = 1 if description.max_batch_size else 0
    config = model_config_pb2.ModelConfig(
        name=model.name,
        platform=description.platform,
        backend="millrace",
        max_batch_size=description.max_batch_size,
        input=[
            model_config_pb2.ModelInput(
                name=spec.name,
                data_type=_config_type(spec.datatype),
                dims=spec.shape[batch_dimensions:],
                optional=spec.optional,
            )
            for spec in description.inputs
        ],
        output=[
            model_config_pb2.ModelOutput(
                name=spec.name, data_type=_config_type(spec.datatype), dims=spec.shape[batch_dimensions:]
            )
            for spec in description.outputs
        ],
        model_transaction_policy=model_config_pb2.ModelTransactionPolicy(decoupled=description.decoupled),
    )
    for key, value in description.parameters.items():
        config.parameters[key].string_value = value
    return config


def _config_type(datatype: str) -> model_config_pb2.DataType.ValueType:
    """The configuration's own name of a datatype: TYPE_ and the protocol's, but for BYTES."""
    return model_config_pb2.DataType.Value("TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}")
