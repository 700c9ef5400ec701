"""The arguments of an attack: the gateway, its time, and a report; and the attacks by name."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import grpc

MEGABYTE = 1 << 20


@dataclass
class Report:
    """The counts of an attack: requests begun, answers by status, and failures of honest calls on its connections."""

    begun: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    honest_errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Target:
    """One attack's gateway (host:port), and when it ends (monotonic seconds)."""

    gateway: str
    ends_at: float
    report: Report
    address: str = "127.0.0.1"  # Of the attacker, by which a caller without a key is known.

    @property
    def left_s(self) -> float:
        return max(0.0, self.ends_at - time.monotonic())

    async def repeat(self, at_once: int, call: Callable[[], Awaitable[str]]) -> None:
        """Repeats the call in `at_once` tasks until the end, which cancels running calls."""

        async def caller() -> None:
            while self.left_s:
                self.report.begun += 1
                try:
                    self.report.answers[await call()] += 1
                except grpc.aio.AioRpcError as error:
                    self.report.answers[error.code().name] += 1
                except (OSError, EOFError) as error:
                    self.report.answers[type(error).__name__] += 1

        with suppress(TimeoutError):
            async with asyncio.timeout(self.left_s + 0.01):
                await asyncio.gather(*(caller() for _ in range(at_once)))

    async def post(
        self,
        path: str,
        body: bytes,
        content_type: str = "application/json",
        host: str = "gateway",
        declared: int | None = None,
        method: str = "POST",
        to_end: bool = False,
        **headers: str,
    ) -> str:
        """The HTTP status of one request over HTTP/1.1 on a new connection; underscores in names become dashes.

        If more bytes are `declared`, the body never ends: the connection is held until an answer arrives. With `to_end`
        the answer is read to its end.
        """
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        reader, writer = await self.connect()
        try:
            lines = [f"{method} {path} HTTP/1.1", f"host: {host}", f"content-type: {content_type}"]
            lines += [
                f"content-length: {declared or len(body)}",
                *(f"{name}: {value}" for name, value in named.items()),
                "",
                "",
            ]
            writer.write("\r\n".join(lines).encode("latin-1"))
            with suppress(ConnectionError):  # The answer to a too large body comes before the whole body has been read.
                for start in range(0, len(body), MEGABYTE):
                    writer.write(body[start : start + MEGABYTE])
                    await writer.drain()
            status = (await reader.readline()).split(b" ")
            if to_end:
                await reader.read()
            return status[1].decode() if len(status) > 1 else "closed"
        finally:
            writer.close()

    async def grpc_post(self, path: str, message: bytes, host: str = "gateway", **headers: str) -> str:
        """The same for a gRPC message over HTTP/1.1, which accepts any header."""
        framed = b"\0" + len(message).to_bytes(4, "big") + message
        return await self.post(path, framed, "application/grpc", host, te="trailers", **headers)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.gateway.rpartition(":")
        return await asyncio.open_connection(host, int(port), local_addr=(self.address, 0))


Attack = Callable[[Target], Awaitable[None]]
ATTACKS: dict[str, Attack] = {}


def attack(run: Attack) -> Attack:
    """Registers an attack by its function's name."""
    ATTACKS[run.__name__] = run
    return run
