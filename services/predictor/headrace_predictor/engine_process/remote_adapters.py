"""The adapters of an engine process, as the front sees them. Owned by the event loop."""

import asyncio
from collections.abc import Callable
from itertools import count
from pathlib import Path

from headrace.errors import StartupError, StartupFault
from headrace_protos import engine_pb2

_LOAD_S = 600.0  # The longest that loading an adapter takes.


class RemoteAdapters:
    """`command` sends commands to the process."""

    def __init__(self, command: Callable[[engine_pb2.EngineCommands], None]) -> None:
        self._command = command
        self._numbers = count(1)
        self._loading: dict[int, asyncio.Future[engine_pb2.AdapterLoaded]] = {}

    async def load(self, name: str, folder: Path, is_local: bool) -> tuple[int, str]:
        """The adapter's number in the process, and the fingerprint of the base with it; raises StartupError."""
        number = next(self._numbers)
        self._loading[number] = loading = asyncio.get_running_loop().create_future()
        adapter = engine_pb2.AdapterToLoad(number=number, name=name, folder=str(folder), is_local=is_local)
        self._command(engine_pb2.EngineCommands(adapters=[adapter]))
        try:
            async with asyncio.timeout(_LOAD_S):
                result = await loading
        except BaseException as error:
            self.unload(number)
            if isinstance(error, TimeoutError):
                raise StartupError(f"model {name} has not been loaded within {_LOAD_S:.0f} s") from None
            if isinstance(error, ConnectionError):
                raise StartupError(f"model {name}: the engine of its base ended while it was loaded") from None
            raise
        finally:
            del self._loading[number]
        if result.error:
            raise (StartupFault if result.is_fault else StartupError)(result.error)
        return number, result.fingerprint

    def unload(self, number: int) -> None:
        self._command(engine_pb2.EngineCommands(unloaded_adapters=[number]))

    def take(self, loaded: engine_pb2.AdapterLoaded) -> None:
        loading = self._loading.get(loaded.number)
        if loading is not None and not loading.done():
            loading.set_result(loaded)

    def lost(self) -> None:
        for loading in self._loading.values():
            if not loading.done():
                loading.set_exception(ConnectionError())
