"""TLS connections to a gateway: handshakes, certificates and requests. They block, 10 s at most."""

import http.client
import socket
import ssl
from pathlib import Path

TIMEOUT_S = 60.0


def context(folder: Path, *, with_certificate: bool = False, trust: str = "authority.crt") -> ssl.SSLContext:
    """The context of a client of `headrace certs`: it trusts the authority, and may send the client's certificate."""
    tls = ssl.create_default_context(cafile=str(folder / trust))
    if with_certificate:
        tls.load_cert_chain(str(folder / "client.crt"), str(folder / "client.key"))
    return tls


def handshake(address: str, tls: ssl.SSLContext) -> tuple[str | None, str | None]:
    """The negotiated TLS version and protocol; raises OSError if the gateway or this client refuses."""
    with connected(address, tls) as connection:
        return connection.version(), connection.selected_alpn_protocol()


def certificate(address: str) -> bytes:
    """The certificate that a new connection gets, unverified."""
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    with connected(address, tls) as connection:
        return connection.getpeercert(binary_form=True) or b""


def connected(address: str, tls: ssl.SSLContext) -> ssl.SSLSocket:
    host, _, port = address.rpartition(":")
    return tls.wrap_socket(socket.create_connection((host, int(port)), TIMEOUT_S), server_hostname=host)


def request(
    address: str, tls: ssl.SSLContext, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, bytes]:
    """The status and the body of an answer over HTTP/1.1."""
    connection = http.client.HTTPSConnection(address, timeout=TIMEOUT_S, context=tls)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
