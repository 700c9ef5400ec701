"""Settings from environment variables, refused when unknown or malformed.

Each service declares a subclass of `ServiceSettings` with its prefix; a field's description is its documentation and
what `--help` prints. Nothing else reads the environment but OpenTelemetry's own `OTEL_*`, the hub client's `HF_*`, and
for models of buckets and registries `AWS_*`, `AZURE_*`, `GOOGLE_*`, `FSSPEC_*`, `DOCKER_CONFIG` and `XDG_CACHE_HOME`.
"""

import argparse
import os
import re
from collections.abc import Callable, MutableMapping
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BeforeValidator, ByteSize, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from headrace.endpoints import is_address
from headrace.errors import StartupError
from headrace.models.sources import DEFAULT_MODELS, ModelSource, parse_own_models
from headrace.telemetry.logs import LogFormat
from headrace.validation import first_fault, unknown_setting

Port = Annotated[int, Field(ge=0, le=65535)]


def read_by(parse: Callable[[str], Any]) -> BeforeValidator:
    """Parses a setting's text; needs NoDecode beside it, otherwise pydantic expects JSON."""
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


Models = Annotated[tuple[ModelSource, ...], NoDecode, read_by(parse_own_models)]


class ServiceSettings(BaseSettings):
    """The settings that every service has."""

    model_config = SettingsConfigDict(frozen=True, env_ignore_empty=True)

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Port = Field(0, description="gRPC port.")
    metrics_port: Port = Field(0, description="Port of the Prometheus page, /metrics. 0: none.")
    listen: Literal["alone", "shared", "take-over"] = Field(
        "alone",
        description=(
            "alone; shared: a second process may listen on the same ports; take-over: likewise, and this "
            "process replaces one that listens already, as soon as it can serve."
        ),
    )
    log_format: LogFormat = Field(
        "auto",
        description="Format of log lines: json, console, or auto, which is json unless standard error is a terminal.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Lowest severity that is logged."
    )
    loop_timeout: float = Field(
        60.0,
        gt=0,
        description="Seconds for which the event loop may be blocked; then the process ends and is restarted.",
    )
    request_memory: ByteSize = Field(
        ByteSize(768 << 20),
        gt=0,
        description=(
            "Memory for all requests in flight above 16 KiB together, each counted as four times its size for"
            " its copies; further ones are refused."
        ),
    )
    max_idle_calls: int = Field(
        4096,
        ge=1,
        description=(
            "Maximum of open calls without a request in flight, such as an idle ModelStreamInfer; beyond it "
            "the longest idle call of the caller with most calls ends."
        ),
    )
    max_idle_calls_per_client: int = Field(
        3072,
        ge=1,
        description=(
            "Maximum of such calls of one caller, which is a client's name or, without keys, an address; beyond it "
            "the caller's longest idle one ends."
        ),
    )
    idle_timeout: float = Field(
        3600.0, gt=0, description="Seconds after which an open call without a request in flight ends."
    )
    drain_s: float = Field(5.0, ge=0, le=3600, description="Seconds that calls in flight have to end after SIGTERM.")


def models_field() -> Any:
    """The setting `MODELS`, which is without a prefix because two services share it."""
    return Field(
        parse_own_models(DEFAULT_MODELS),
        validation_alias="MODELS",
        description=(
            "Comma list of name=folder-or-hub-id[@revision], of org/name[@revision] for the model of that id, of"
            " name=URL of a bucket or a registry (docs/models.md), or of name=http://host:port/v1#served-name for a"
            " model at an engine that speaks OpenAI's API (docs/engines.md)."
        ),
    )


SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


def load(cls: type[SettingsT], program: str) -> SettingsT:
    """The settings of the environment, from which Kubernetes' service links are taken out; handles `--help`.

    Raises StartupError with one line.
    """
    _parse_command_line(cls, program)
    prefix = cls.model_config.get("env_prefix", "")
    drop_service_links(os.environ, prefix)
    known = set(_environment_names(cls))
    unknown = sorted(name for name in os.environ if name.startswith(prefix) and name not in known)
    if unknown:
        raise StartupError(unknown_setting(unknown[0], known, f"`python -m {program} --help` lists the known ones"))
    try:
        return cls()
    except ValidationError as error:
        place, message = first_fault(error)
        field = str(place[0]) if place else ""
        name = field if field in known else f"{prefix}{field}".upper()
        is_secret = field in cls.model_fields and _is_secret(cls.model_fields[field].annotation)
        given = "" if is_secret else error.errors()[0]["input"]
        raise StartupError(f"{name}={given}: {message}") from None


def _is_secret(annotation: Any) -> bool:
    return annotation is SecretStr or any(map(_is_secret, get_args(annotation)))


def _environment_names(cls: type[ServiceSettings]) -> dict[str, str]:
    """Environment variable → field."""
    prefix = cls.model_config.get("env_prefix", "")
    return {str(field.validation_alias or f"{prefix}{name}".upper()): name for name, field in cls.model_fields.items()}


def _parse_command_line(cls: type[ServiceSettings], program: str) -> None:
    names = _environment_names(cls)
    width = max(map(len, names))
    lines = []
    for variable, name in names.items():
        field = cls.model_fields[name]
        default = DEFAULT_MODELS if variable == "MODELS" else field.default
        lines.append(f"  {variable:<{width}}  {field.description} Default: {default}")
    argparse.ArgumentParser(
        prog=f"python -m {program}",
        description="Settings are environment variables:\n\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()


_NUMBER = r"\d{1,5}"
_PROTOCOL = "tcp|udp|sctp"
_URL = rf"({_PROTOCOL})://(\[[0-9A-Fa-f:.]+\]|[0-9.]+):{_NUMBER}"
_NAMED_PORT = rf"PORT_{_NUMBER}_({_PROTOCOL.upper()})"
# The end of a link's name, and the test of its value. A service named `predictor-gpu` has a longer name before the end.
_LINKS = tuple(
    (re.compile(rf"(.*_)?({end})").fullmatch, is_value)
    for end, is_value in (
        (rf"PORT|{_NAMED_PORT}", re.compile(_URL).fullmatch),
        (rf"{_NAMED_PORT}_PROTO", re.compile(_PROTOCOL).fullmatch),
        (rf"{_NAMED_PORT}_PORT|SERVICE_PORT(_[A-Z0-9_]+)?", re.compile(_NUMBER).fullmatch),
        (rf"{_NAMED_PORT}_ADDR|SERVICE_HOST", is_address),
    )
)


def drop_service_links(environment: MutableMapping[str, str], prefix: str) -> None:
    """Takes Kubernetes' links of services whose name begins like `prefix` (`PREDICTOR_`) out of an environment.

    Each service brings every container of its namespace `PREDICTOR_PORT=tcp://10.0.0.1:9000` and more, which are no
    settings of ours although they begin like some. Name and value together identify them.
    """
    for variable, value in list(environment.items()):
        rest = variable.removeprefix(prefix)
        if rest != variable and any(is_name(rest) and is_value(value) for is_name, is_value in _LINKS):
            del environment[variable]
