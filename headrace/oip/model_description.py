"""A model as the protocol describes it: the answers of ModelMetadata and ModelConfig, and the names of its tensors.

Encoders and classifiers make `embedding` FP32 [B, size] or `logits` FP32 [B, labels] of rows of token ids. The
parameters of a classifier's ModelConfig have the names of its labels, as a JSON list, and the function that makes
probabilities or scores of its logits.

A user's code declares its tensors as `{"name": ("FP32", [-1, 3])}`, where -1 is any size. A third element has more of a
tensor: `("FP32", [-1], {"optional": True})` is an input that may be left out.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidRequestError, StartupError
from headrace.oip.tensors import BYTES, DATATYPES, RawTensor, Tensor
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


def declared(mapping: Any, what: str) -> tuple[TensorSpec, ...] | None:
    """The tensors of a user's mapping, if there is one; StartupError if it differs from the module's example."""
    try:
        return None if mapping is None else tuple(_declared(name, *each) for name, each in mapping.items())
    except (AttributeError, TypeError, ValueError):
        raise StartupError(f'{what} must look like {{"name": ("FP32", [-1, 3])}}') from None


def _declared(name: Any, datatype: Any, shape: Any, more: Any = None) -> TensorSpec:
    attributes = dict(more or {})
    optional = attributes.pop("optional", False)
    if attributes or not (isinstance(optional, bool) and isinstance(name, str) and datatype in DATATYPES):
        raise ValueError
    return TensorSpec(name, datatype, tuple(int(size) for size in shape), optional)


def check_requested_outputs(request: pb.ModelInferRequest) -> None:
    """Refuses outputs that are requested twice, or with Triton's classification extension."""
    names = set()
    for output in request.outputs:
        if output.name in names:
            raise InvalidRequestError(f"output {output.name!r} is given twice")
        names.add(output.name)
        if "classification" in output.parameters:
            raise InvalidRequestError(
                f"output {output.name!r}: the classification extension (class_count) is not supported"
            )


def check_names(kind: Literal["input", "output"], names: Iterable[str], known: Collection[Any]) -> None:
    """Refuses names of tensors that a model does not have."""
    for name in names:
        if name not in known:
            verb, others = "takes" if kind == "input" else "gives", ", ".join(map(str, known)) or "none"
            raise InvalidRequestError(f"unknown {kind} {name[:64]!r}; the model {verb} {others}")


def check_inputs(tensors: Mapping[str, RawTensor | Tensor], specs: Sequence[TensorSpec]) -> None:
    """Refuses inputs that differ from the declared ones."""
    by_name = {spec.name: spec for spec in specs}
    check_names("input", tensors, by_name)
    for name, tensor in tensors.items():
        spec = by_name[name]
        if tensor.datatype != spec.datatype:
            raise InvalidRequestError(f"input {name!r} must be {spec.datatype}, not {tensor.datatype}")
        fits = all(size in (-1, given) for size, given in zip(spec.shape, tensor.shape, strict=False))
        if len(spec.shape) != len(tensor.shape) or not fits:
            raise InvalidRequestError(
                f"input {name!r} must have shape {list(spec.shape)}, not {list(tensor.shape)}; -1 is any size"
            )
    for name, spec in by_name.items():
        if name not in tensors and not spec.optional:
            raise InvalidRequestError(f"input {name!r} is missing")
