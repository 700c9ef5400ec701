"""`headrace certs`: an authority, the gateway's certificate and a client's, for development.

The folder is one for GATEWAY_TLS: `tls.crt` and `tls.key`. `authority.crt` is what clients trust, `client.crt` and
`client.key` what a client shows; as `ca.crt` the authority makes the gateway ask for it. The authority's own key is
kept nowhere, so each call makes a new authority. Files are replaced by renaming: a running gateway takes them at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from headrace.errors import StartupError
from headrace.files import replace_file
from headrace_runner.settings import HOME, StackSettings
from headrace_runner.terminal import short

FOLDER = HOME / ".run" / "certs"
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_CLIENT = "client@headrace.internal"


def make(folder: Path, names: Iterable[str], *, ask_clients: bool = False) -> None:
    """Makes the files for LOCAL_NAMES and `names`; raises StartupError with one line."""
    try:
        import trustme
    except ImportError:
        raise StartupError("certificates need the package trustme; `make certs` installs it") from None
    authority = trustme.CA(organization_name="Headrace development")
    try:
        server = authority.issue_cert(*dict.fromkeys((*LOCAL_NAMES, *names)))
    except ValueError as error:
        raise StartupError(f"no certificate for these names: {error}") from None
    client = authority.issue_cert(_CLIENT)
    trusted = authority.cert_pem.bytes()
    try:
        # In a container the gateway is another user, who must read its key.
        replace_file(folder / "tls.key", server.private_key_pem.bytes(), mode=0o644)
        replace_file(folder / "tls.crt", b"".join(pem.bytes() for pem in server.cert_chain_pems))
        replace_file(folder / "client.key", client.private_key_pem.bytes(), mode=0o600)
        replace_file(folder / "client.crt", b"".join(pem.bytes() for pem in client.cert_chain_pems))
        replace_file(folder / "authority.crt", trusted)
        if ask_clients:
            replace_file(folder / "ca.crt", trusted)
        else:
            (folder / "ca.crt").unlink(missing_ok=True)
    except OSError as error:
        raise StartupError(f"{folder} cannot be written: {error.strerror}") from None


def next_steps(folder: Path, settings: StackSettings, *, ask_clients: bool) -> str:
    """How to use the files, as lines for the terminal."""
    at = short(folder)
    own, of_grpcurl = (
        (f" --cert {at}/client.crt --key {at}/client.key", f" -cert {at}/client.crt -key {at}/client.key")
        if ask_clients
        else ("", "")
    )
    address = f"localhost:{settings.gateway_tls_port}"
    return "\n".join(
        (
            f"made in {at}, for development: the key is readable for every user of this machine",
            f"start       make up GATEWAY_TLS={at}",
            f"curl        curl --cacert {at}/authority.crt{own} https://{address}/v2/health/ready",
            f"grpcurl     grpcurl -cacert {at}/authority.crt{of_grpcurl} {address} grpc.health.v1.Health/Check",
        )
    )
