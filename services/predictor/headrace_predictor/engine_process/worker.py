"""The engine process: loads one generation model and runs its engine until the predictor's front closes the socket.

Threads: the engine's own and its watchdog; the main thread, which reads commands; and a reporter, which sends the state
while no step does, so that silence means that the process hangs, and ends the process when the engine has died; and one
that loads adapters, whose files are read for seconds. The first frame from here is `ready` or `startup_error`.
"""

import gc
import importlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from headrace.errors import HeadraceError, StartupError
from headrace.frames import framed, messages
from headrace.rpc.limits.byte_budget import give_memory_back
from headrace.telemetry.logs import set_up_logging
from headrace_predictor.engine.engine import ContinuousBatchingEngine
from headrace_predictor.engine.runners.memory import cache_shape
from headrace_predictor.engine.runners.paged import PagedRunner
from headrace_predictor.engine.runners.proof import Proof
from headrace_predictor.engine.runners.streamed import StreamedDecoder, weight_format
from headrace_predictor.engine.state.cache import BLOCK_TOKENS
from headrace_predictor.engine_process.step_frames import StepFrames
from headrace_predictor.generation.loaded_model import LoadedModel
from headrace_predictor.generation.loading import load_launched
from headrace_predictor.models.fingerprint import fingerprint_of
from headrace_predictor.models.served_model import as_startup_error
from headrace_protos import engine_pb2
from headrace_protos.steps_pb2 import Submission

logger = logging.getLogger(__name__)

REPORT_S = 0.5  # The longest time between two frames.
_VOCABULARY, _BLOCKS = 64, 8  # Of the tiny model.


def run(connection: socket.socket) -> NoReturn:
    """Serves the engine's socket; ends the process."""
    status = os.EX_SOFTWARE
    try:
        frames = messages(connection)
        launch = engine_pb2.EngineLaunch.FromString(next(frames))
        _serve(connection, frames, launch)
        status = os.EX_OK
    except StartupError as error:
        _send(connection, engine_pb2.EngineFrame(startup_error=str(error), is_fault=error.is_fault))
        status = os.EX_CONFIG
    except (OSError, StopIteration):
        status = os.EX_OK  # The front has ended.
    except Exception:
        logger.critical("the engine process failed", exc_info=True)
    finally:
        # Nothing is worth closing, and a step may hang.
        os._exit(status)


def _serve(connection: socket.socket, commands: Iterator[bytes], launch: engine_pb2.EngineLaunch) -> None:
    settings = json.loads(launch.settings)
    set_up_logging("predictor", settings["log_level"], settings["log_format"])
    frames = StepFrames(partial(_send, connection))
    if launch.prepare:
        module, _, function = launch.prepare.partition(":")
        getattr(importlib.import_module(module), function)()
    with as_startup_error(launch.model):
        loaded = load_launched(launch, frames.flush)
    # What was loaded stays: a collection that looks at all of it would hold up every stream.
    gc.collect()
    gc.freeze()
    give_memory_back()
    engine = loaded.engine
    frames.report(partial(_state, engine))
    frames.send(engine_pb2.EngineFrame(ready=_facts(loaded)))
    threading.Thread(target=_report, args=(engine, frames), name=f"report-{launch.model}", daemon=True).start()
    adapters = AdapterLoading(loaded, frames.send)
    for message in commands:
        command = engine_pb2.EngineCommands.FromString(message)
        adapters.obey(command)
        _obey(command, engine, frames)


def _facts(loaded: LoadedModel[ContinuousBatchingEngine]) -> engine_pb2.EngineFacts:
    limits, description = loaded.engine.limits, loaded.engine.description
    # What grows, and what the kernel could take back: both look free.
    memory = sum(int(description.get(name, 0)) for name in ("cache_bytes", "mapped_bytes"))
    return engine_pb2.EngineFacts(
        architecture=loaded.architecture,
        device=loaded.device,
        dtype=loaded.dtype,
        defaults=loaded.defaults.model_dump_json().encode(),
        fingerprint=loaded.fingerprint,
        context_length=limits.context_length,
        vocabulary_size=limits.vocabulary_size,
        is_encoder_decoder=limits.is_encoder_decoder,
        scores_prompts=limits.scores_prompts,
        description=loaded.engine.description,
        device_memory=torch.cuda.memory_reserved() if loaded.device == "cuda" else memory,
    )


def _state(engine: ContinuousBatchingEngine) -> engine_pb2.EngineState:
    return engine_pb2.EngineState(**vars(engine.load), counters=engine_pb2.EngineCounters(**vars(engine.statistics)))


def _report(engine: ContinuousBatchingEngine, frames: StepFrames) -> None:
    while not engine.wait_for_death(REPORT_S):
        frames.send_state(REPORT_S / 2)
    # The front ends the requests in flight when the socket closes, and so not before it knows of the death.
    os._exit(os.EX_SOFTWARE)


def _obey(commands: engine_pb2.EngineCommands, engine: ContinuousBatchingEngine, frames: StepFrames) -> None:
    for submission in commands.submissions:
        _submit(Submission.FromString(submission), engine, frames)
    for key in commands.cancelled:
        if (sequence := frames.sequences.get((key.channel, key.number))) is not None:
            sequence.cancel()
    for key in commands.reported:
        if (sequence := frames.sequences.get((key.channel, key.number))) is not None:
            sequence.reported()
    frames.flush()


def _submit(submission: Submission, engine: ContinuousBatchingEngine, frames: StepFrames) -> None:
    output = frames.add((submission.channel, submission.number))
    try:
        engine.generate(submission, output)
    except HeadraceError as error:
        output.fail(error, refused=True)


def _send(connection: socket.socket, frame: engine_pb2.EngineFrame) -> None:
    try:
        connection.sendall(framed(frame.SerializeToString()))
    except OSError:
        os._exit(os.EX_OK)  # The front has ended.


class AdapterLoading:
    """Obeys the front's commands in their order."""

    def __init__(
        self, base: LoadedModel[ContinuousBatchingEngine], send: Callable[[engine_pb2.EngineFrame], None]
    ) -> None:
        self._base = base
        self._send = send
        self._thread = ThreadPoolExecutor(1, "adapters")

    def obey(self, commands: engine_pb2.EngineCommands) -> None:
        for adapter in commands.adapters:
            self._thread.submit(self._load, adapter)
        for number in commands.unloaded_adapters:
            self._thread.submit(self._unload, number)

    def _load(self, adapter: engine_pb2.AdapterToLoad) -> None:
        result = engine_pb2.AdapterLoaded(number=adapter.number)
        try:
            with as_startup_error(adapter.name):
                result.fingerprint = self._fingerprint(adapter)
        except StartupError as error:
            result.error, result.is_fault = str(error), error.is_fault
        self._send(engine_pb2.EngineFrame(adapters=[result]))

    def _fingerprint(self, adapter: engine_pb2.AdapterToLoad) -> str:
        """Loads an adapter; returns the fingerprint of the base with it; raises any error."""
        base, adapters = self._base, self._base.engine.adapters
        if adapters is None:
            runner = base.engine.description["runner"]
            raise ValueError(f"its base {base.name} has the runner {runner}, which supports no adapters; paged does")
        folder = Path(adapter.folder)
        adapters.load(adapter.number, folder, self._base.engine.rules)
        logger.info("model %s: an adapter of %s", adapter.name, base.name)
        return fingerprint_of(folder, base.dtype, adapter.is_local, base.fingerprint)

    def _unload(self, number: int) -> None:
        if self._base.engine.adapters is not None:
            self._base.engine.adapters.unload(number)


@cache
def rehearse() -> None:
    """Loads and runs a tiny model in the host, once, so that its forks share what the first use of the libraries makes.

    That is tables of compiled kernels, caches of classes, patterns of weights' names: an engine process starts faster
    then and needs half the memory of its own. Single-threaded, because the host is forked; never on the device. What
    fails costs time and memory only.
    """
    try:
        _run_tiny_model()
    except Exception:
        logger.warning("the host could not run a model", exc_info=True)


def _run_tiny_model() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    config = LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    with torch.inference_mode():
        kind: Any = LlamaForCausalLM
        model = kind.from_pretrained(None, config=config, state_dict=kind(config).state_dict()).eval()
        shape = cache_shape(model)
        proof = Proof(model, shape, _VOCABULARY, _BLOCKS * BLOCK_TOKENS)
        proof.check_generate("rehearsed")
        proof.of_paged()
        format_ = weight_format("rehearsed", model, "auto")
        streamed = StreamedDecoder(model, format_, 1) if format_ else None
        PagedRunner(model, shape, _BLOCKS, streamed=streamed).probe()
    torch.set_num_threads(threads)
