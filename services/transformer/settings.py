"""The transformer's settings: `TRANSFORMER_*` and `MODELS`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, ByteSize, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from millrace.settings import Models, Port, ServiceSettings, models_field
from services.transformer.processor_sources import ProcessorSource, parse_processors

Processors = Annotated[
    tuple[ProcessorSource, ...],
    NoDecode,
    BeforeValidator(lambda value: parse_processors(value) if isinstance(value, str) else value),
]


def _addresses(value: object) -> object:
    """A comma list of host:port."""
    if not isinstance(value, str):
        return value
    addresses = tuple(item.strip() for item in value.split(",") if item.strip())
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"{address!r} is not host:port")
    return addresses


Addresses = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_addresses)]


class TransformerSettings(ServiceSettings):
    """What the transformer can be told."""

    model_config = SettingsConfigDict(env_prefix="TRANSFORMER_", frozen=True, env_ignore_empty=True)

    port: Port = Field(9001, description="gRPC port.")
    models: Models = models_field()
    predictor: str = Field(
        "127.0.0.1:8090",
        description="Where predictors are reached: Envoy's inner listener, or any other server of the protocol.",
    )
    predictor_replicas: Addresses = Field(
        (),
        description="Comma list of host:port of the predictors themselves, all addresses of a name; loading, unloading,"
        " index and statistics concern each. Empty: there is one, behind TRANSFORMER_PREDICTOR.",
    )
    logger: str = Field("127.0.0.1:9002", description="The payload logger.")
    payload_queue_memory: ByteSize = Field(
        ByteSize(64 << 20), gt=0, description="Records that wait for the logger; more are dropped and counted."
    )
    tokenizer_threads: int = Field(2, ge=1, le=64, description="Threads that tokenise prompts above 8 KiB.")
    processors: Processors = Field(
        (),
        description="Comma list of name=package.module:Class or name=folder/file.py:Class: code of your own before and"
        " after a model, see millrace/processor.py.",
    )
    processor_threads: int = Field(4, ge=1, le=256, description="Threads that run blocking code of processors.")
    processor_waiting: int = Field(64, ge=0, le=10_000, description="Calls that wait for such a thread at most.")
    workers: int = Field(
        1, ge=1, le=64, description="Processes that share the port; more than one for more than one core of text."
    )
