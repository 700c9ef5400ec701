"""The served models and the state of each; loads and unloads models while the others are served.

A model is LOADING, READY, UNLOADING (requests in flight may end, new ones are refused) or UNAVAILABLE, with a reason.
Loads run one at a time and continue if their callers leave (loading.py); the index reports their results.

- Loading a model that is already loaded replaces it. The new one is built beside the old one, which serves until then
  and stays if the new one fails. A generation model is the exception: the old one is unloaded once the new files are
  found, because the cache is sized by the free memory.
- An unload drains: requests in flight have `drain_s`, then end as UNAVAILABLE; those that can resume elsewhere are
  handed back. Then the model's threads end and its memory is released.
- A load that fails returns its error to the caller and changes nothing else.
- An adapter (LoRA) is loaded into the engine of its base (adapters.py). While a base has adapters it is neither loaded
  again nor unloaded without them.
- A generation model whose engine process ends is loaded again (replacement.py). Other models live in this process: it
  ends if one of them cannot continue.

`ready` means that every expected model is ready: those of `MODELS` and those loaded later, except for models that were
unloaded or whose load on request failed. Nothing is ready once the repository drains or this process has to end.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NoReturn

from headrace.deadline import NO_DEADLINE, Deadline
from headrace.errors import (
    DrainingError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    OverloadedError,
    RequestFailedError,
    StartupError,
)
from headrace.models.hub import Report
from headrace.models.kinds import ModelKind
from headrace.models.sources import ModelSource
from headrace.threads import run_in_daemon_thread
from headrace_predictor.engine.interface import EngineDeadError
from headrace_predictor.engine_process.engine_host import EngineHost
from headrace_predictor.generation.served_engines import ServedEngines
from headrace_predictor.models.served_model import VERSION
from headrace_predictor.repository.adapters import adapters_of, attach, check_free, find_base, is_adapter
from headrace_predictor.repository.entry import Entry, IndexRow, State
from headrace_predictor.repository.lease import Serving
from headrace_predictor.repository.loading import (
    FetchedModel,
    ModelLocations,
    Operations,
    build,
    fetch_model,
    release_memory,
    warmed_up,
)
from headrace_predictor.repository.replacement import watch
from headrace_predictor.settings import PredictorSettings

logger = logging.getLogger(__name__)

_MAX_MODELS = 1024  # Known models: every name that was ever loaded.


class ModelRepository:
    """Owned by the event loop. `report_ready` is called at each change of `ready`. `engines` is thread-safe.

    The engine processes come from `host`, which `close` ends too; by default from one of its own.
    """

    def __init__(
        self,
        settings: PredictorSettings,
        report_ready: Callable[[bool], Awaitable[None]],
        host: EngineHost | None = None,
    ) -> None:
        self.engines = ServedEngines()
        self._settings = settings
        self._locations = ModelLocations(settings)
        self._report_ready = report_ready
        self._reported_ready = False
        self._host = host or EngineHost()
        self._entries = {
            source.name: Entry(source, State.LOADING, "waiting to be loaded", expected=True)
            for source in settings.models
        }
        self._loading = asyncio.Lock()
        self._operations = Operations()
        self.is_draining = False
        self.is_leaving = False  # Streams may resume at another replica.
        self.is_drained = False
        self.watchers: set[Callable[[], None]] = set()  # Called when a model becomes ready or stops being ready.
        self._dead = asyncio.Event()
        self._death: EngineDeadError | None = None

    async def load_all(self) -> None:
        """Loads the configured models and warms each up; raises StartupError."""
        # Bases before their adapters.
        for entry in sorted(self._entries.values(), key=lambda entry: is_adapter(entry.source)):
            if entry.serving is None:
                await self._load(entry, entry.source)

    async def load(self, name: str, source: str = "", deadline: Deadline = NO_DEADLINE) -> None:
        """Loads a model, or replaces a loaded one. `source` is a hub id, for a model whose name is not one."""
        if not name:
            raise InvalidRequestError("the request names no model")
        if self.ending:
            raise _stopping()
        check_free(self._entries, name)
        found = await asyncio.to_thread(self._locations.find, name, source)
        await self._operations.run(f"load of {name}", self._load_for_caller(found), deadline)

    async def unload(self, name: str, deadline: Deadline = NO_DEADLINE, with_adapters: bool = False) -> None:
        """Unloads a model; does nothing if it is not loaded; raises NotFoundError for an unknown name.

        A base of loaded adapters is refused (InvalidRequestError), or unloaded after them.
        """
        entry = self._entries.get(name)
        if entry is None:
            if name not in await asyncio.to_thread(self._locations.names):
                raise NotFoundError(f"no model {name!r}")
            return
        if not with_adapters:
            check_free(self._entries, name)
        await self._operations.run(f"unload of {name}", self._unload_all(entry), deadline)

    async def index(self) -> list[IndexRow]:
        """Every known model, and those in the repository folder that can be loaded."""
        rows = [IndexRow(name, entry.state, entry.reason) for name, entry in self._entries.items()]
        names = await asyncio.to_thread(self._locations.names)
        return rows + [IndexRow(name, State.UNAVAILABLE, "not loaded") for name in names if name not in self._entries]

    async def engine_death(self) -> NoReturn:
        """Waits until one of the models can serve no more, then raises its EngineDeadError."""
        await self._dead.wait()
        raise self._death or EngineDeadError("an engine died")

    @property
    def ready(self) -> bool:
        return not self.ending and all(e.state is State.READY for e in self._entries.values() if e.expected)

    @property
    def served(self) -> Sequence[Serving]:
        """The models that are ready."""
        return [e.serving for e in self._entries.values() if e.serving is not None and e.state is State.READY]

    def is_ready(self, name: str, version: str = "") -> bool:
        known = self._entries.get(name)
        return known is not None and known.state is State.READY and version in ("", VERSION) and not self.ending

    def get(self, name: str, version: str = "") -> Serving:
        """Returns the served model; raises NotFoundError, or NotReadyError while it is loading or unloading."""
        entry = self._entries.get(name)
        if entry is None:
            raise NotFoundError(f"no model {name!r}" if name else "the request names no model")
        if version not in ("", VERSION):
            raise NotFoundError(f"model {name!r} has no version {version!r}, only {VERSION}")
        if entry.state in (State.LOADING, State.UNLOADING) or (entry.serving is None and entry.expected):
            raise NotReadyError(f"model {name!r} is not ready: {entry.reason}")
        if entry.serving is None:
            raise NotFoundError(f"model {name!r} is not loaded")
        if self.ending:
            raise _stopping()
        return entry.serving

    def source(self, name: str) -> str:
        """The source of a model that `get` returns, in the notation of `MODELS`."""
        return self._entries[name].source.where

    def base(self, name: str) -> ModelSource | None:
        """The source of the base of an adapter that `get` returns; None for other models."""
        base = self._entries[name].base
        return None if base is None else base.source

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests; lets those in flight end or resume elsewhere; after the timeout hands back the rest."""
        self.is_draining = True
        self.is_leaving = self._settings.drain == "hand-back"
        await self.changed()
        served = [entry.serving for entry in self._entries.values() if entry.serving is not None]
        left = sum(await asyncio.gather(*(serving.drain(timeout_s) for serving in served)))
        if left:
            logger.warning("%d requests have not ended in time", left)
        self.is_drained = True
        await self.changed()

    async def close(self) -> None:
        """Stops every model; a load in progress ends with the process."""
        await self._operations.close()
        for entry in self._entries.values():
            await entry.unwatch()
            if entry.serving is not None:
                await entry.serving.stop()
        await self._host.close()

    async def _load_for_caller(self, source: ModelSource) -> None:
        try:
            await self._load(self._entries.get(source.name) or self._add(source), source)
        except StartupError as error:
            # Else the model is at fault, which the caller named.
            raise (RequestFailedError if error.is_fault else InvalidRequestError)(str(error)) from None

    def _add(self, source: ModelSource) -> Entry:
        if len(self._entries) >= _MAX_MODELS:
            idle = (name for name, entry in self._entries.items() if entry.state is State.UNAVAILABLE)
            if (forgotten := next(idle, None)) is None:
                raise OverloadedError(f"{_MAX_MODELS} models are loaded, the maximum; unload one first")
            del self._entries[forgotten]
        entry = self._entries[source.name] = Entry(source, State.LOADING)
        return entry

    async def _load(self, entry: Entry, source: ModelSource) -> None:
        async with entry.turn:
            if entry.serving is None:
                entry.set(State.LOADING, "waiting for another load")
            try:
                async with self._loading:
                    new = await self._make(entry, source)
            except BaseException as error:
                if entry.serving is None:
                    entry.set(State.UNAVAILABLE, str(error) or type(error).__name__)
                    entry.expected = False
                await self.changed()
                raise
            await entry.unwatch()
            replaced, entry.source = entry.serving, source
            entry.watch = asyncio.create_task(self._watch(entry), name=f"watch-{source.name}")
            await self.serve(entry, new)
            if replaced is not None:
                await self._end(replaced)
                del replaced
                await asyncio.to_thread(release_memory)

    async def _make(self, entry: Entry, source: ModelSource) -> Serving:
        """Builds and warms up the model; first unloads the entry's current one if there is no memory for both."""
        fetched = await run_in_daemon_thread(f"load-{source.name}", partial(fetch_model, source, entry.report))
        base = None
        if fetched.kind is ModelKind.ADAPTER:
            base = find_base(self._entries.values(), source, fetched.folder, self._settings.max_adapters)
        if fetched.kind is ModelKind.GENERATION and entry.serving is not None:
            await self._take_out(entry)
            entry.set(State.LOADING, "loading")
        replaced, entry.base = entry.base, base
        try:
            serving = await self._build(source, fetched, base, entry.report)
        except BaseException:
            entry.base = replaced if entry.serving is not None else None
            raise
        entry.fetched = fetched
        return serving

    async def _build(self, source: ModelSource, fetched: FetchedModel, base: Entry | None, report: Report) -> Serving:
        if base is not None:
            return await warmed_up(attach(source, fetched.folder, base, report))
        building = build(source, fetched, self._settings, self._host, report, self.engines.device_memory)
        return await warmed_up(building)

    async def rebuild(self, entry: Entry) -> Serving:
        """Builds the model from the files that are there."""
        if entry.fetched is None:
            raise StartupError(f"model {entry.source.name} has no files")
        return await self._build(entry.source, entry.fetched, entry.base, lambda _: None)

    async def serve(self, entry: Entry, serving: Serving) -> None:
        """Makes the entry READY."""
        entry.serving = serving
        self.engines.add(serving.model)
        entry.backoff.started()
        entry.set(State.READY)
        entry.expected = True
        await self.changed()

    async def _unload_all(self, entry: Entry) -> None:
        for adapter in adapters_of(self._entries.values(), entry):
            await self._unload(adapter)
        await self._unload(entry)

    async def _unload(self, entry: Entry) -> None:
        async with entry.turn:
            if entry.state is State.LOADING and entry.watch is None:
                raise NotReadyError(f"model {entry.source.name!r} is still waiting to be loaded")
            entry.expected = False
            if entry.serving is None and entry.watch is None:
                return
            if entry.serving is None:
                await entry.unwatch()  # It is about to replace the model's engine.
            await self._take_out(entry)
            entry.base = None
            await self.changed()

    async def _take_out(self, entry: Entry) -> None:
        """Unloads the served model; the caller holds the entry's `turn` and sets its next state."""
        serving = entry.serving
        if serving is not None:
            entry.set(State.UNLOADING, "waiting for requests in flight")
            await self.changed()
            await self._end(serving, entry)
            entry.serving = None
            # The last reference, except for the caller's frame.
            del serving
            await asyncio.to_thread(release_memory)
        entry.set(State.UNAVAILABLE, "unloaded")

    async def _end(self, serving: Serving, watched: Entry | None = None) -> None:
        left = await serving.drain(self._settings.drain_s)
        if left:
            logger.warning("model %s: %d requests in flight are ended", serving.model.name, left)
        if watched is not None:
            # Closing an engine is not a death.
            await watched.unwatch()
        await serving.stop()
        self.engines.remove(serving.model)

    async def _watch(self, entry: Entry) -> None:
        try:
            await watch(self, entry)
        except EngineDeadError as error:
            self._death = error
            self._dead.set()
            await self.changed()

    @property
    def ending(self) -> bool:
        return self.is_draining or self._dead.is_set()

    async def changed(self) -> None:
        """Reports the state of an entry that has changed."""
        for notify in tuple(self.watchers):
            notify()
        if self.ready != self._reported_ready:
            self._reported_ready = self.ready
            await self._report_ready(self._reported_ready)


def _stopping() -> DrainingError:
    return DrainingError("the predictor is stopping")
