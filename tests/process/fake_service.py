"""A service that implements only gRPC health: `python -m tests.process.fake_service KIND`.

It listens at `KIND_PORT`, refuses the log level LOUD, and hands its port over as the services do.
"""

import asyncio
import os
import signal
import sys

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from headrace.rpc.server.listeners import RETIRE, report_listening


async def main(kind: str) -> None:
    if os.environ.get(f"{kind}_LOG_LEVEL") == "LOUD":
        print(f"{kind}: LOUD is no level", file=sys.stderr)
        sys.exit(os.EX_CONFIG)
    server = grpc.aio.server(options=(("grpc.so_reuseport", 1),))
    servicer = health.aio.HealthServicer()
    for name in ("ready", "reads"):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    try:
        server.add_insecure_port(f"127.0.0.1:{os.environ[f'{kind}_PORT']}")
    except RuntimeError:
        print(f"{kind}: the port is taken", file=sys.stderr)
        sys.exit(os.EX_CONFIG)
    await server.start()
    report_listening()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, RETIRE):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    await stop.wait()
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
