"""A model's metadata and configuration, which determine what it must answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headrace_protos import inference_pb2 as pb
from headrace_runner.smoke.gateway import Failed, Gateway, ask


class Kind(StrEnum):
    TEXT = "text generation"
    EMBEDDING = "embeddings"
    CLASSIFICATION = "classification"
    TENSORS = "tensors"
    PROCESSOR = "a processor before a model"


@dataclass(frozen=True)
class Model:
    """A model from its metadata and configuration; `details` are those of its kind."""

    name: str
    kind: Kind
    details: str
    version: str
    inputs: Sequence[Any]  # Each has name, datatype and shape, in which -1 is any size.
    has_half_floats: bool
    decoupled: bool
    has_chat_template: bool
    takes_text: bool


async def ready_models(gateway: Gateway, address: str) -> list[str]:
    index = await ask(gateway.inference, "RepositoryIndex", pb.RepositoryIndexRequest(ready=True))
    if index.error:
        raise Failed(f"no stack answers at {address}: {index.error}")
    return [model.name for model in index.pieces[0].models]


async def describe(gateway: Gateway, name: str) -> Model:
    """Queries the stack; raises Failed if there is no such model or no stack."""

    async def about(stub: Any, method: str, request: Any) -> Any:
        answer = await ask(stub, method, request)
        if answer.error:
            raise Failed(f"model {name!r}: {answer.status}: {answer.error}")
        return answer.pieces[0]

    metadata = await about(gateway.inference, "ModelMetadata", pb.ModelMetadataRequest(name=name))
    config = (await about(gateway.inference, "ModelConfig", pb.ModelConfigRequest(name=name))).config
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    kinds = {"embedding": Kind.EMBEDDING, "classification": Kind.CLASSIFICATION}
    kind = Kind.PROCESSOR if metadata.platform == "headrace_processor" else Kind.TENSORS
    kind = kinds.get(parameters.get("kind", ""), kind)
    decoupled = config.model_transaction_policy.decoupled
    has_chat_template, takes_text = parameters.get("chat_template") == "true", False
    details = ", many answers to a request" if decoupled else ""
    if any(tensor.name == "text_input" for tensor in metadata.inputs):
        kind = Kind.TEXT
        inner = (await about(gateway.predictor, "ModelConfig", pb.ModelConfigRequest(name=name))).config
        build = "encoder-decoder" if inner.parameters["is_encoder_decoder"].string_value == "true" else "decoder"
        details = f", {build}, {'with' if has_chat_template else 'without'} chat template"
    elif kind in kinds.values():
        takes_text = f'"{name}"' in (await gateway.rest("/v1/models")).expect(200).text
        details = " of texts and ids" if takes_text else " of ids"
    tensors = (*metadata.inputs, *metadata.outputs)
    return Model(
        name=name,
        kind=kind,
        details=details,
        version=metadata.versions[-1] if metadata.versions else "",
        inputs=metadata.inputs,
        has_half_floats=any(tensor.datatype in ("FP16", "BF16") for tensor in tensors),
        decoupled=decoupled,
        has_chat_template=has_chat_template,
        takes_text=takes_text,
    )
