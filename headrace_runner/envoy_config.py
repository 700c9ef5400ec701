"""Derives the local Envoy's configuration from `envoy/envoy.yaml`.

It replaces the addresses of listeners, clusters and the admin page, adds one endpoint for each predictor, with those on
other hosts (by the transformer's file if PREDICTOR_ENDPOINTS has a service), and sets the folder of referenced files,
the percentage of traced requests, and the origins whose pages may call. Everything else, including every limit, is the
same as with docker compose, unless a test passes a `Change`, which shortens limits that it cannot wait for.

GATEWAY_TLS, GATEWAY_JWKS and GATEWAY_RATE_LIMIT_SERVICE enable the lines of `envoy/envoy.yaml` after their marks, #TLS,
#CLIENTS, #JWT and #LIMITS, as envoy/start.sh does in a container; <NAME> in them is a setting's value. Certificates are
separate files beside the derived configuration, because Envoy reloads only such secrets when they change.

An unreadable file, also one of the settings, raises StartupError with one line.
"""

import json
import resource
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from headrace.errors import StartupError
from headrace_runner.settings import HOME, LOOPBACK, PROGRAM, ROOT, StackSettings

ENVOY_FOLDER = ROOT / "envoy"
SECRETS = ("certificate.yaml", "client_authority.yaml")
_NO_ORIGINS = "[]  # GATEWAY_ALLOWED_ORIGINS"
_PREDICTORS_ELSEWHERE = {"connect_timeout: 1s  # PREDICTOR_ENDPOINTS": "connect_timeout: 3.5s"}
_SERVICES = {"type: STRICT_DNS  # SRV": "type: EDS", "#SRV ": ""}
_NO_ENDPOINTS = '{"resources": []}'
_CONTAINER_FOLDER = "/etc/envoy/"
_CONNECTIONS = "envoy.resource_monitors.global_downstream_max_connections"
_OWN_DESCRIPTORS = 128  # Of Envoy: its files, listeners and connections to services.
_SOCKET = "jwks.sock"
_MAX_SOCKET_BYTES = 107  # Linux: sockaddr_un.

# Ten times as fast as that in Python, where PyYAML was built with them.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Config = dict[str, Any]
Address = tuple[str, int]
Change = Callable[[Config], None]


def derive(settings: StackSettings, change: Change | None = None) -> Config:
    """The configuration of the stack that `settings` describes; `change` is applied last."""
    path = ENVOY_FOLDER / "envoy.yaml"
    _check(settings)
    try:
        config = _derive(settings, path.read_text())
    except (OSError, ValueError, yaml.YAMLError, LookupError, TypeError, AttributeError) as error:
        problem = " ".join(str(error).split())
        raise StartupError(f"{path} is not a configuration of this stack: {type(error).__name__}: {problem}") from None
    if change is not None:
        change(config)
    return config


def _derive(settings: StackSettings, text: str) -> Config:
    config: Config = _with_local_files(yaml.load(_fill(text, settings), _Loader))  # noqa: S506
    (connections,) = [
        monitor["typed_config"]
        for monitor in config["overload_manager"]["resource_monitors"]
        if monitor["name"] == _CONNECTIONS
    ]
    # Where there are few descriptors, callers are refused rather than the connections to services.
    spare = max(_OWN_DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OWN_DESCRIPTORS)
    connections["max_active_downstream_connections"] = min(connections["max_active_downstream_connections"], spare)
    admin = (LOOPBACK, settings.gateway_admin_port)
    config["admin"]["address"] = _address(admin)
    config["layered_runtime"]["layers"][0]["static_layer"]["tracing"]["random_sampling"] = (
        settings.gateway_trace_percent
    )

    listeners: dict[str, Address] = {
        "ingress": (str(settings.gateway_plain_bind), settings.gateway_port),
        "tls": (str(settings.gateway_bind), settings.gateway_tls_port),
        "management": (LOOPBACK, settings.management_port),
        "inner": (LOOPBACK, settings.gateway_inner_port),
    }
    for listener in config["static_resources"]["listeners"]:
        if listener["name"] not in listeners:
            continue
        listener["address"] = _address(listeners[listener["name"]])

    endpoints: dict[str, Sequence[Address]] = {
        "transformer": [(LOOPBACK, settings.transformer_port)],
        "transformer_http": [(LOOPBACK, settings.transformer_http_port)],
        "predictor": [*((LOOPBACK, port) for port in settings.predictor_ports), *settings.remote_predictors],
        "logger": [(LOOPBACK, settings.logger_port)],
        "otel": [settings.otel_address],
        "admin": [admin],
    }
    for cluster in config["static_resources"]["clusters"]:
        if cluster["name"] not in endpoints:
            continue  # A cluster that the user added.
        hosts: list[Config] = [{"endpoint": {"address": _address(address)}} for address in endpoints[cluster["name"]]]
        if cluster["name"] == "transformer_http":
            for host in hosts:
                host["endpoint"]["health_check_config"] = {"port_value": settings.transformer_port}
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": hosts}]
    return config


def write(settings: StackSettings, path: Path, change: Change | None = None) -> None:
    """Writes the derived configuration as JSON, which is YAML too, and its certificates into the run folder."""
    config = json.dumps(derive(settings, change), ensure_ascii=False)
    if settings.gateway_tls:
        for name in SECRETS:
            (settings.run_folder / name).write_text(_fill((ENVOY_FOLDER / name).read_text(), settings))
    if settings.listed_predictors and not settings.listed_predictors.exists():
        # Envoy needs the file before the transformer has written it.
        settings.listed_predictors.write_text(_NO_ENDPOINTS)
    path.write_text(config)


def lua_path() -> dict[str, str]:
    """The environment by which Envoy's scripts find those that they share."""
    return {"LUA_PATH": str(ENVOY_FOLDER / "?.lua")}


def _fill(text: str, settings: StackSettings) -> str:
    """A file of `envoy/` with the values of the settings and the lines behind their marks."""
    origins = [{"exact": origin} for origin in settings.gateway_allowed_origins.split(",") if origin]
    values = {"<STATE>": str(settings.run_folder.absolute()), _NO_ORIGINS: json.dumps(origins)}
    if settings.predictor_endpoints:
        values |= _PREDICTORS_ELSEWHERE
    if settings.listed_predictors:
        values |= _SERVICES | {"<PREDICTORS>": str(settings.listed_predictors.absolute())}
    if settings.gateway_tls:
        folder = HOME / settings.gateway_tls
        values |= {"#TLS ": "", "<GATEWAY_TLS>": str(folder)}
        if (folder / "ca.crt").exists():
            values["#CLIENTS "] = ""
    if settings.gateway_jwks:
        file = HOME / settings.gateway_jwks
        values |= {
            "#JWT ": "",
            "<GATEWAY_JWKS_FOLDER>": str(file.parent),
            "<GATEWAY_JWKS>": str(file),
            "<GATEWAY_JWT_ISSUER>": settings.gateway_jwt_issuer,
            "<GATEWAY_JWT_AUDIENCE>": settings.gateway_jwt_audience,
        }
    if settings.gateway_rate_limit_service:
        host, _, port = settings.gateway_rate_limit_service.rpartition(":")
        values |= {
            "#LIMITS ": "",
            "<GATEWAY_RATE_LIMIT_HOST>": host,
            "<GATEWAY_RATE_LIMIT_PORT>": port,
            "<GATEWAY_RATE_LIMIT_REQUIRED>": str(settings.gateway_rate_limit_required).lower(),
        }
    for mark, value in values.items():
        text = text.replace(mark, value)
    return text


def _check(settings: StackSettings) -> None:
    """Raises StartupError unless certificate, key and authority belong together, and the key set is one."""
    if settings.gateway_tls:
        folder = HOME / settings.gateway_tls
        if not all((folder / name).is_file() for name in ("tls.crt", "tls.key")):
            raise StartupError(
                f"GATEWAY_TLS={settings.gateway_tls}: must be a folder with a tls.crt and a tls.key;"
                f" `{PROGRAM} certs` makes them for development"
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # A password would be asked for on the terminal.
        pair = (str(folder / "tls.crt"), str(folder / "tls.key"), lambda: "")
        _usable(settings.gateway_tls, "tls.crt and tls.key", lambda: context.load_cert_chain(*pair))
        authority = folder / "ca.crt"
        if authority.exists():
            _usable(settings.gateway_tls, "ca.crt", lambda: context.load_verify_locations(str(authority)))
    if settings.gateway_jwks:
        _check_key_set(settings)


def _check_key_set(settings: StackSettings) -> None:
    setting = f"GATEWAY_JWKS={settings.gateway_jwks}"
    try:
        document = json.loads((HOME / settings.gateway_jwks).read_bytes())
    except (OSError, ValueError):
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("keys"), list):
        raise StartupError(f'{setting}: must be a file with a JSON Web Key Set, {{"keys": […]}}')
    for name in ("gateway_jwt_issuer", "gateway_jwt_audience"):
        if not getattr(settings, name):
            raise StartupError(f"{name.upper()}=: GATEWAY_JWKS needs it, a name or a URI as in the tokens")
    if len(bytes(settings.run_folder.absolute() / _SOCKET)) > _MAX_SOCKET_BYTES:
        raise StartupError(f"RUN_FOLDER={settings.run_folder}: is too long for the socket of GATEWAY_JWKS")


def _usable(setting: str, names: str, load: Callable[[], None]) -> None:
    try:
        load()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError.
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise StartupError(f"GATEWAY_TLS={setting}: {names} cannot be used: {reason}") from None


def _address(address: Address) -> Config:
    host, port = address
    return {"socket_address": {"address": host, "port_value": port}}


def _with_local_files(value: Any) -> Any:
    """A copy without shared parts, with the container's paths replaced by the repository's."""
    if isinstance(value, dict):
        return {key: _with_local_files(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_local_files(item) for item in value]
    if isinstance(value, str) and value.startswith(_CONTAINER_FOLDER):
        return str(ENVOY_FOLDER / value.removeprefix(_CONTAINER_FOLDER))
    return value
