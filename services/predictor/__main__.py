"""Starts the predictor."""

from __future__ import annotations

from millrace.protos.inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from millrace.server import READY, Server
from millrace.service import run_service
from services.predictor.settings import PredictorSettings

_SERVICE = "inference.GRPCInferenceService"


async def serve(settings: PredictorSettings) -> None:
    # Torch takes seconds to import: a wrong setting is told before.
    from services.predictor.repository import ModelRepository
    from services.predictor.servicer import InferenceServicer

    repository = ModelRepository(settings)
    server = Server("predictor", settings.host, settings.port, settings.drain_s, [_SERVICE])
    # Methods that it does not override answer UNIMPLEMENTED.
    servicer = InferenceServicer(repository)  # type: ignore[abstract]
    add_GRPCInferenceServiceServicer_to_server(servicer, server.grpc)

    async def load() -> None:
        await repository.load_all()
        for name in ("", READY, _SERVICE):
            await server.set_serving(name, True)
        await repository.engine_death()

    # It listens while it loads, so that a download of minutes can be told from a hang.
    for name in ("", READY, _SERVICE):
        await server.set_serving(name, False)
    server.own("load-and-watch", load())
    server.at_stop(repository.close)
    await server.run()


if __name__ == "__main__":
    run_service("predictor", PredictorSettings, serve)
