"""The runner's settings: the file `.env`, if there is one, and the environment, which takes precedence.

The file is at the root of the checkout, or for an installed package in the folder where the command runs. A malformed
value or an unknown `GATEWAY_*` is refused with one line. Settings of the services (`TRANSFORMER_*`, `PREDICTOR_*`,
`LOGGER_*`, `OTEL_*`) are passed on; the services validate them.
"""

import os
import re
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from dotenv import dotenv_values
from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from headrace.endpoints import host_and_port, is_service, parse_endpoints, steps_port
from headrace.errors import StartupError
from headrace.models.sources import DEFAULT_MODELS
from headrace.settings import drop_service_links
from headrace.validation import first_fault, matching, unknown_setting

_CHECKOUT = Path(__file__).resolve().parent.parent
IS_CHECKOUT = (_CHECKOUT / "envoy" / "envoy.yaml").exists()
PROGRAM = "make" if IS_CHECKOUT else "headrace"  # What messages tell the user to run.
# Envoy's configuration, the bundled models and the load test.
ROOT = _CHECKOUT if IS_CHECKOUT else Path(__file__).resolve().parent / "share"
# The user's `.env` and `.run`, and the services' working folder: for an installed package where the command runs.
HOME = _CHECKOUT if IS_CHECKOUT else Path.cwd()
LOOPBACK = "127.0.0.1"
REPLICA_STRIDE = 10  # Predictors listen on 9000, 9010, 9020, …

_ENV_FILE = HOME / ".env"
_OF_CLIENTS = ("HF_", "AWS_", "AZURE_", "GOOGLE_", "FSSPEC_", "DOCKER_CONFIG")  # Of places that have models.
_PASSED_ON = ("TRANSFORMER_", "PREDICTOR_", "LOGGER_", "OTEL_", *_OF_CLIENTS)

_ORIGIN = r"https?://[A-Za-z0-9.\[\]:-]+"
_HOST = r"[A-Za-z0-9.-]+"
_HOST_AND_PORT = rf"{_HOST}:([1-9][0-9]{{0,4}})"
_MAX_PORT = 65535


def _moved(port: int, info: ValidationInfo) -> int:
    """The port with PORT_OFFSET added; 0 stays."""
    moved = port and port + info.data.get("port_offset", 0)
    if moved > _MAX_PORT:
        raise ValueError(f"is above {_MAX_PORT} with PORT_OFFSET")
    return int(moved)


Port = Annotated[int, Field(ge=1, le=_MAX_PORT), AfterValidator(_moved)]
MetricsPort = Annotated[int, Field(ge=0, le=_MAX_PORT), AfterValidator(_moved)]  # 0: no page.
Origins = Annotated[
    str,
    matching(rf"(\*|{_ORIGIN}(,{_ORIGIN})*)?", "must be * or a comma list of origins such as https://host:port"),
]
Hosts = Annotated[
    str,
    matching(rf"(\*|{_HOST}(,{_HOST})*)?", "must be * or a comma list of host names such as models.example.com"),
    AfterValidator(str.lower),
]
PathText = Annotated[
    str, matching(r"[^\"\\\x00-\x1f\x7f]*", "must have no quotation marks, backslashes or control characters")
]
TokenName = Annotated[str, matching(r"[A-Za-z0-9._~:/?#@!$&'()*+,;=%-]*", "must be a name or a URI, as in the tokens")]
PageAddress = Annotated[str, matching(r"(https?://\S+)?", "must begin with http:// or https://")]


class StackSettings(BaseSettings):
    """The settings of a stack; ports are those of the local machine."""

    model_config = SettingsConfigDict(env_file=_ENV_FILE, env_ignore_empty=True, extra="ignore", frozen=True)

    port_offset: int = Field(
        0,
        ge=0,
        le=_MAX_PORT,
        description="Added to every port of this table, for several stacks on one machine; the run folder of such a"
        " stack is .run-OFFSET.",
    )
    gateway_insecure: bool = Field(
        False,
        description="Whether the gateway may listen beyond loopback, where every caller may use the models.",
    )
    gateway_keys: str = Field(
        "", description="YAML file of the clients' keys (docs/security.md). Empty: a call needs no key."
    )
    gateway_jwks: PathText = Field(
        "",
        description="File with the JSON Web Key Set whose tokens are accepted as keys. A changed file takes effect"
        " within 2 s. In containers, one in the folder config. Empty: no tokens.",
    )
    gateway_bind: IPv4Address = Field(
        IPv4Address(LOOPBACK), description="Address the gateway's public port listens on."
    )
    gateway_port: Port = Field(
        8080, description="The public port without TLS; if GATEWAY_TLS is set, never beyond loopback."
    )
    gateway_tls: PathText = Field(
        "",
        description="Folder with tls.crt and tls.key, for a public port with TLS; with a ca.crt too, clients need a"
        " certificate of that authority. Changed files take effect at once. Empty: no TLS.",
    )
    gateway_tls_port: Port = Field(8443, description="The public port with TLS, where GATEWAY_TLS is set.")
    gateway_jwt_issuer: TokenName = Field("", description="The issuer (iss) of the tokens of GATEWAY_JWKS.")
    gateway_jwt_audience: TokenName = Field(
        "", description="The required audience (aud) of the tokens of GATEWAY_JWKS."
    )
    gateway_rate_limit_service: str = Field(
        "",
        description="host:port of a rate limit service that speaks Envoy's protocol and counts the requests of clients"
        " with requests_per_minute for all gateways and processes. Empty: each process counts its own.",
    )
    gateway_rate_limit_required: bool = Field(
        False, description="Whether those clients' calls are refused (503) while that service does not answer."
    )
    management_port: Port = Field(
        8081,
        description="Port on loopback where load, unload, the payload log and the settings of logs and traces are"
        " served. Without keys the public port serves them only if it listens on loopback itself; with keys, a key"
        " decides at both.",
    )
    gateway_inner_port: Port = Field(8090, description="Port that leads from the transformer to the predictors.")
    gateway_admin_port: Port = Field(9901, description="Envoy's admin port.")
    gateway_trace_percent: int = Field(100, ge=0, le=100, description="Percentage of requests that Envoy traces.")
    gateway_allowed_origins: Origins = Field(
        "", description="Comma list of the origins (https://host:port) whose pages may call the gateway, or *."
    )
    gateway_hosts: Hosts = Field(
        "",
        description="Comma list of the host names by which browsers may call the gateway, or *. Addresses, localhost"
        " and names without a dot always may, and so may programs that are no browsers.",
    )
    gateway_trace_page: PageAddress = Field(
        "", description="Address of a trace for the playground's links, without the id at its end. Empty: no links."
    )
    transformer_port: Port = Field(9001, description="The transformer's port.")
    transformer_http_port: Port = Field(9003, description="The transformer's port of OpenAI's API, for the gateway.")
    predictor_port: Port = Field(9000, description="The first predictor's port; the next ones are +10, +20, …")
    logger_port: Port = Field(9002, description="The logger's port.")
    transformer_metrics_port: MetricsPort = Field(9101, description="The transformer's Prometheus page. 0: none.")
    predictor_metrics_port: MetricsPort = Field(
        9100, description="The first predictor's page; the next ones are +10, +20, … 0: none."
    )
    logger_metrics_port: MetricsPort = Field(9102, description="The logger's page. 0: none.")
    locust_port: Port = Field(8089, description="The page of `make load`.")
    models: str = Field(
        DEFAULT_MODELS if IS_CHECKOUT else DEFAULT_MODELS.replace("=", f"={ROOT}/"),
        description="Comma list of name=folder-or-hub-id[@revision], or org/name of the hub, or name=URL.",
    )
    predictor_endpoints: Annotated[str, AfterValidator(lambda text: ",".join(parse_endpoints(text)))] = Field(
        "",
        description="Comma list of host:port of predictors on other hosts, used beside the local ones; a name stands"
        " for all its addresses, _service._tcp.domain without a port for its SRV records (docs/production.md). Empty:"
        " only local ones.",
    )
    predictors: int = Field(
        1,
        ge=0,
        le=64,
        validate_default=True,
        description="Number of predictors on this machine; 0 only with PREDICTOR_ENDPOINTS.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto uses CUDA if there is a device.")
    development: bool = Field(
        False,
        description="Whether the playground may kill the predictor of the stream that it shows; for demonstrations.",
    )
    otel_exporter_otlp_endpoint: str = Field(f"http://{LOOPBACK}:4317", description="Where Envoy sends its traces.")
    otel_exporter_otlp_traces_endpoint: str = Field("", description="The same; takes precedence unless it is empty.")
    roll_patience_s: float = Field(
        600.0, ge=0, le=3600, description="Seconds that `make roll` gives the calls of each service that it replaces."
    )
    run_folder: Path = Field(Path(".run"), description="Logs, payload database and derived configuration.")

    @field_validator("gateway_bind")
    @classmethod
    def _is_open_on_purpose(cls, value: IPv4Address, info: ValidationInfo) -> IPv4Address:
        known = info.data
        if not (value.is_loopback or any(map(known.get, ("gateway_keys", "gateway_jwks", "gateway_insecure")))):
            raise ValueError(
                "everyone who reaches this address could use the models: set GATEWAY_KEYS or GATEWAY_JWKS;"
                " GATEWAY_INSECURE=true allows it, for example behind a proxy that checks its callers"
            )
        return value

    @field_validator("otel_exporter_otlp_endpoint", "otel_exporter_otlp_traces_endpoint")
    @classmethod
    def _has_host_and_port(cls, value: str) -> str:
        if not value:
            return value
        url = value if "://" in value else f"http://{value}"
        if not urlsplit(url).hostname or urlsplit(url).port is None:
            raise ValueError("is not http://host:port")
        return url

    @field_validator("gateway_rate_limit_service")
    @classmethod
    def _is_an_endpoint(cls, value: str) -> str:
        endpoint = re.fullmatch(_HOST_AND_PORT, value)
        if value and (endpoint is None or int(endpoint[1]) > _MAX_PORT):
            raise ValueError("must be host:port")
        return value

    @field_validator("predictors")
    @classmethod
    def _is_zero_only_with_endpoints(cls, value: int, info: ValidationInfo) -> int:
        endpoints, port = info.data.get("predictor_endpoints"), info.data.get("predictor_port")
        if endpoints is None or port is None:
            return value  # One of these is reported.
        if not (value or endpoints):
            raise ValueError("a stack without a local predictor needs PREDICTOR_ENDPOINTS")
        own = {f"{host}:{number}" for host in (LOOPBACK, "localhost") for number in _replica_ports(port, value)}
        for endpoint in endpoints.split(","):
            if endpoint in own:
                raise ValueError(f"{endpoint} of PREDICTOR_ENDPOINTS is the address of a local predictor")
        return value

    @field_validator("run_folder")
    @classmethod
    def _is_of_this_stack(cls, value: Path, info: ValidationInfo) -> Path:
        offset = info.data.get("port_offset", 0)
        return HOME / (f".run-{offset}" if offset and value == Path(".run") else value)

    @property
    def remote_predictors(self) -> tuple[tuple[str, int], ...]:
        """Hosts and ports of PREDICTOR_ENDPOINTS, without services."""
        endpoints = parse_endpoints(self.predictor_endpoints)
        return tuple(host_and_port(endpoint) for endpoint in endpoints if not is_service(endpoint))

    @property
    def listed_predictors(self) -> Path | None:
        """The transformer's file of predictors for the gateway, which resolves no services; None without one."""
        has_services = any(map(is_service, parse_endpoints(self.predictor_endpoints)))
        return self.run_folder / "predictor-endpoints.json" if has_services else None

    @property
    def key_file(self) -> Path | None:
        """GATEWAY_KEYS as a path; relative ones are those of the folder of `.env`."""
        return HOME / self.gateway_keys if self.gateway_keys else None

    @property
    def predictor_ports(self) -> tuple[int, ...]:
        return _replica_ports(self.predictor_port, self.predictors)

    @property
    def predictor_metrics_ports(self) -> tuple[int, ...]:
        if not self.predictor_metrics_port:
            return (0,) * self.predictors
        return tuple(port - self.predictor_port + self.predictor_metrics_port for port in self.predictor_ports)

    @property
    def gateway(self) -> str:
        """Where a client on this machine reaches the gateway, without TLS."""
        host = LOOPBACK if self.gateway_plain_bind.is_unspecified else self.gateway_plain_bind
        return f"{host}:{self.gateway_port}"

    @property
    def gateway_plain_bind(self) -> IPv4Address:
        """Where the port without TLS listens: with TLS, never beyond loopback."""
        return IPv4Address(LOOPBACK) if self.gateway_tls and not self.gateway_bind.is_loopback else self.gateway_bind

    @property
    def gateway_with_tls(self) -> str:
        """The same with TLS; empty without."""
        host = LOOPBACK if self.gateway_bind.is_unspecified else self.gateway_bind
        return f"{host}:{self.gateway_tls_port}" if self.gateway_tls else ""

    @property
    def otel_address(self) -> tuple[str, int]:
        url = urlsplit(self.otel_exporter_otlp_traces_endpoint or self.otel_exporter_otlp_endpoint)
        return str(url.hostname), int(url.port or 0)

    @property
    def first_model(self) -> str:
        return re.split("[=@:,]", self.models.strip(), maxsplit=1)[0].strip()

    def ports(self) -> dict[str, tuple[int, ...]]:
        """Every port of the stack by the setting that chooses it."""
        ports = {
            "GATEWAY_PORT": (self.gateway_port,),
            "GATEWAY_TLS_PORT": (self.gateway_tls_port if self.gateway_tls else 0,),
            "MANAGEMENT_PORT": (self.management_port,),
            "GATEWAY_INNER_PORT": (self.gateway_inner_port,),
            "GATEWAY_ADMIN_PORT": (self.gateway_admin_port,),
            "TRANSFORMER_PORT": (self.transformer_port,),
            "TRANSFORMER_HTTP_PORT": (self.transformer_http_port,),
            "PREDICTOR_PORT": (*self.predictor_ports, *map(steps_port, self.predictor_ports)),
            "LOGGER_PORT": (self.logger_port,),
            "TRANSFORMER_METRICS_PORT": (self.transformer_metrics_port,),
            "PREDICTOR_METRICS_PORT": self.predictor_metrics_ports,
            "LOGGER_METRICS_PORT": (self.logger_metrics_port,),
        }
        return {name: numbers for name, numbers in ports.items() if all(numbers)}


def _replica_ports(first: int, count: int) -> tuple[int, ...]:
    return tuple(first + REPLICA_STRIDE * replica for replica in range(count))


_KNOWN = frozenset(name.upper() for name in StackSettings.model_fields)


def check_name(name: str) -> None:
    """Raises StartupError for a name that is a setting neither of a stack nor of its services."""
    if name not in _KNOWN and not name.startswith(_PASSED_ON):
        raise StartupError(unknown_setting(name, _KNOWN, "docs/settings.md lists the known ones"))


def load() -> StackSettings:
    """The settings of `.env` and the environment; raises StartupError with one line."""
    for prefix in ("GATEWAY_", "TRANSFORMER_", "PREDICTOR_", "LOGGER_"):
        drop_service_links(os.environ, prefix)
    for name in sorted({*os.environ, *dotenv_values(_ENV_FILE)}):
        if name.startswith("GATEWAY_"):
            check_name(name)
    try:
        return StackSettings()
    except ValidationError as error:
        (field, *_), message = first_fault(error)
        raise StartupError(f"{str(field).upper()}={error.errors()[0]['input']}: {message}") from None


def environment() -> dict[str, str]:
    """The environment that services inherit: the runner's, and the services' own settings in `.env`."""
    own = {name: value for name, value in dotenv_values(_ENV_FILE).items() if value and name.startswith(_PASSED_ON)}
    inherited = own | dict(os.environ)
    inherited.pop("PREDICTOR_ENDPOINTS", None)  # Of the stack, unknown to the predictor.
    return inherited


def own_environment() -> dict[str, str]:
    """Of this process's environment, the settings of a stack and of its services."""
    return {name: value for name, value in os.environ.items() if name in _KNOWN or name.startswith(_PASSED_ON)}
