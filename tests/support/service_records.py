"""A name server on loopback for SRV records, which a test changes; the records' hosts are names of the system.

An answer of more than 512 bytes is truncated, so that it is asked for by TCP.
"""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import dns.exception
import dns.flags
import dns.message
import dns.rcode
import dns.resolver
import dns.rrset

SERVICE = "_grpc._tcp.predictors.test"
HOST = "localhost"
_UDP_BYTES = 512


class NameServer(asyncio.DatagramProtocol):
    """Answers for `services`: records as (priority, host, port) by service; none for an empty one.

    While `rcode` is set, it is every answer; while `is_silent`, there are none.
    """

    def __init__(self) -> None:
        self.services: dict[str, list[tuple[int, str, int]]] = {}
        self.rcode: dns.rcode.Rcode | None = None
        self.is_silent = False
        self.queries = 0
        self._transport: Any = None

    @property
    def port(self) -> int:
        port: int = self._transport.get_extra_info("sockname")[1]
        return port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.queries += 1
        if self.is_silent:
            return
        answer = self._answer(data)
        try:
            wire = answer.to_wire(max_size=_UDP_BYTES)
        except dns.exception.TooBig:
            answer.answer.clear()
            answer.flags |= dns.flags.TC
            wire = answer.to_wire()
        self._transport.sendto(wire, addr)

    async def serve_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (size,) = struct.unpack("!H", await reader.readexactly(2))
        wire = self._answer(await reader.readexactly(size)).to_wire()
        writer.write(struct.pack("!H", len(wire)) + wire)
        await writer.drain()
        writer.close()

    def _answer(self, data: bytes) -> dns.message.Message:
        query = dns.message.from_wire(data)
        answer = dns.message.make_response(query, recursion_available=True)
        question = query.question[0]
        records = self.services.get(question.name.to_text(omit_final_dot=True).lower())
        if self.rcode is not None or records is None:
            answer.set_rcode(dns.rcode.NXDOMAIN if self.rcode is None else self.rcode)
        elif records:
            texts = [f"{priority} 1 {port} {host}." for priority, host, port in records]
            answer.answer.append(dns.rrset.from_text_list(question.name, 0, "IN", "SRV", texts))
        return answer


@asynccontextmanager
async def service_server() -> AsyncIterator[NameServer]:
    server = NameServer()
    # TCP first: its ports are rarer.
    by_tcp = await asyncio.start_server(server.serve_tcp, "127.0.0.1", 0)
    address = by_tcp.sockets[0].getsockname()
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: server, local_addr=address)
    try:
        yield server
    finally:
        by_tcp.close()
        transport.close()


def ask_at(port: int) -> None:
    """Has every new resolver of this process ask the server at this port."""

    def configure(resolver: dns.resolver.Resolver, *_: Any) -> None:
        resolver.nameservers, resolver.port = ["127.0.0.1"], port

    dns.resolver.Resolver.read_resolv_conf = configure  # type: ignore[assignment]
