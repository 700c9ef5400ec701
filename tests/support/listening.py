"""gRPC servers of tests, on free ports of loopback."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc


@asynccontextmanager
async def listening(server: grpc.aio.Server) -> AsyncIterator[str]:
    """Starts the server; its address. It is stopped at once in the end."""
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
