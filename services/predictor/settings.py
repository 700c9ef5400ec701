"""The predictor's settings: `PREDICTOR_*` and `MODELS`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ByteSize, DirectoryPath, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from millrace.settings import Models, Port, ServiceSettings, models_field

_PATTERN = re.compile(r"[\w.*?-]+(/[\w.*?-]+)?")


def _parse_patterns(value: object) -> object:
    if not isinstance(value, str):
        return value
    patterns = tuple(item.strip() for item in value.split(",") if item.strip())
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern):
            raise ValueError(f"{pattern!r} is no pattern of hub ids, such as org/* or org/name")
    return patterns


class PredictorSettings(ServiceSettings):
    """What the predictor can be told."""

    model_config = SettingsConfigDict(env_prefix="PREDICTOR_", frozen=True, env_ignore_empty=True)

    port: Port = Field(9000, description="gRPC port.")
    metrics_port: Port = Field(9100, description="Port of the Prometheus page, /metrics. 0: none.")
    models: Models = models_field()
    device: Annotated[Literal["auto", "cpu", "cuda"], BeforeValidator(str.lower)] = Field(
        "auto", description="auto takes CUDA where there is one."
    )
    dtype: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = Field(
        "auto", description="auto is fp32 on the CPU and the model's own on CUDA."
    )
    threads: int = Field(0, ge=0, description="CPU threads of the model; 0 is all cores but one.")
    max_running: int = Field(32, ge=1, description="Sequences or Python requests that run at once, for each model.")
    max_waiting: int = Field(256, ge=0, description="Requests that may wait for that; more are refused.")
    batch_rows: int = Field(32, ge=1, description="Rows that a model which classifies or embeds takes together.")
    batch_delay_ms: float = Field(2.0, ge=0, le=1000, description="Milliseconds that such a row waits for others.")
    max_context: int = Field(
        0, ge=0, description="Tokens of prompt and output; 0: the model's, or what the cache holds."
    )
    kv_cache_memory: ByteSize | None = Field(
        None,
        gt=0,
        description="Memory for keys and values of each model, such as 512MiB; by default 1GiB on the CPU, less in a "
        "small container, and on CUDA what gpu_memory_share leaves.",
    )
    gpu_memory_share: float = Field(
        0.85, gt=0, le=1, description="Share of the GPU's memory to take at most; with N predictors on it, 1/N of that."
    )
    cuda_graphs: bool = Field(False, description="Record decode steps on CUDA and replay them.")
    step_tokens: int = Field(
        2048, ge=16, description="Tokens that one forward pass computes at most, of prompts and outputs together."
    )
    step_timeout: float = Field(
        120.0,
        gt=0,
        description="Seconds; a forward pass that takes longer is hung: the process ends and is started again.",
    )
    python_timeout: float = Field(
        300.0,
        gt=0,
        description="Seconds without an answer of a Python model's event loop, which its code blocks, after which the "
        "predictor ends and starts anew.",
    )
    drain: Literal["hand-back", "finish"] = Field(
        "hand-back",
        description="At SIGTERM: hand-back lets the streams of transformers go on at another replica with the same "
        "weights, as soon as there is one; finish keeps them. Either way what is here has drain_s to end.",
    )
    model_repository: DirectoryPath | None = Field(
        None, description="Folder whose sub-folders are models that RepositoryModelLoad may load by their names."
    )
    hub_allow: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_parse_patterns)] = Field(
        (), description="Comma list of hub ids that RepositoryModelLoad may load; * and ? are wildcards, as in org/*."
    )
    development: bool = Field(
        False, description="Whether the transformer may have this process killed; for demonstrations alone."
    )
    payload_log: Literal["off", "on"] = Field(
        "off", description="on records the requests that reach the predictor without the transformer."
    )
    payload_spool: Path = Field(
        Path(".run/spool-predictor"),
        description="Folder in which such records wait for the logger; several predictors may share it.",
    )
    payload_spool_max: ByteSize = Field(
        ByteSize(1 << 30), gt=0, description="Bytes of them that wait there at most; more are dropped and counted."
    )
    logger: str = Field("127.0.0.1:9002", description="The payload logger, for payload_log.")
    state: Path | None = Field(
        None,
        description="File of this predictor alone that says whether its last life ended in order, to count restarts; "
        "empty: they are not counted.",
    )
