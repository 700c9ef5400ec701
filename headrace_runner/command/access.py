"""`headrace key` and `headrace certs`: who may call the gateway.

A key's entry in the key file has only its digest. Certificates are an authority, the gateway's certificate and a
client's, for development. Their folder is one for GATEWAY_TLS: `tls.crt` and `tls.key`. `authority.crt` is what clients
trust, `client.crt` and `client.key` what a client shows; as `ca.crt` the authority makes the gateway ask for it. The
authority's own key is kept nowhere, so each call makes a new authority. Files are replaced by renaming: a running
gateway takes them at once.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headrace.clients import NAME_PATTERN, Policy
from headrace.errors import StartupError
from headrace.files import load_yaml, replace_file
from headrace.validation import first_fault
from headrace_runner.settings import HOME, PROGRAM, StackSettings
from headrace_runner.terminal import short

KEY_FILE = HOME / "config" / "keys.yaml"
LIMITS = tuple(name for name in Policy.model_fields if name not in ("role", "models"))

CERTIFICATES = HOME / ".run" / "certs"
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_CLIENT = "client@headrace.internal"


def add_key(file: Path, name: str, given: Mapping[str, Any]) -> str:
    """Appends an entry and returns the key; raises StartupError with one line.

    `given` are fields of the policy, as text or values. Without any, a further key of a client has the policy of the
    client's entry: the entries of a name must not differ in it.
    """
    if not re.fullmatch(NAME_PATTERN, name):
        raise StartupError(f"{name}: a client's name has 1 to 128 of A-Z a-z 0-9 . _ : @ | -")
    policy = _policy(given)
    key = "hr-" + secrets.token_urlsafe(32)
    try:
        before = file.read_text() if file.exists() else ""
        for entry in load_yaml(before) or ():
            if entry["name"] == name:
                earlier = _policy({field: value for field, value in entry.items() if field in Policy.model_fields})
                if given and policy != earlier:
                    raise StartupError(f"{name} has a key with other limits in {file}: change them there")
                policy = earlier
        digest = hashlib.sha256(key.encode()).hexdigest()
        fields = {"name": name, "sha256": digest, "role": "user"} | policy.model_dump(mode="json", exclude_unset=True)
        entry = "\n  ".join(f"{field}: {json.dumps(value)}" for field, value in fields.items())
        replace_file(file, before + ("\n" if before and not before.endswith("\n") else "") + f"- {entry}\n")
    except OSError as error:
        raise StartupError(f"{file} cannot be written: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise StartupError(f"{file} is not a file of keys; docs/security.md has an example") from None
    return key


def _policy(fields: Mapping[str, Any]) -> Policy:
    try:
        return Policy(**fields)
    except ValidationError as error:
        place, message = first_fault(error)
        raise StartupError(f"{place[0]}={fields[str(place[0])]}: {message}") from None


def make_certificates(folder: Path, names: Iterable[str], *, ask_clients: bool = False) -> None:
    """Makes the files for LOCAL_NAMES and `names`; raises StartupError with one line."""
    try:
        import trustme
    except ImportError:
        raise StartupError(
            "certificates need the package trustme; `pip install trustme` or `make certs` installs it"
        ) from None
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
            f"start       {PROGRAM} up GATEWAY_TLS={at}",
            f"curl        curl --cacert {at}/authority.crt{own} https://{address}/v2/health/ready",
            f"grpcurl     grpcurl -cacert {at}/authority.crt{of_grpcurl} {address} grpc.health.v1.Health/Check",
        )
    )
