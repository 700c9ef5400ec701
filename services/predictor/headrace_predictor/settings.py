"""The predictor's settings: `PREDICTOR_*` and `MODELS`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ByteSize, DirectoryPath, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from headrace.models.sources import check_pattern
from headrace.payload.settings import RecordingSettings
from headrace.settings import Models, Port, models_field, read_by


def _parse_patterns(text: str) -> tuple[str, ...]:
    return tuple(check_pattern(item.strip()) for item in text.split(",") if item.strip())


class PredictorSettings(RecordingSettings):
    model_config = SettingsConfigDict(env_prefix="PREDICTOR_", frozen=True, env_ignore_empty=True)

    port: Port = Field(9000, description="gRPC port. Generations have the fourth after it.")
    metrics_port: Port = Field(9100, description="Port of the Prometheus page, /metrics. 0: none.")
    models: Models = models_field()
    device: Annotated[Literal["auto", "cpu", "cuda"], BeforeValidator(str.lower)] = Field(
        "auto", description="auto uses CUDA if there is a device."
    )
    dtype: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = Field(
        "auto",
        description="auto is the model's own on CUDA; on the CPU bf16 where that is faster and exact, else fp32.",
    )
    weights: Literal["auto", "int8", "int4", "q8_0"] = Field(
        "auto",
        description=(
            "Format of the weights of text models on the CPU: int8 and int4 are computed in integers, those of Llama,"
            " Mistral, Qwen2 and Qwen3 the same on every machine, and q8_0 of these; auto: a GGUF file's own, else"
            " that of dtype. See docs/models.md. On CUDA int8 of these four families."
        ),
    )
    weights_cache: Path = Field(
        Path("~/.cache/headrace/weights"),
        description="Folder that keeps the weights of these models as they are computed, for the next start.",
    )
    weights_cache_size: ByteSize = Field(
        ByteSize(32 << 30),
        ge=0,
        description="Maximum of its files; those used longest ago are deleted. 0: none are kept.",
    )
    threads: int = Field(
        0, ge=0, description="CPU threads of a model; 0: all cores but one; of up to four all for a large text model."
    )
    max_running: int = Field(
        0,
        ge=0,
        description="Maximum of sequences or Python requests at once of a model; 0: 32 to 256 by memory, Python 32.",
    )
    max_waiting: int = Field(256, ge=0, description="Maximum of requests that wait to run; further ones are refused.")
    max_adapters: int = Field(16, ge=0, description="Maximum of adapters (LoRA) that one model has loaded.")
    batch_rows: int = Field(32, ge=1, description="Maximum of rows in one batch of an encoder or classifier.")
    batch_delay_ms: float = Field(2.0, ge=0, le=1000, description="Milliseconds that such a batch waits for more rows.")
    max_context: int = Field(
        0, ge=0, description="Maximum of prompt and output tokens; 0: the model's limit, or what the cache holds."
    )
    kv_cache_memory: ByteSize | None = Field(
        None,
        gt=0,
        description=(
            "Memory for the KV cache of each model, such as 512MiB. Default: on the CPU 1GiB and one whole context,"
            " within memory_share, and on CUDA what gpu_memory_share leaves."
        ),
    )
    memory_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Maximum of the free memory for KV caches on the CPU; with N predictors 1/N of that.",
    )
    gpu_memory_share: float = Field(
        0.85, gt=0, le=1, description="Maximum fraction of the GPU's memory; with N predictors on one GPU, 1/N of that."
    )
    prompt_lookup: bool = Field(
        True,
        description=(
            "Compute several tokens of a stream in one step where its text repeats an earlier part of prompt or answer"
            " and that is faster. The answer is the same."
        ),
    )
    cuda_graphs: bool = Field(True, description="Record decode steps on CUDA at start, and replay them.")
    exact: bool = Field(
        False,
        description=(
            "On CUDA an answer's bits do not depend on the requests beside it: all products in tiles of one size, which"
            " takes longer. On the CPU that holds anyway where docs/models.md says so."
        ),
    )
    step_tokens: int = Field(
        2048, ge=16, description="Maximum of tokens that one forward pass computes, of prompts and outputs together."
    )
    max_gap_ms: float = Field(
        24.0,
        ge=0,
        description=(
            "Target for the gap between two tokens of a stream while prompts of others are computed: steps with parts"
            " of prompts take as long; or 1.8 times as long as steps without, if that is more; or longer if prompts"
            " would starve. So it matters for small models, whose steps are shorter. Lower: steadier streams; higher:"
            " earlier first tokens."
        ),
    )
    step_timeout: float = Field(
        120.0,
        gt=0,
        description="Seconds after which a forward pass is treated as hung; its process ends and is replaced.",
    )
    python_timeout: float = Field(
        300.0,
        gt=0,
        description=(
            "Seconds for which a Python model's code may block its event loop; then the predictor ends and is"
            " restarted."
        ),
    )
    drain: Literal["hand-back", "finish"] = Field(
        "hand-back",
        description=(
            "At SIGTERM: hand-back lets streams resume at another replica with the same weights as soon as "
            "there is one; finish keeps them. In both cases calls have drain_s to end."
        ),
    )
    model_repository: DirectoryPath | None = Field(
        None, description="Folder whose sub-folders RepositoryModelLoad may load by their names."
    )
    hub_allow: Annotated[tuple[str, ...], NoDecode, read_by(_parse_patterns)] = Field(
        (),
        description=(
            "Comma list of hub ids and URLs that RepositoryModelLoad may load; * and ? are wildcards, as in org/* or"
            " s3://bucket/chat/*."
        ),
    )
    development: bool = Field(False, description="Allow the transformer to kill this process; for demonstrations only.")
    payload_spool: Path = Field(
        Path(".run/spool-predictor"),
        description="Folder in which records wait for the logger; several predictors may share it.",
    )
    payload_addressed: bool = Field(
        False, description="Record also the requests that address the predictor, with :authority predictor."
    )
