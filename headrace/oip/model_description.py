"""A model as the protocol describes it: the answers of ModelMetadata and ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.oip.tensors import BYTES
from headrace_protos import inference_pb2 as pb
from headrace_protos import model_config_pb2

INPUT_IDS, OUTPUT_IDS = "input_ids", "output_ids"  # The tensors of token ids.
FINGERPRINT = "fingerprint"  # Of the weights: a parameter of ModelConfig and of a call's first response.


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a model takes or gives; -1 in the shape is any size."""

    name: str
    datatype: str
    shape: Sequence[int]
    optional: bool = False


@dataclass(frozen=True)
class ModelDescription:
    """A model's platform, tensors and parameters; a decoupled model may give several responses to a request.

    With a `max_batch_size` the first dimension of every tensor is the batch; 0: there is no batch dimension.
    """

    platform: str
    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()
    decoupled: bool = False
    max_batch_size: int = 0
    parameters: Mapping[str, str] = field(default_factory=dict)


def metadata_of(name: str, versions: Sequence[str], description: ModelDescription) -> pb.ModelMetadataResponse:
    """The answer of ModelMetadata."""

    def metadata(specs: Sequence[TensorSpec]) -> list[pb.ModelMetadataResponse.TensorMetadata]:
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return [tensor(name=spec.name, datatype=spec.datatype, shape=spec.shape) for spec in specs]

    return pb.ModelMetadataResponse(
        name=name,
        versions=versions,
        platform=description.platform,
        inputs=metadata(description.inputs),
        outputs=metadata(description.outputs),
    )


def config_of(name: str, description: ModelDescription) -> model_config_pb2.ModelConfig:
    """The answer of ModelConfig; a batch's dimension is not among the dims, as in Triton's configurations."""
    first = 1 if description.max_batch_size else 0
    config = model_config_pb2.ModelConfig(
        name=name,
        platform=description.platform,
        backend="headrace",
        max_batch_size=description.max_batch_size,
        input=[
            model_config_pb2.ModelInput(
                name=spec.name,
                data_type=_config_type(spec.datatype),
                dims=spec.shape[first:],
                optional=spec.optional,
            )
            for spec in description.inputs
        ],
        output=[
            model_config_pb2.ModelOutput(name=spec.name, data_type=_config_type(spec.datatype), dims=spec.shape[first:])
            for spec in description.outputs
        ],
        model_transaction_policy=model_config_pb2.ModelTransactionPolicy(decoupled=description.decoupled),
    )
    for key, value in description.parameters.items():
        config.parameters[key].string_value = value
    return config


def _config_type(datatype: str) -> model_config_pb2.DataType.ValueType:
    """The configuration's own name of a datatype: TYPE_ and the protocol's, except for BYTES."""
    return model_config_pb2.DataType.Value("TYPE_STRING" if datatype == BYTES else f"TYPE_{datatype}")
