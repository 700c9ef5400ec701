"""The logger's settings: `LOGGER_*`."""

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import sqlalchemy as sql
from pydantic import AfterValidator, ByteSize, Field, HttpUrl, SecretStr
from pydantic_settings import NoDecode, SettingsConfigDict

from headrace.settings import Port, ServiceSettings, read_by
from headrace.validation import matching


def _check_url(url: SecretStr) -> SecretStr:
    try:
        parsed = sql.make_url(url.get_secret_value())
    except (sql.exc.ArgumentError, ValueError):
        parsed = None
    if parsed is None or parsed.drivername not in ("postgresql", "postgres") or not parsed.database:
        # Without the text, which has a password.
        raise ValueError("not postgresql://user:password@host:5432/database")
    return url


# A file, or the URL of a PostgreSQL, which has a password and whose driver is an extra.
Location: TypeAlias = Path | SecretStr
DatabaseUrl = Annotated[SecretStr, AfterValidator(_check_url)]
Sinks = Annotated[tuple[HttpUrl, ...], NoDecode, read_by(lambda text: text.split(","))]


Printable = Annotated[str, matching("[!-~]+", "must have printable ASCII characters only, without spaces")]


class LoggerSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="LOGGER_", frozen=True, env_ignore_empty=True)

    port: Port = Field(9002, description="gRPC port.")
    metrics_port: Port = Field(9102, description="Port of the Prometheus page, /metrics. 0: none.")
    request_memory: ByteSize = Field(
        ByteSize(384 << 20), gt=0, description=f"{ServiceSettings.model_fields['request_memory'].description}"
    )
    database: Path = Field(Path(".run/payloads.sqlite3"), description="SQLite file; created if missing.")
    database_url: DatabaseUrl | None = Field(
        None,
        description=(
            "PostgreSQL instead of an SQLite file: `postgresql://user:password@host:5432/database`. Several loggers "
            "may write to one database."
        ),
    )
    fsync: bool = Field(
        True,
        description=(
            "Write acknowledged records through to the disk, so that they survive a power failure. For SQLite: "
            "PostgreSQL has `synchronous_commit`."
        ),
    )
    retention_days: float = Field(
        7.0,
        ge=0,
        le=36500,
        description="Days after which a record is deleted, whether sinks have received it or not; 0: never.",
    )
    usage_days: float = Field(
        400.0,
        ge=0,
        le=36500,
        description=(
            "Days for which the sums of usage are kept, also after the records are deleted; 0: without limit. Monthly "
            "token budgets need 31."
        ),
    )
    max_size: ByteSize = Field(
        ByteSize(10 << 30), ge=1 << 20, description="Size of the database above which the oldest records are deleted."
    )
    sinks: Sinks = Field(
        (),
        description=(
            "Comma list of http(s) URLs that receive every record as CloudEvents; write a comma in a URL as %2C."
        ),
    )
    gen_ai_url: Annotated[
        str,
        matching(r"((grpcs?://[^/?#]+)|(https?://.+))?", "must be such as grpc://host:4317 or https://host/v1/traces"),
    ] = Field(
        "",
        description=(
            "OTLP receiver of every generation as a span with `gen_ai.*` attributes, prompts and answers included: "
            "`grpc://host:4317`, `grpcs://host:4317` with TLS, or the URL of an HTTP receiver, `https://host/v1/traces`."
        ),
    )
    gen_ai_headers: SecretStr = Field(
        SecretStr(""), description="Headers for that receiver, as in OTEL_EXPORTER_OTLP_HEADERS: `name=value,…`."
    )
    sink_from: Literal["now", "beginning"] = Field(
        "now", description="Start of a sink without a position: now, or beginning for the oldest record."
    )
    sink_timeout_s: float = Field(30.0, gt=0, le=3600, description="Seconds that a sink has to accept an event.")
    sink_concurrency: int = Field(16, ge=1, le=256, description="Maximum of events in flight to a sink.")
    sink_source: Printable = Field(
        "/headrace",
        description="Source of the events, a URI reference to which /request or /response is added.",
    )
    sink_namespace: Printable = Field("default", description="Namespace in the events, an attribute of KServe's.")
