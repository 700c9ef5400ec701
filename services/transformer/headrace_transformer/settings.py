"""The transformer's settings: `TRANSFORMER_*` and `MODELS`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ByteSize, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from headrace.endpoints import is_service, parse_endpoints
from headrace.errors import StartupError
from headrace.models.engine_sources import EngineSource, read_engines
from headrace.models.sources import ModelSource, is_name, parse_models
from headrace.payload.settings import RecordingSettings
from headrace.settings import Port, models_field, read_by
from headrace_transformer.models.processors import ProcessorSource, parse_processors
from headrace_transformer.text.answer_parser import REASONING_FORMATS, TOOL_FORMATS, parse_formats

Addresses = Annotated[tuple[str, ...], NoDecode, read_by(parse_endpoints)]
ToolFormats = Annotated[dict[str, str], NoDecode, read_by(partial(parse_formats, known=TOOL_FORMATS))]
ReasoningFormats = Annotated[dict[str, str], NoDecode, read_by(partial(parse_formats, known=tuple(REASONING_FORMATS)))]
AllModels = Annotated[tuple[ModelSource | EngineSource, ...], NoDecode, read_by(parse_models)]
_LEAST_SIGNING_KEY = 16
Processors = Annotated[tuple[ProcessorSource, ...], NoDecode, read_by(parse_processors)]


def _long_enough(key: SecretStr) -> SecretStr:
    if len(key.get_secret_value()) < _LEAST_SIGNING_KEY:
        raise ValueError(f"must have at least {_LEAST_SIGNING_KEY} characters, such as those of `openssl rand -hex 32`")
    return key


class TransformerSettings(RecordingSettings):
    model_config = SettingsConfigDict(env_prefix="TRANSFORMER_", frozen=True, env_ignore_empty=True)

    port: Port = Field(9001, description="gRPC port.")
    http_port: Port = Field(9003, description="Port of OpenAI's API by HTTP/2 without TLS, for the gateway.")
    metrics_port: Port = Field(9101, description="Port of the Prometheus page, /metrics. 0: none.")
    models: AllModels = models_field()
    engines: Path | None = Field(
        None,
        description=(
            "YAML file of further models at engines: with a key, a kind or many addresses each (docs/engines.md)."
            " Empty: there are none."
        ),
    )
    predictor: str = Field(
        "127.0.0.1:8090",
        description=(
            "Address for probes and tensors: Envoy's inner listener, or the gRPC port of any other server of the Open "
            "Inference Protocol."
        ),
    )
    predictor_replicas: Addresses = Field(
        (),
        description=(
            "Comma list of host:port of the single predictors; a name stands for all its addresses, and "
            "_service._tcp.domain without a port for the hosts and ports of its SRV records. Generations, loading, "
            "unloading, index and statistics call them directly. Empty: there is only the one behind "
            "TRANSFORMER_PREDICTOR."
        ),
    )
    signing_key: Annotated[SecretStr, AfterValidator(_long_enough)] | None = Field(
        None,
        description=(
            "Secret text that signs the ids with which clients continue answers and responses, the same for all "
            "transformers of a stack. Empty: they share a file in payload_spool."
        ),
    )
    silence_limit: float = Field(
        10.0,
        ge=2,
        le=3600,
        description=(
            "Seconds without a message after which a predictor is treated as dead and its streams resume at another "
            "one. Predictors send a message at least every second."
        ),
    )
    predictor_wait: float = Field(
        120.0,
        ge=0,
        le=3600,
        description=(
            "Seconds that an answer which has begun waits, within its deadline, for a predictor to resume it;"
            " 0: no stream is resumed."
        ),
    )
    predictor_start_wait: float = Field(
        30.0, ge=0, le=3600, description="The same for a request without any output yet; at most predictor_wait."
    )
    cached_tokens: Literal["own", "all"] = Field(
        "own",
        description=(
            "Requests whose usage has the number of cached prompt tokens: own, only those with a key or a "
            "cache_salt, which share no cache with other callers; all, every request, which reveals prompts of "
            "other callers."
        ),
    )
    sse_keep_alive: float = Field(
        15.0,
        ge=0,
        le=3600,
        description=(
            "Seconds of silence after which a stream of server-sent events gets a comment, so that no proxy "
            "closes it; the first comment sends status 200. 0: never."
        ),
    )
    resume_limit: int = Field(
        2,
        ge=1,
        le=100,
        description=(
            "Crashes of predictors in a row, without a new token between them, after which a request runs "
            "isolated on its next predictor; if that one crashes too, the request fails and is refused for ten "
            "minutes."
        ),
    )
    tokenizer_threads: int = Field(2, ge=1, le=64, description="Threads that tokenise prompts above 8 KiB.")
    processors: Processors = Field(
        (),
        description=(
            "Comma list of name=package.module:Class or name=folder/file.py:Class: pre- and post-processing "
            "code, see headrace/processor.py."
        ),
    )
    processor_threads: int = Field(4, ge=1, le=256, description="Threads for blocking code of processors.")
    processor_waiting: int = Field(64, ge=0, le=10_000, description="Maximum of calls that wait for such a thread.")
    max_calls: int = Field(
        2048,
        ge=1,
        description=(
            "Maximum of calls in flight for each worker; further ones are refused at once. Health checks are exempt."
        ),
    )
    direct_models: Path | None = Field(
        None,
        description=(
            "File in which the transformer lists the models whose ModelInfer calls the gateway may send straight to a"
            " predictor. Empty: all go through the transformer."
        ),
    )
    gateway_endpoints: Path | None = Field(
        None,
        description=(
            "File in which the transformer lists the addresses of predictor_replicas for the gateway, as Envoy reads"
            " endpoints. Empty: the gateway resolves the names itself, which it cannot do with SRV records."
        ),
    )
    model_routes: Path | None = Field(
        None,
        description=(
            "YAML file of further names of models: aliases, weighted splits and fallbacks (docs/models.md); it is read "
            "again when it changes. Empty: there are none."
        ),
    )
    keys: Path | None = Field(
        None,
        description=(
            "YAML file of the clients' keys (docs/security.md); it is read again when it changes. Empty: the gateway "
            "asks for no key."
        ),
    )
    key_digests: Path | None = Field(
        None,
        validate_default=True,
        description="File with the digests of the keys, written for the gateway; needed with keys.",
    )
    tool_formats: ToolFormats = Field(
        {},
        description=(
            "Comma list of model=format for models whose way to write tool calls is not found in their chat template"
            " and vocabulary: hermes, llama, mistral, harmony or none."
        ),
    )
    reasoning_formats: ReasoningFormats = Field(
        {}, description="The same for the marks of reasoning: think, mistral, harmony or none."
    )
    batches: Path | None = Field(
        None,
        description=(
            "Folder of OpenAI's Batch API: files, batches and their results; all transformers that share it run its"
            " batches. Empty: there are no batches. `make up` sets .run/batches, compose a volume."
        ),
    )
    batch_concurrency: int = Field(
        8, ge=1, le=256, description="Requests of batches that a worker answers at once, with the lowest share."
    )
    batch_storage: ByteSize = Field(
        ByteSize(4 << 30),
        ge=1 << 20,
        description=(
            "Maximum size of all files of batches; further files are refused. A client with a key may have half of it."
        ),
    )
    batches_per_client: int = Field(16, ge=1, le=1000, description="Maximum of a client's batches in progress.")
    batch_days: int = Field(7, ge=1, le=3650, description="Days after which files and ended batches are removed.")
    development: bool = Field(
        False, description="Allow callers to kill the predictor of their request; for demonstrations only."
    )
    workers: int = Field(
        1, ge=1, le=64, description="Processes that share the port, for text work that needs more than one core."
    )

    @field_validator("predictor")
    @classmethod
    def _is_one_address(cls, predictor: str) -> str:
        if is_service(predictor):
            raise ValueError(f"{predictor!r} is not host:port")
        return predictor

    @field_validator("key_digests")
    @classmethod
    def _is_set_with_keys(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        if path is None and info.data.get("keys") is not None:
            raise ValueError("needs a value where TRANSFORMER_KEYS has one")
        return path

    @property
    def own_models(self) -> tuple[ModelSource, ...]:
        """The models of predictors."""
        return tuple(model for model in self.models if isinstance(model, ModelSource))

    @property
    def all_engines(self) -> tuple[EngineSource, ...]:
        """The models at engines; raises StartupError."""
        sources = tuple(model for model in self.models if isinstance(model, EngineSource))
        sources += () if self.engines is None else read_engines(self.engines)
        names = [*(model.name for model in self.own_models), *(source.name for source in sources)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise StartupError(f"TRANSFORMER_ENGINES and MODELS name the model {twice!r} twice")
        if wrong := next((name for name in names if not is_name(name)), None):
            raise StartupError(f"{self.engines}: {wrong!r} is not a name for a model")
        return sources

    @property
    def unknown_logged_models(self) -> list[str]:
        """Models with their own log mode that are not configured; they may be loaded later, or be misspelt."""
        known = {model.name for model in self.models} | {source.name for source in self.all_engines}
        known |= {processor.name for processor in self.processors}
        return [name for name in self.payload_log.models if name not in known]
