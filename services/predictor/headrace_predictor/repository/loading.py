"""Loads a model of any kind: fetches its files, determines its kind, builds what the servicer serves.

In two steps: `fetch_model`, which blocks, minutes for a download; `build`, seconds for the weights. A generation
model is loaded by an engine process, the others in this one, where the libraries are imported with the first encoder.
Problems with a model raise StartupError with one line of text here and do not wait for the first request.

Models may be loaded by name from, in this order: the models of `MODELS`; a sub-folder of `PREDICTOR_MODEL_REPOSITORY`,
under its own name; a hub id or a URL that matches `PREDICTOR_HUB_ALLOW`. A sub-folder `org` that holds folders alone is
no model: they are models `org/name`. A model of the hub is loaded under its id, or under any other name with the id,
and optionally a revision, as `source`; a URL is always a `source`. Text from callers is never used as a path.

`Operations` are loads and unloads that callers wait for but do not own: they continue when their callers leave.
"""

import asyncio
import gc
import logging
import sys
import time
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headrace.deadline import Deadline
from headrace.errors import (
    DeadlineError,
    ForbiddenError,
    HeadraceError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    OverloadedError,
    StartupError,
)
from headrace.models.gguf.folder import WEIGHTS_FILE
from headrace.models.gguf.reader import read_gguf
from headrace.models.hub import Report, fetch
from headrace.models.kinds import ModelKind, kind_of
from headrace.models.sources import ModelSource, is_name, matches, parse_hub_id, parse_remote, read_config
from headrace.models.weight_headers import read_header
from headrace.rpc.limits.byte_budget import give_memory_back
from headrace.threads import run_in_daemon_thread
from headrace_predictor.engine_process.engine_host import EngineHost
from headrace_predictor.engine_process.launch import launch_engine
from headrace_predictor.generation.model import GenerationModel
from headrace_predictor.models.served_model import ServedModel, as_startup_error
from headrace_predictor.repository.lease import Serving
from headrace_predictor.settings import PredictorSettings
from headrace_predictor.tensor_models.python_model import PythonModel

logger = logging.getLogger(__name__)

_MAX_OPERATIONS = 16  # Running or queued.
_MAX_WAIT_S = 570.0  # The gateway's timeout for such a call is 600.
_PYTHON_RUNNING = 32  # Requests at once; a model's code may hold much memory for each.
_POINTER = b"version https://git-lfs"
_WEIGHTS = "*.safetensors"
_READ = (_WEIGHTS, "*.json", "*.model", "*.txt", "*.jinja")
_FILES = ("*.json", "*.safetensors", "*.model", "*.spm", "*.txt")


@dataclass(frozen=True)
class FetchedModel:
    """A model's files on the local disk, and its kind."""

    folder: Path
    kind: ModelKind


def fetch_model(source: ModelSource, report: Report) -> FetchedModel:
    """Downloads missing files; needs no significant memory; raises StartupError."""
    with as_startup_error(source.name):
        folder = fetch(source, _FILES, report)
        kind = kind_of(source, folder)
        if kind is not ModelKind.PYTHON:
            _check_files(folder)
        return FetchedModel(folder, kind)


def _check_files(folder: Path) -> None:
    """Checks configurations, weights and their index before torch is imported; ValueError names the file and why."""
    for path in sorted(path for pattern in _READ for path in folder.rglob(pattern)):
        if path.stat().st_size < 1024 and path.read_bytes().startswith(_POINTER):
            raise ValueError(f"{path} is a pointer of git-lfs and not the file itself; `git lfs pull` fetches it")
    configs = [path.name for pattern in ("*config.json", "*.index.json") for path in folder.glob(pattern)]
    indexes = [read_config(folder, name) for name in sorted(configs)]
    weights = sorted(folder.rglob(_WEIGHTS))
    if (folder / WEIGHTS_FILE).is_symlink():
        file = read_gguf(folder / WEIGHTS_FILE)
        if not file.tensors:
            raise ValueError(f"{file.path} has a vocabulary and no weights")
    elif not weights:
        raise ValueError(
            f"{folder} has no *.safetensors; of other formats only GGUF is loaded, as the model's location"
        )
    for index in indexes:
        for shard in sorted(set(map(str, index.get("weight_map", {}).values()))):
            if shard.endswith(Path(_WEIGHTS).suffix) and not (folder / shard).is_file():
                raise ValueError(f"{folder} lacks {shard}, which its index of weights names")
    for path in weights:
        _check_weights(path)


def _check_weights(path: Path) -> None:
    try:
        with path.open("rb") as file:
            header, start = read_header(file)
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        needed = start + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise ValueError(f"{path} is not a safetensors file, or is cut off") from None
    if (size := path.stat().st_size) != needed:
        raise ValueError(f"{path} has {size} bytes, by its header {needed}")


async def warmed_up(building: Awaitable[ServedModel]) -> Serving:
    """Waits for a model of `build` and warms it up; its memory is released if either fails."""
    try:
        model = await building
        try:
            await model.warm_up()
        except BaseException:
            await asyncio.to_thread(model.close)
            raise
    except StartupError:
        await asyncio.to_thread(release_memory)
        raise
    return Serving(model)


async def build(
    source: ModelSource,
    fetched: FetchedModel,
    settings: PredictorSettings,
    host: EngineHost,
    report: Report,
    device_memory: int = 0,
) -> ServedModel:
    """Returns the running model; raises StartupError. For `device_memory` see engine_process/launch.py."""
    if fetched.kind is ModelKind.GENERATION:
        report("loading the weights")
        launched = await launch_engine(host, source.name, fetched.folder, source.is_local, settings, device_memory)
        return GenerationModel(launched)
    building = partial(build_here, source, fetched, settings, report)
    return await run_in_daemon_thread(f"load-{source.name}", building)


def build_here(source: ModelSource, fetched: FetchedModel, settings: PredictorSettings, report: Report) -> ServedModel:
    """Returns a model that runs in this process: any kind but a generation model; blocks; raises StartupError."""
    with as_startup_error(source.name):
        if fetched.kind is ModelKind.PYTHON:
            report("loading model.py")
            limits = (settings.max_running or _PYTHON_RUNNING, settings.max_waiting, settings.python_timeout)
            return PythonModel(source.name, fetched.folder, *limits)
        report("loading the weights")
        # Imports the libraries of models, which takes seconds.
        from headrace_predictor.models.weights import prepare_torch
        from headrace_predictor.tensor_models.encoder_loading import load_encoder

        device = prepare_torch(settings)
        return load_encoder(source.name, fetched.folder, source.is_local, fetched.kind, settings, device)


def release_memory() -> None:
    """Frees unreferenced memory, on the device and on the heap; blocks for a fraction of a second."""
    gc.collect()  # Modules and their hooks may refer to each other.
    torch = sys.modules.get("torch")  # Without it nothing is on the device.
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    # glibc keeps freed memory, and more of it with the allocator settings that make big tensors fast.
    give_memory_back()


class Operations:
    """See the module. Owned by one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, what: str, work: Coroutine[Any, Any, None], deadline: Deadline) -> None:
        """Runs `work` and waits for it until the caller's deadline; raises its error, or DeadlineError."""
        if len(self._tasks) >= _MAX_OPERATIONS:
            work.close()
            raise OverloadedError(f"{_MAX_OPERATIONS} loads and unloads are in progress; retry later")
        task = asyncio.create_task(work, name=what)
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, what))
        left_s = max(0.0, deadline.at - time.monotonic())
        done, _ = await asyncio.wait((task,), timeout=min(_MAX_WAIT_S, left_s))
        if not done:
            raise DeadlineError(f"the {what} is still running; RepositoryIndex reports its result")
        if task.cancelled():
            raise NotReadyError("the predictor is stopping")
        task.result()

    async def close(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, what: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        # The caller may have left: log the error.
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed: %s", what, error, exc_info=None if isinstance(error, HeadraceError) else error)


class ModelLocations:
    """Which models may be loaded by name. Reads the disk, briefly; has no state but the settings."""

    def __init__(self, settings: PredictorSettings) -> None:
        self._configured = {source.name: source for source in settings.models}
        self._folder = settings.model_repository
        self._patterns = settings.hub_allow

    def find(self, name: str, source: str = "") -> ModelSource:
        """The source of a model; raises InvalidRequestError, NotFoundError or ForbiddenError."""
        local = self._local(name)
        if local is not None:
            if source not in ("", local.where):
                raise InvalidRequestError(f"model {name!r} has a source of its own; load {source!r} by another name")
            return local
        if not source and (not is_name(name) or (name.count("/") != 1 and not self._allowed(name))):
            raise NotFoundError(f"no model {name!r}")
        try:
            if not is_name(name):
                raise ValueError(f"{name!r} is not a name for a model")
            remote = parse_remote(name, source) if source else parse_hub_id(name, name)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None
        if not self._allowed(remote.location):
            what = remote.location if remote.is_url else f"hub id {remote.location!r}"
            raise ForbiddenError(f"{what} may not be loaded; add it to PREDICTOR_HUB_ALLOW to allow that")
        return remote

    def names(self) -> list[str]:
        """The models in the repository folder that can be loaded."""
        if self._folder is None:
            return []
        found: list[str] = []
        for name, is_folder in _visible(self._folder).items():
            inner = _visible(self._folder / name) if is_folder else {}
            if inner and all(inner.values()):
                found += filter(is_name, (f"{name}/{part}" for part in inner))
            elif is_folder:
                found.append(name)
        return sorted(found)

    def _local(self, name: str) -> ModelSource | None:
        if name in self._configured:
            return self._configured[name]
        if self._folder is not None and name in self.names():
            return ModelSource(name, str(self._folder / name))
        return None

    def _allowed(self, location: str) -> bool:
        return any(matches(location, pattern) for pattern in self._patterns)


def _visible(folder: Path) -> dict[str, bool]:
    """What a folder holds, except for hidden names, and whether each is a folder."""
    try:
        return {path.name: path.is_dir() for path in folder.iterdir() if is_name(path.name)}
    except OSError:
        return {}  # It is missing for now, or may not be read; loaded models are still served.
