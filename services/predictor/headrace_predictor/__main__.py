"""Starts the predictor: first the engine host, whose imports take longest, and meanwhile imports its own."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_predictor.engine_process.engine_host import EngineHost

if TYPE_CHECKING:
    from headrace.models.sources import ModelSource
    from headrace_predictor.settings import PredictorSettings

_SERVICE = "inference.GRPCInferenceService"
_TAP_DRAIN_S = 3.0


def main(prepare: str = "") -> None:
    """Runs the service. `prepare`: a `module:function` that each engine process calls before it loads its model."""
    host = EngineHost(prepare)
    host.start()
    from headrace.rpc.server.service import run_service
    from headrace_predictor.settings import PredictorSettings

    run_service("predictor", PredictorSettings, partial(serve, host=host))


async def serve(settings: "PredictorSettings", host: EngineHost) -> None:
    if not any(map(_generates, settings.models)):
        await host.close()
    # Wrong settings are reported before the rest is imported.
    from headrace.endpoints import steps_port
    from headrace.payload.tap import PayloadTap
    from headrace.rpc.server.listeners import READY
    from headrace.rpc.server.server import Server
    from headrace.telemetry.page import PickerMetrics
    from headrace_predictor.generation.served_engines import observe_engines
    from headrace_predictor.repository.repository import ModelRepository
    from headrace_predictor.servicer import DevelopmentServicer, InferenceServicer
    from headrace_predictor.steps.server import StepsServer
    from headrace_protos.headrace_pb2_grpc import add_PredictorDevelopmentServicer_to_server
    from headrace_protos.inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server

    server = Server("predictor", settings, [_SERVICE])

    repository = ModelRepository(settings, partial(server.set_serving, READY), host)
    observe_engines(repository.engines)
    PickerMetrics(repository.engines.pickable, repository.engines.adapters, settings.max_adapters)
    tap = PayloadTap(settings, "predictor")
    tap.start()
    tap.observe()
    servicer = InferenceServicer(repository, tap, settings.payload_addressed)
    add_GRPCInferenceServiceServicer_to_server(servicer, server.grpc)

    steps = StepsServer(repository, server.stopping, shares_port=settings.listen != "alone")
    server.add_port(steps, steps_port(settings.port))

    if settings.development:
        add_PredictorDevelopmentServicer_to_server(DevelopmentServicer(repository), server.grpc)

    async def load() -> None:
        await repository.load_all()
        await host.close_idle()  # Models of the hub may all have turned out to be encoders.
        for name in ("", _SERVICE):
            await server.set_serving(name, True)

    async def load_and_watch() -> None:
        await load()
        await repository.engine_death()

    for name in ("", READY, _SERVICE):
        await server.set_serving(name, False)
    if settings.listen == "take-over":
        await load()
        server.own("watch", repository.engine_death())
    else:
        # It listens while it loads, so that a long download can be distinguished from a hang.
        server.own("load-and-watch", load_and_watch())
    server.at_stop(partial(tap.stop, _TAP_DRAIN_S))
    server.at_drain(repository.drain)
    server.at_stop(repository.close)
    await server.run()


def _generates(source: "ModelSource") -> bool:
    """Whether it needs an engine process, as most do of which only the load finds out."""
    from headrace.models.kinds import ModelKind, kind_of

    try:
        return not source.is_local or kind_of(source, Path(source.location)) is ModelKind.GENERATION
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    main()
