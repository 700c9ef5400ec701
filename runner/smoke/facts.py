"""What a stack says of a model, from which follows what the model must answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import grpc

from millrace_protos import inference_pb2 as pb
from runner.smoke.gateway import TIMEOUT_S, Failed, Gateway


class Kind(StrEnum):
    TEXT = "text generation"
    EMBEDDING = "embeddings"
    CLASSIFICATION = "classification"
    TENSORS = "tensors"
    PROCESSOR = "a processor before a model"


@dataclass(frozen=True)
class TensorFacts:
    """A tensor of the metadata; -1 is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ModelFacts:
    """One model, as metadata and configuration tell it; of a text model, `vocabulary_size` is the predictor's."""

    name: str
    version: str
    kind: Kind
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    decoupled: bool
    has_chat_template: bool
    is_encoder_decoder: bool
    embeds_text: bool

    def __str__(self) -> str:
        if self.kind is Kind.TEXT:
            template = "with" if self.has_chat_template else "without"
            build = "encoder-decoder" if self.is_encoder_decoder else "decoder"
            return f"{self.kind}, {build}, {template} chat template"
        if self.kind is Kind.EMBEDDING:
            return f"{self.kind} of {'texts and ids' if self.embeds_text else 'ids'}"
        return f"{self.kind}{', many answers to a request' if self.decoupled else ''}"


async def models_of(gateway: Gateway) -> list[str]:
    """The models that are ready."""
    index = await gateway.inference.RepositoryIndex(pb.RepositoryIndexRequest(ready=True), timeout=TIMEOUT_S)
    return [model.name for model in index.models]


async def facts_of(gateway: Gateway, name: str) -> ModelFacts:
    """Asks the stack; Failed where there is no such model or no stack."""
    try:
        metadata = await gateway.inference.ModelMetadata(pb.ModelMetadataRequest(name=name), timeout=TIMEOUT_S)
        asked = pb.ModelConfigRequest(name=name)
        config = (await gateway.inference.ModelConfig(asked, timeout=TIMEOUT_S)).config
        kind = _kind_of(metadata, config)
        inner = {}
        if kind is Kind.TEXT:
            inner = _parameters((await gateway.predictor.ModelConfig(asked, timeout=TIMEOUT_S)).config)
    except grpc.aio.AioRpcError as error:
        raise Failed(f"model {name!r}: {error.code().name}: {error.details()}") from None
    listed = (await gateway.get("/v1/models")).json()["data"]
    return ModelFacts(
        name=name,
        version=metadata.versions[-1] if metadata.versions else "",
        kind=kind,
        inputs=_tensors(metadata.inputs),
        outputs=_tensors(metadata.outputs),
        decoupled=config.model_transaction_policy.decoupled,
        has_chat_template=_parameters(config).get("chat_template") == "true",
        is_encoder_decoder=inner.get("is_encoder_decoder") == "true",
        embeds_text=kind is Kind.EMBEDDING and any(model["id"] == name for model in listed),
    )


def _kind_of(metadata: pb.ModelMetadataResponse, config: Any) -> Kind:
    if any(tensor.name == "text_input" for tensor in metadata.inputs):
        return Kind.TEXT
    if metadata.platform == "millrace_processor":
        return Kind.PROCESSOR
    told = _parameters(config).get("kind")
    return {"embedding": Kind.EMBEDDING, "classification": Kind.CLASSIFICATION}.get(str(told), Kind.TENSORS)


def _parameters(config: Any) -> dict[str, str]:
    return {name: parameter.string_value for name, parameter in config.parameters.items()}


def _tensors(told: Any) -> tuple[TensorFacts, ...]:
    return tuple(TensorFacts(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in told)
