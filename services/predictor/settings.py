"""The predictor's settings: `PREDICTOR_*` and `MODELS`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, ByteSize, Field
from pydantic_settings import SettingsConfigDict

from millrace.settings import Models, Port, ServiceSettings, models_field


class PredictorSettings(ServiceSettings):
    """What the predictor can be told."""

    model_config = SettingsConfigDict(env_prefix="PREDICTOR_", frozen=True, env_ignore_empty=True)

    port: Port = Field(9000, description="gRPC port.")
    models: Models = models_field()
    device: Annotated[Literal["auto", "cpu", "cuda"], BeforeValidator(str.lower)] = Field(
        "auto", description="auto takes CUDA where there is one."
    )
    dtype: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = Field(
        "auto", description="auto is fp32 on the CPU and the model's own on CUDA."
    )
    threads: int = Field(0, ge=0, description="CPU threads of the model; 0 is all cores but one.")
    max_running: int = Field(32, ge=1, description="Sequences generated at the same time, for each model.")
    max_waiting: int = Field(256, ge=0, description="Requests that may wait for that; more are refused.")
    max_context: int = Field(
        0, ge=0, description="Tokens of prompt and output; 0: the model's, or what the cache holds."
    )
    kv_cache_memory: ByteSize = Field(
        ByteSize(1 << 30), gt=0, description="Memory for keys and values of each model, such as 512MiB."
    )
