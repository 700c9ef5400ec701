"""Applies GATEWAY_TLS, GATEWAY_JWKS and GATEWAY_RATE_LIMIT_SERVICE to the gateway's configuration, as envoy/start.sh
does in a container.

A setting enables the lines of `envoy/envoy.yaml` after its mark, #TLS, #CLIENTS, #JWT or #LIMITS; <NAME> in them is a
setting's value. Certificates are separate files beside the derived configuration, because Envoy reloads only such
secrets when they change. The files of the settings are validated before Envoy starts: StartupError with one line.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable
from pathlib import Path

from headrace.errors import StartupError
from headrace_runner.settings import HOME, StackSettings

SECRETS = ("certificate.yaml", "client_authority.yaml")
_SOCKET = "jwks.sock"
_MAX_SOCKET_BYTES = 107  # Linux: sockaddr_un.


def check(settings: StackSettings) -> None:
    """Raises StartupError unless certificate, key and authority belong together, and the key set is one."""
    if settings.gateway_tls:
        folder = _path(settings.gateway_tls)
        if not all((folder / name).is_file() for name in ("tls.crt", "tls.key")):
            raise StartupError(
                f"GATEWAY_TLS={settings.gateway_tls}: must be a folder with a tls.crt and a tls.key;"
                " `make certs` makes them for development"
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


def fill(text: str, settings: StackSettings) -> str:
    """A file of `envoy/` with the values of the settings and the lines behind their marks."""
    if settings.gateway_tls:
        folder = _path(settings.gateway_tls)
        text = text.replace("#TLS ", "").replace("<GATEWAY_TLS>", str(folder))
        if (folder / "ca.crt").exists():
            text = text.replace("#CLIENTS ", "")
    if settings.gateway_jwks:
        file = _path(settings.gateway_jwks)
        values = {
            "#JWT ": "",
            "<GATEWAY_JWKS_FOLDER>": str(file.parent),
            "<GATEWAY_JWKS>": str(file),
            "<GATEWAY_JWT_ISSUER>": settings.gateway_jwt_issuer,
            "<GATEWAY_JWT_AUDIENCE>": settings.gateway_jwt_audience,
        }
        for mark, value in values.items():
            text = text.replace(mark, value)
    if settings.gateway_rate_limit_service:
        host, _, port = settings.gateway_rate_limit_service.rpartition(":")
        values = {
            "#LIMITS ": "",
            "<GATEWAY_RATE_LIMIT_HOST>": host,
            "<GATEWAY_RATE_LIMIT_PORT>": port,
            "<GATEWAY_RATE_LIMIT_REQUIRED>": str(settings.gateway_rate_limit_required).lower(),
        }
        for mark, value in values.items():
            text = text.replace(mark, value)
    return text.replace("<STATE>", str(settings.run_folder.absolute()))


def write_secrets(settings: StackSettings, templates: Path) -> None:
    """Writes the files of the certificates into the run folder; `templates` is the folder `envoy`."""
    if settings.gateway_tls:
        for name in SECRETS:
            (settings.run_folder / name).write_text(fill((templates / name).read_text(), settings))


def _check_key_set(settings: StackSettings) -> None:
    setting = f"GATEWAY_JWKS={settings.gateway_jwks}"
    try:
        document = json.loads(_path(settings.gateway_jwks).read_bytes())
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


def _path(setting: str) -> Path:
    """A path of a setting is relative to the folder of `.env`."""
    return HOME / setting
