"""The transformer's settings: `TRANSFORMER_*` and `MODELS`."""

from __future__ import annotations

from pydantic import ByteSize, Field
from pydantic_settings import SettingsConfigDict

from millrace.settings import Models, Port, ServiceSettings, models_field


class TransformerSettings(ServiceSettings):
    """What the transformer can be told."""

    model_config = SettingsConfigDict(env_prefix="TRANSFORMER_", frozen=True, env_ignore_empty=True)

    port: Port = Field(9001, description="gRPC port.")
    models: Models = models_field()
    predictor: str = Field("127.0.0.1:8090", description="Where predictors are reached: Envoy's inner listener.")
    logger: str = Field("127.0.0.1:9002", description="The payload logger.")
    payload_queue_memory: ByteSize = Field(
        ByteSize(64 << 20), gt=0, description="Records that wait for the logger; more are dropped and counted."
    )
    tokenizer_threads: int = Field(2, ge=1, le=64, description="Threads that tokenise prompts above 8 KiB.")
