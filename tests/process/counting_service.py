"""A service built like the others: `/test/count` sends a number every 50 ms, as many as the request says.

It logs its other actions to a file, since its standard error has the log.
"""

import asyncio
import time
from pathlib import Path

import grpc
from pydantic_settings import SettingsConfigDict

from headrace.rpc.server.server import READY, Server
from headrace.rpc.server.service import run_service
from headrace.settings import ServiceSettings


class Settings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="TEST_", frozen=True, env_ignore_empty=True)
    events_file: Path
    fail: str = ""
    drains: bool = False


class Service(grpc.GenericRpcHandler):
    def __init__(self, settings):
        self._settings = settings

    def record_event(self, *words):
        with self._settings.events_file.open("a") as events_file:
            print(*words, file=events_file)

    def service(self, details):
        return {
            "/test/block": grpc.unary_unary_rpc_method_handler(self.block),
            "/test/count": grpc.unary_stream_rpc_method_handler(self.count),
        }.get(details.method)

    async def block(self, request, context):
        self.record_event("blocks")
        time.sleep(600)  # noqa: ASYNC251

    async def count(self, request, context):
        for number in range(int(request)):
            yield str(number).encode()
            await asyncio.sleep(0.05)

    async def background(self):
        try:
            await asyncio.Event().wait()
        finally:
            self.record_event("task ended")

    async def fail(self):
        if self._settings.fail == "cancelled":
            raise asyncio.CancelledError  # Like a call whose channel is closed.
        raise RuntimeError("the engine is dead")

    async def close(self, name):
        self.record_event(name, "closed")

    async def drain(self, seconds):
        self.record_event("drains for", seconds)
        raise RuntimeError("no water")


async def serve(settings):
    service = Service(settings)
    server = Server("test", settings, ["headrace.v1.PayloadLog"])
    if settings.drains:
        server.at_drain(service.drain)
    server.grpc.add_generic_rpc_handlers((service,))
    server.at_stop(lambda: service.close("first"))
    server.at_stop(lambda: service.close("second"))
    server.own("background", service.background())
    if settings.fail:
        server.own("engine", service.fail())
    await server.set_serving(READY, True)
    await server.run()


if __name__ == "__main__":
    run_service("test", Settings, serve)
