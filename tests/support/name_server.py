"""A name server for one name, whose addresses a test changes; and the same name for Python processes.

Envoy asks the server by UDP. A Python process reads the file of addresses instead, because the C library asks servers
at port 53 only: `use_file` gives this name to its `socket.getaddrinfo`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

NAME = "predictors.test"
_A, _IN = 1, 1
_ANSWER, _UNKNOWN = 0x8180, 0x8183  # Flags of an answer with recursion; of one about a name that there is not.


class _Server(asyncio.DatagramProtocol):
    def __init__(self, file: Path) -> None:
        self._file = file
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._transport.sendto(_answered(data, addresses_in(self._file)), addr)


def _answered(query: bytes, addresses: list[str]) -> bytes:
    """The answer to a query with one question (RFC 1035)."""
    end = query.index(b"\0", 12) + 5
    question = query[12:end]
    labels = b"".join(bytes([len(label)]) + label.encode() for label in NAME.split("."))
    is_known = question[:-5].lower() == labels and bool(addresses)
    kind = struct.unpack("!H", question[-4:-2])[0]
    records = [
        struct.pack("!HHHIH4s", 0xC00C, _A, _IN, 0, 4, IPv4Address(address).packed)
        for address in addresses
        if is_known and kind == _A
    ]
    head = struct.pack("!2sHHHHH", query[:2], _ANSWER if is_known else _UNKNOWN, 1, len(records), 0, 0)
    return head + question + b"".join(records)


def addresses_in(file: Path) -> list[str]:
    return file.read_text().split()


@asynccontextmanager
async def name_server(file: Path) -> AsyncIterator[int]:
    """The port of a server that knows NAME with the addresses in the file."""
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _Server(file), local_addr=("127.0.0.1", 0)
    )
    try:
        yield transport.get_extra_info("sockname")[1]
    finally:
        transport.close()


def asked_by_envoy(config: dict[str, Any], port: int) -> None:
    """Changes Envoy's configuration: the predictors' names are those of the server at this port."""
    (cluster,) = (one for one in config["static_resources"]["clusters"] if one["name"] == "predictor")
    cluster["typed_dns_resolver_config"] = {
        "name": "envoy.network.dns_resolver.cares",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig",
            "resolvers": [{"socket_address": {"address": "127.0.0.1", "port_value": port, "protocol": "UDP"}}],
            "dns_resolver_options": {"no_default_search_domain": True},
        },
    }


def use_file(file: Path) -> None:
    """Gives NAME its addresses in the file, in this process."""
    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host != NAME:
            return resolve(host, port, *args, **options)
        found = [one for address in addresses_in(file) for one in resolve(address, port, *args, **options)]
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return found

    socket.getaddrinfo = getaddrinfo
