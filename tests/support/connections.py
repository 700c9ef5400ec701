"""TLS connections to a gateway, for tests: what the handshake says, and requests over it. They block, 10 s at most."""

from __future__ import annotations

import http.client
import socket
import ssl
from pathlib import Path

TIMEOUT_S = 10.0


def context(folder: Path, *, with_certificate: bool = False, trust: str = "authority.crt") -> ssl.SSLContext:
    """What a client of `millrace certs` uses: it trusts the authority, and may show the client's certificate."""
    made = ssl.create_default_context(cafile=str(folder / trust))
    if with_certificate:
        made.load_cert_chain(str(folder / "client.crt"), str(folder / "client.key"))
    return made


def handshake(address: str, made: ssl.SSLContext) -> tuple[str | None, str | None]:
    """The version and the protocol that were agreed on; raises OSError if the gateway or this client refuses."""
    with connected(address, made) as connection:
        return connection.version(), connection.selected_alpn_protocol()


def certificate(address: str) -> bytes:
    """The certificate that a new connection gets, whoever signed it."""
    made = ssl.create_default_context()
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    with connected(address, made) as connection:
        return connection.getpeercert(binary_form=True) or b""


def connected(address: str, made: ssl.SSLContext) -> ssl.SSLSocket:
    host, _, port = address.rpartition(":")
    return made.wrap_socket(socket.create_connection((host, int(port)), TIMEOUT_S), server_hostname=host)


def request(
    address: str, made: ssl.SSLContext, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, bytes]:
    """The status and the body of an answer over HTTP/1.1."""
    connection = http.client.HTTPSConnection(address, timeout=TIMEOUT_S, context=made)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
