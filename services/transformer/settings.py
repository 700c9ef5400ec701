"""The transformer's settings: `TRANSFORMER_*` and `MODELS`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ByteSize, Field, InstanceOf
from pydantic_settings import NoDecode, SettingsConfigDict

from millrace.payload.redaction import Redaction, parse_redactions
from millrace.payload.rules import Modes, PayloadRules, parse_metadata, parse_modes
from millrace.settings import Models, Port, ServiceSettings, models_field
from services.transformer.models.processor_sources import ProcessorSource, parse_processors

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


LogModes = Annotated[Modes, NoDecode, BeforeValidator(lambda v: parse_modes(v) if isinstance(v, str) else v)]
Redactions = Annotated[
    tuple[InstanceOf[Redaction], ...],
    NoDecode,
    BeforeValidator(lambda v: parse_redactions(v) if isinstance(v, str) else v),
]
LoggedMetadata = Annotated[
    frozenset[str], NoDecode, BeforeValidator(lambda v: parse_metadata(v) if isinstance(v, str) else v)
]


class TransformerSettings(ServiceSettings):
    """What the transformer can be told."""

    model_config = SettingsConfigDict(env_prefix="TRANSFORMER_", frozen=True, env_ignore_empty=True)

    port: Port = Field(9001, description="gRPC port.")
    metrics_port: Port = Field(9101, description="Port of the Prometheus page, /metrics. 0: none.")
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
    silence_limit: float = Field(
        10.0,
        ge=0.1,
        le=3600,
        description="Seconds without a word after which a predictor that generates counts as dead, and its streams go"
        " on elsewhere; it says a word ten times as often, and every second at least.",
    )
    predictor_wait: float = Field(
        120.0,
        ge=0,
        le=3600,
        description="Seconds that an answer which has begun waits, within its deadline, while no predictor goes on with"
        " it; 0: not at all, so that no stream goes on.",
    )
    predictor_start_wait: float = Field(
        30.0,
        ge=0,
        le=3600,
        description="The same for a request of which nothing has been answered yet; at most predictor_wait.",
    )
    cached_tokens: Literal["own", "all"] = Field(
        "own",
        description="Whose usage says how many tokens of the prompt were cached: own, requests with a cache_salt, which"
        " share nothing with others; all, every request, which tells a caller what strangers have asked.",
    )
    sse_keep_alive: float = Field(
        15.0,
        ge=0,
        le=3600,
        description="Seconds of silence after which a stream of server-sent events gets a comment, so that no proxy on"
        " the way takes it for dead; the first one sends the status 200. 0: never.",
    )
    resume_limit: int = Field(
        2,
        ge=1,
        le=100,
        description="Deaths of predictors in a row, without a new token between them, after which a request runs alone"
        " on its next one; another one then ends it, and it is refused for ten minutes.",
    )
    logger: str = Field("127.0.0.1:9002", description="The payload logger.")
    payload_spool: Path = Field(
        Path(".run/spool"), description="Folder where records lie until the logger has them; made if missing."
    )
    payload_spool_max: ByteSize = Field(
        ByteSize(1 << 30), ge=1 << 20, description="What lies there at most, each worker; more is dropped and counted."
    )
    payload_spool_fsync: bool = Field(False, description="Whether what was written there outlives a loss of power too.")
    payload_queue_memory: ByteSize = Field(
        ByteSize(64 << 20), gt=0, description="What waits in memory to be written there; more is dropped and counted."
    )
    payload_log: LogModes = Field(
        Modes(),
        description="What records keep: all, request, response, metadata (neither) or off (no record), and after it"
        " model=mode for single models, as in all,storyteller=metadata.",
    )
    payload_sample: float = Field(
        1.0, ge=0, le=1, description="Share of the requests that are recorded, chosen by their ids."
    )
    payload_redact: Redactions = Field(
        (),
        description="What records leave out: a JSON list of rules, or a file that holds one:"
        ' {"path": "$.parameters.user"}, {"pattern": "[0-9]{16}", "replace": "[card]"}, or both in one; see'
        " millrace/payload/redaction.py.",
    )
    payload_metadata: LoggedMetadata = Field(
        frozenset(),
        description="Comma list of the callers' headers that records keep; those that hold secrets are refused.",
    )
    payload_tensor_bytes: ByteSize = Field(
        ByteSize(0),
        ge=0,
        le=16 << 20,
        description="Contents of tensors up to so many bytes are kept, of larger ones the digest alone.",
    )
    tokenizer_threads: int = Field(2, ge=1, le=64, description="Threads that tokenise prompts above 8 KiB.")
    processors: Processors = Field(
        (),
        description="Comma list of name=package.module:Class or name=folder/file.py:Class: code of your own before and"
        " after a model, see millrace/processor.py.",
    )
    processor_threads: int = Field(4, ge=1, le=256, description="Threads that run blocking code of processors.")
    processor_waiting: int = Field(64, ge=0, le=10_000, description="Calls that wait for such a thread at most.")
    max_calls: int = Field(
        2048,
        ge=1,
        description="Calls in flight that each worker takes at most; more are refused at once. Health is not counted.",
    )
    development: bool = Field(
        False, description="Whether callers may kill the predictor of a request of theirs; for demonstrations alone."
    )
    workers: int = Field(
        1, ge=1, le=64, description="Processes that share the port; more than one for more than one core of text."
    )

    @property
    def payload_rules(self) -> PayloadRules:
        """What is recorded of requests."""
        return PayloadRules(
            default=self.payload_log.default,
            models=self.payload_log.models,
            sample=self.payload_sample,
            redactions=self.payload_redact,
            metadata=self.payload_metadata,
            tensor_bytes=self.payload_tensor_bytes,
        )

    @property
    def unknown_logged_models(self) -> list[str]:
        """Models with a mode of their own that are not configured; they may be loaded later, or misspelt."""
        known = {model.name for model in self.models} | {processor.name for processor in self.processors}
        return [name for name in self.payload_log.models if name not in known]
