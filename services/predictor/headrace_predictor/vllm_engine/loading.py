"""Loads a model with vLLM; runs where vLLM is installed.

LLMEngine computes in the thread that calls it, or in processes of its own if its arguments ask for several devices;
these end with this process.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from headrace.errors import StartupError
from headrace.models.generation_config import describe, eos_ids_of, read_generation
from headrace.models.sources import read_config
from headrace.sampling import defaults_of
from headrace_predictor.engine.engine import ContinuousBatchingEngine
from headrace_predictor.engine.grammar import GrammarCompiler
from headrace_predictor.engine.interface import EngineLimits
from headrace_predictor.engine.load import PrefillPace
from headrace_predictor.engine.scheduler import Scheduler
from headrace_predictor.engine.state.blocks import RESERVED, BlockManager
from headrace_predictor.generation.loaded_model import LoadedGeneration
from headrace_predictor.models.fingerprint import fingerprint_of
from headrace_predictor.vllm_engine.computer import VllmComputer
from headrace_predictor.vllm_engine.constrained import end_id_of
from headrace_predictor.vllm_engine.settings import VllmSettings, engine_arguments
from headrace_protos import engine_pb2

logger = logging.getLogger(__name__)

# What a user has set stays. No usage reports; log lines are this process's; the engine runs in this process.
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # This process has threads.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "LLGUIDANCE_LOG_LEVEL": "0",
}
# vLLM compiles parts of its sampler nevertheless, which needs a compiler where it runs.
_EAGER = {"TORCH_COMPILE_DISABLE": "1"}
# vLLM looks for its machine's address by a route to the internet, which a container need not have.
_ONE_HOST = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
_ANY_PROMPT = 1 << 30


class WholePrompts(PrefillPace):
    """No limit: vLLM divides prompts itself."""

    def __init__(self) -> None:
        super().__init__(0.0)

    def limit(self, streams: int, prompts: int, position: int = 0) -> int:
        return _ANY_PROMPT

    def observe(self, streams: int, chunks: object, seconds: float) -> None:
        """Nothing to measure."""


def load_vllm(launch: engine_pb2.EngineLaunch, flush: Callable[[], None]) -> LoadedGeneration:
    """A Loader, see engine_process/worker.py."""
    settings = VllmSettings.model_validate_json(launch.settings)
    name, folder = launch.model, Path(launch.folder)
    config = read_config(folder, "config.json")
    if config.get("is_encoder_decoder"):
        raise StartupError(f"model {name}: the engine vllm serves decoders only; set PREDICTOR_ENGINE for this model")
    for variable, value in _environment(settings.vllm_arguments).items():
        os.environ.setdefault(variable, value)
    if settings.log_level != "DEBUG":
        logging.getLogger("vllm").setLevel(logging.WARNING)
    import vllm
    from vllm.inputs.engine import tokens_input
    from vllm.platforms import current_platform

    device = str(current_platform.device_type)
    known = {field.name for field in dataclasses.fields(vllm.EngineArgs)}
    arguments = engine_arguments(settings, known, device, _elsewhere(launch, device))
    end_id = end_id_of(folder)
    llm = _start(name, folder, arguments, has_tokenizer=end_id is not None)
    _warm_up(llm, tokens_input, has_tokenizer=end_id is not None)
    facts, cache = llm.vllm_config.model_config, llm.vllm_config.cache_config
    context, vocabulary = int(facts.max_model_len), int(facts.get_vocab_size())
    generation = read_generation(folder)
    eos_ids = eos_ids_of(generation, folder, end_id)
    blocks = int(cache.kv_cache_size_tokens) // int(cache.block_size)
    version = f"vllm {vllm.__version__}"
    computer = VllmComputer(llm, _sampling_params, tokens_input, eos_ids, version, end_id)
    engine = ContinuousBatchingEngine(
        name,
        computer,
        # Blocks are counted as vLLM's are, but not shared: it may hold more sequences than this schedules.
        Scheduler(
            BlockManager(blocks + RESERVED, int(cache.block_size)),
            int(llm.vllm_config.scheduler_config.max_num_seqs),
            settings.max_waiting,
            _ANY_PROMPT,
            reuses_prefixes=False,
            held_need_slots=True,
        ),
        WholePrompts(),
        EngineLimits(context, False, vocabulary, True),
        eos_ids,
        settings.step_timeout,
        flush,
        None if end_id is None else GrammarCompiler(folder),
    )
    given = json.dumps(settings.vllm_arguments, sort_keys=True)
    engine.description |= {"engine_arguments": given, **describe(name, generation, honours_rules=False)}
    dtype = str(facts.dtype).removeprefix("torch.")
    logger.info("model %s: %s, %s on %s, context %d, %d blocks", name, version, dtype, device, context, blocks)
    return LoadedGeneration(
        name,
        str(facts.architecture),
        device,
        dtype,
        defaults_of(generation, is_encoder_decoder=False),
        engine,
        # Other arguments may mean other numbers: another quantisation, another order of sums on several devices.
        fingerprint_of(folder, dtype, launch.is_local, sampler=f"{version} {given}"),
    )


def _environment(arguments: dict[str, Any]) -> dict[str, str]:
    several_hosts = arguments.get("distributed_executor_backend") == "ray" or "nnodes" in arguments
    return _ENVIRONMENT | (_EAGER if arguments.get("enforce_eager") else {}) | ({} if several_hosts else _ONE_HOST)


def _start(name: str, folder: Path, arguments: dict[str, Any], has_tokenizer: bool) -> Any:
    """vLLM's LLMEngine; raises StartupError for wrong arguments. Only its grammars need a tokenizer."""
    import vllm
    from vllm.config import StructuredOutputsConfig

    try:
        args = vllm.EngineArgs(
            model=str(folder),
            served_model_name=name,
            skip_tokenizer_init=not has_tokenizer,
            structured_outputs_config=StructuredOutputsConfig(backend="guidance"),
            **arguments,
        )
        return vllm.LLMEngine.from_engine_args(args)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ").splitlines()[0]
        raise StartupError(f"model {name}: vLLM refuses its arguments: {f'{field}: ' * bool(field)}{message}") from None


def _sampling_params(structured_outputs: dict[str, Any] | None = None, **fields: Any) -> Any:
    """vLLM's SamplingParams."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    form = None if structured_outputs is None else StructuredOutputsParams(**structured_outputs)
    return SamplingParams(output_kind=RequestOutputKind.DELTA, structured_outputs=form, **fields)


def _warm_up(llm: Any, make_prompt: Callable[..., Any], has_tokenizer: bool) -> None:
    """Uses what vLLM would compile or read at the first request that asks for it."""
    sampling = _sampling_params(
        max_tokens=2,
        seed=0,
        top_k=2,
        presence_penalty=0.1,
        logprobs=1,
        prompt_logprobs=1,
        ignore_eos=True,
        structured_outputs={"regex": "(.|\\n)*"} if has_tokenizer else None,
        detokenize=False,
    )
    llm.add_request("warm-up", make_prompt([0, 0]), sampling)
    while llm.has_unfinished_requests():
        llm.step()


def _elsewhere(launch: engine_pb2.EngineLaunch, device: str) -> float:
    """The share of the device's memory that the predictor's other engines hold."""
    if device != "cuda" or not launch.device_memory_elsewhere:
        return 0.0
    return launch.device_memory_elsewhere / int(torch.cuda.mem_get_info()[1])
