"""The base of an adapter: a generation model that is loaded here, whose engine computes the adapter too.

`base_model_name_or_path` in the adapter's configuration names it: by the name under which it is loaded here, or by its
folder or hub id.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from headrace.errors import InvalidRequestError, StartupError
from headrace.models.generation_config import GENERATION_FILE
from headrace.models.kinds import ADAPTER_FILE, ModelKind
from headrace.models.sources import ModelSource, read_config
from headrace.sampling import defaults_of
from headrace_predictor.engine_process.remote_engine import RemoteEngine
from headrace_predictor.generation.model import GenerationModel
from headrace_predictor.repository.entry import Entry, State

_BASE = "base_model_name_or_path"


def find_base(entries: Collection[Entry], source: ModelSource, folder: Path, max_adapters: int) -> Entry:
    """The base of an adapter that is about to be loaded; raises StartupError."""
    base = _named_base(entries, source, folder)
    others = [entry for entry in adapters_of(entries, base) if entry.source.name != source.name]
    if len(others) >= max_adapters:
        raise StartupError(
            f"model {source.name}: its base {base.source.name} has {len(others)} adapters, the maximum; unload one or"
            " raise PREDICTOR_MAX_ADAPTERS"
        )
    return base


def adapters_of(entries: Iterable[Entry], base: Entry) -> list[Entry]:
    """The adapters of a base that are loaded or being loaded."""
    return [entry for entry in entries if entry.base is base]


def check_free(entries: Mapping[str, Entry], name: str) -> None:
    """Raises InvalidRequestError for the base of adapters."""
    entry = entries.get(name)
    if entry is not None and (adapters := adapters_of(entries.values(), entry)):
        names = ", ".join(adapter.source.name for adapter in adapters)
        raise InvalidRequestError(
            f"model {name!r} is the base of the adapters {names}; unload them first, or with it (unload_dependents)"
        )


def _named_base(entries: Iterable[Entry], source: ModelSource, folder: Path) -> Entry:
    wanted = str(read_config(folder, ADAPTER_FILE).get(_BASE) or "")
    bases = [
        entry
        for entry in entries
        if entry.state is State.READY and entry.source.name != source.name
        if entry.fetched is not None and entry.fetched.kind is ModelKind.GENERATION
    ]
    named = [entry for entry in bases if entry.source.name == wanted]
    if fitting := named or [entry for entry in bases if _is_at(entry.source, wanted)]:
        return fitting[0]
    loaded = ", ".join(f"{entry.source.name}={entry.source.where}" for entry in bases) or "none"
    raise StartupError(
        f"model {source.name}: its base {wanted!r} is not loaded (generation models here: {loaded}); load it first, or"
        f" write the name of one of these as {_BASE} into {ADAPTER_FILE}"
    )


async def attach(source: ModelSource, folder: Path, base: Entry, report: Callable[[str], None]) -> GenerationModel:
    """Loads an adapter into the engine of its base; raises StartupError."""
    report("loading the adapter")
    model = None if base.serving is None else base.serving.model
    engine = model.engine if isinstance(model, GenerationModel) else None
    if not (isinstance(model, GenerationModel) and isinstance(engine, RemoteEngine)):
        raise StartupError(f"model {source.name}: its base {base.source.name} has no engine process")
    number, fingerprint = await engine.load_adapter(source.name, folder, source.is_local)
    own = read_config(folder, GENERATION_FILE) or None
    loaded = replace(
        model.loaded,
        name=source.name,
        defaults=defaults_of(own, is_encoder_decoder=False) if own else model.loaded.defaults,
        fingerprint=fingerprint,
        device_memory=0,
        adapter=number,
        generation=own,
    )
    return GenerationModel(loaded, close=lambda: engine.unload_adapter(number))


async def until_served(base: Entry, watchers: set[Callable[[], None]]) -> None:
    """Waits until an entry is served by an engine that lives; `watchers` are called when that may have changed."""
    changed = asyncio.Event()
    watchers.add(changed.set)
    try:
        while base.state is not State.READY or base.serving is None or _has_ended(base):
            await changed.wait()
            changed.clear()
    finally:
        watchers.discard(changed.set)


def is_adapter(source: ModelSource) -> bool:
    """Whether a source is known to be an adapter before it is fetched."""
    return source.is_local and (Path(source.location) / ADAPTER_FILE).is_file()


def _is_at(source: ModelSource, wanted: str) -> bool:
    if source.location == wanted:
        return True
    return source.is_local and Path(wanted).is_dir() and Path(wanted).samefile(source.location)


def _has_ended(entry: Entry) -> bool:
    model = None if entry.serving is None else entry.serving.model
    return isinstance(model, GenerationModel) and isinstance(model.engine, RemoteEngine) and model.engine.has_ended
