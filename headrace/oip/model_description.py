"""A model as the protocol describes it: the answers of ModelMetadata and ModelConfig, and the names of its tensors.

Encoders and classifiers make `embedding` FP32 [B, size] or `logits` FP32 [B, labels] of rows of token ids. The
parameters of a classifier's ModelConfig have the names of its labels, as a JSON list, and the function that makes
probabilities or scores of its logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from headrace.oip.tensors import BYTES
from headrace_protos import inference_pb2 as pb
from headrace_protos import model_config_pb2

INPUT_IDS, OUTPUT_IDS = "input_ids", "output_ids"  # The tensors of token ids.
FINGERPRINT = "fingerprint"  # Of the weights: a parameter of ModelConfig and of a call's first response.
EMBEDDING, LOGITS = "embedding", "logits"
TOKEN_TYPE_IDS = "token_type_ids"  # noqa: S105  # no password
POOLING_MASK = "pooling_mask"  # Input of embedding models that leave the tokens of a prompt out of the pooling.
LABELS, ACTIVATION = "labels", "activation"

Vector = NDArray[np.float32]


class Activation(StrEnum):
    IDENTITY = "identity"
    SIGMOID = "sigmoid"  # Each label by itself.
    SOFTMAX = "softmax"  # One label of all.

    def __call__(self, logits: Vector) -> Vector:
        """The probabilities, or scores, of a row's logits [labels]."""
        if self is Activation.IDENTITY:
            return logits
        if self is Activation.SIGMOID:
            return np.exp(-np.logaddexp(0, -logits))
        powers = np.exp(logits - logits.max())
        return np.asarray(powers / powers.sum())


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
