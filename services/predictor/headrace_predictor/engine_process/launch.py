"""Starts an engine process for a generation model and waits until the model is loaded."""

import asyncio
import socket
from pathlib import Path

from headrace.errors import StartupError, StartupFault
from headrace.frames import FrameConnection
from headrace.sampling import SamplingParameters
from headrace_predictor.engine_process.engine_host import EngineHost
from headrace_predictor.engine_process.remote_engine import RemoteEngine
from headrace_predictor.generation.loaded_model import LoadedModel
from headrace_predictor.settings import PredictorSettings
from headrace_protos import engine_pb2

# Of the settings.
_NOT_OF_ENGINES = {"models", "model_repository", "hub_allow"} | {
    name for name in PredictorSettings.model_fields if name.startswith("payload_")
}
_LOAD_S = 3600.0  # The longest that loading weights takes.
_SILENCE_S = 10.0  # A process that is alive sends a frame every half second.
_SEND_BUFFER_BYTES = 4 * 1024 * 1024  # Or what the system allows.


async def launch_engine(
    host: EngineHost, name: str, folder: Path, is_local: bool, settings: PredictorSettings, device_memory: int = 0
) -> LoadedModel[RemoteEngine]:
    """Returns the model, loaded by an engine process of its own; raises StartupError.

    `device_memory`: bytes that the predictor's other engines hold on the device. The models of MODELS share its memory.
    """
    settings = settings.model_copy(update={"memory_share": settings.memory_share / max(1, len(settings.models))})
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    launch = engine_pb2.EngineLaunch(
        model=name,
        folder=str(folder),
        is_local=is_local,
        settings=settings.model_dump_json(exclude=_NOT_OF_ENGINES).encode(),
        prepare=host.prepare,
        device_memory_elsewhere=device_memory,
    )
    ours.setblocking(False)
    loop = asyncio.get_running_loop()
    first: asyncio.Future[engine_pb2.EngineFrame] = loop.create_future()

    def take(message: bytes) -> None:
        if not first.done():
            first.set_result(engine_pb2.EngineFrame.FromString(message))

    def lost(_: object) -> None:
        if not first.done():
            fault = StartupFault(f"model {name}: its engine process ended while it loaded; see the log")
            first.set_exception(fault)
            first.exception()  # It may have no waiter.

    _, connection = await loop.create_unix_connection(lambda: FrameConnection(take), sock=ours)
    connection.ended.add_done_callback(lost)
    try:
        with theirs:
            pid = await host.start_engine(theirs)
        connection.send(launch.SerializeToString())
        async with asyncio.timeout(_LOAD_S):
            frame = await first
        if not frame.HasField("ready"):
            raise (StartupFault if frame.is_fault else StartupError)(frame.startup_error)
        facts = frame.ready
    except TimeoutError:
        connection.abort()
        raise StartupError(f"model {name} has not been loaded within {_LOAD_S:.0f} s") from None
    except BaseException:
        connection.abort()
        raise
    return LoadedModel(
        name,
        facts.architecture,
        facts.device,
        facts.dtype,
        SamplingParameters.model_validate_json(facts.defaults),
        RemoteEngine(name, pid, connection, facts, _SILENCE_S),
        facts.fingerprint,
        facts.device_memory,
    )
