"""Several gRPC servers on one port of one process, so that calls are accepted as fast as they arrive.

A grpc.aio server requests its next call after it has seen the last one, which takes four to five turns of the event
loop (grpc/grpc#43461). With hundreds of streams in flight a turn takes tens of milliseconds, and calls waited for
seconds before they were accepted, invisible to admission and to every estimate. The kernel distributes connections over
the servers (SO_REUSEPORT), so that each turn accepts several. Registered methods are not used: a server with registered
methods requests the next call of each method separately, and waits for all of these again for each call.

A service passes its port to its successor, which loads first, listens beside it and reports so by systemd's readiness
protocol: the datagram `READY=1` to the socket that NOTIFY_SOCKET names. Then the supervisor sends RETIRE to the
predecessor, which stops listening, sends its connections away by GOAWAY and ends when the calls that it has have ended.
SIGTERM shortens that to the ordinary drain.
"""

import asyncio
import logging
import os
import random
import signal
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import grpc

from headrace.errors import StartupError, StartupFault

logger = logging.getLogger(__name__)

RETIRE = signal.SIGUSR1
READY_MESSAGE = b"READY=1"
NOTIFY_SOCKET = "NOTIFY_SOCKET"

_ANY_PORT = range(32_000, 32_768)  # Below Linux's ephemeral ports.


class Listeners(grpc.aio.Server):
    """What services are added to, with the methods of one grpc.aio.Server; owned by the event loop.

    The port is exclusive, unless `shares_port`: then several processes share a port that their parent has reserved.
    """

    def __init__(
        self,
        count: int,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        options: Sequence[tuple[str, Any]],
        shares_port: bool = False,
    ) -> None:
        options = (*options, ("grpc.so_reuseport", 1))
        self._servers = [grpc.aio.server(interceptors=interceptors, options=options) for _ in range(count)]
        self._shares_port = shares_port
        self._held = ExitStack()

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        handlers = tuple(generic_rpc_handlers)
        for server in self._servers:
            server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """Generated code calls it beside the other, with the same handlers; see the module."""

    def add_insecure_port(self, address: str) -> int:
        """Opens the port, 0 for any; raises StartupError where it is taken."""
        host, _, port = address.rpartition(":")
        if not self._shares_port:
            port = str(self._held.enter_context(reserved(host, int(port))))
        try:
            for server in self._servers:
                port = str(server.add_insecure_port(f"{host}:{port}"))
        except RuntimeError:
            raise StartupFault(f"{address} cannot be listened on: is the port taken?") from None
        return int(port)

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        raise NotImplementedError("the gateway ends TLS")

    async def start(self) -> None:
        for server in self._servers:
            await server.start()

    async def stop(self, grace: float | None) -> None:
        await asyncio.gather(*(server.stop(grace) for server in self._servers))
        self._held.close()

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        ended = await asyncio.gather(*(server.wait_for_termination(timeout) for server in self._servers))
        return all(ended)


@contextmanager
def reserved(host: str, port: int, is_shared: bool = False) -> Iterator[int]:
    """Holds a port, which only processes of this user that ask to share it can take too; returns its number.

    Where it `is_shared` one of those may have it already.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = (host.strip("[]"), port or _free_port(family, host.strip("[]")))
    with socket.socket(family) as held:
        try:
            if is_shared:
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                held.bind(address)
            else:
                _bind(held, address)
        except OSError:
            raise StartupError(f"{host}:{port} cannot be listened on: is the port taken?") from None
        # After the bind: with it before, a port that others share would not have been refused.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield held.getsockname()[1]


def _free_port(family: socket.AddressFamily, host: str) -> int:
    """A port that is free now; outside of the kernel's range, which may assign a shared port twice."""
    for port in random.sample(_ANY_PORT, len(_ANY_PORT)):
        with socket.socket(family) as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise StartupFault(f"{host} has no free port")


def _bind(held: socket.socket, address: tuple[str, int]) -> None:
    """Binds if no other socket has the port; connections in TIME_WAIT are ignored."""
    try:
        held.bind(address)
    except OSError:
        with socket.socket(held.family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()  # Refused where another listens, whatever the two have set.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)


def report_listening() -> None:
    """Sends READY to the supervisor, where there is one."""
    address = os.environ.get(NOTIFY_SOCKET)
    if not address:
        return
    if address.startswith("@"):  # Linux's abstract names.
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
            supervisor.sendto(READY_MESSAGE, address)
    except OSError as error:
        logger.warning("the supervisor at %s was not notified: %s", os.environ[NOTIFY_SOCKET], error)
