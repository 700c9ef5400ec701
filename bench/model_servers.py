"""The servers that bench/models.py compares: ours in several settings, llama.cpp's with several formats, and vLLM's.

`default` is our stack as `make up` starts it without any setting but the model; the others have both cores. llama.cpp
has two threads, vLLM both cores and compiled graphs.
"""

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench.architectures import FAMILIES, config_of, make, parameters
from bench.cases import VLLM
from bench.contenders import CONTENDERS, ROOT
from bench.llama_cpp import gguf_file, llama_server, make_model, weight_bytes
from bench.processes import roles
from bench.runs import running_stack
from bench.vllm_server import vllm_server
from headrace_predictor.models.weights import multiplies_bfloat16
from headrace_predictor.settings import PredictorSettings

STATE = ROOT / ".run" / "bench"
# Their vocabulary is the words of bench/architectures.py. llama.cpp does not get them.
SMALL = ("llama-10M", *FAMILIES)
DEFAULT = "default"
_BOTH_CORES = {"PREDICTOR_THREADS": "2"}
OURS: dict[str, dict[str, str]] = {
    DEFAULT: {},
    "bf16": {"PREDICTOR_DTYPE": "bf16", **_BOTH_CORES},
    "int8": {"PREDICTOR_WEIGHTS": "int8", **_BOTH_CORES},
    "int4": {"PREDICTOR_WEIGHTS": "int4", **_BOTH_CORES},
}
LLAMA_CPP = {f"llama.cpp-{weights}": weights for weights in ("bf16", "q8_0", "q4_k_m")}
NAMES = (*OURS, *LLAMA_CPP, VLLM)
# Of layers and of heads; a group of 32 has a scale of 2 bytes.
_BYTES_A_WEIGHT = {"bf16": (2.0, 2.0), "int8": (1.0, 1.0), "int4": (0.5 + 4 / 128, 1.0), VLLM: (2.0, 2.0)}
_VLLM_CONTEXT, _SMALL_CONTEXT = 4096, 2048


class Server(NamedTuple):
    """A running server: its address, its processes and its model."""

    address: str
    roots: Mapping[str, int]
    model: str


class Place(NamedTuple):
    """A model's folder, that of what a start keeps for the next, and that of llama.cpp's source, if there is one."""

    model: Path
    cache: Path
    llama_cpp: Any


def absent_reasons(names: Sequence[str], llama_cpp: Path | None) -> dict[str, str]:
    """Why contenders cannot be measured; installs vLLM if it is missing."""
    absent = {}
    for name in names:
        if "PREDICTOR_WEIGHTS" in OURS.get(name, {}) and "weights" not in PredictorSettings.model_fields:
            absent[name] = "this version has no PREDICTOR_WEIGHTS"
        elif name in LLAMA_CPP and not llama_cpp:
            absent[name] = "no --llama-cpp"
        elif name == VLLM and (reason := CONTENDERS[VLLM].install()):
            absent[name] = reason
    return absent


def make_files(model: Path, names: Sequence[str], llama_cpp: Path | None) -> None:
    """Makes a model, and the files of it that contenders need, where they are missing."""
    if model.name in SMALL:
        if not model.is_dir():
            make(model.name, model)
        return
    if llama_cpp:
        make_model(model.name, model, llama_cpp)
        for name in LLAMA_CPP.keys() & set(names):
            gguf_file(model, LLAMA_CPP[name], llama_cpp)
    elif not model.is_dir():
        raise SystemExit(f"{model} is missing; --llama-cpp has the vocabulary to make it")


@asynccontextmanager
async def start_server(name: str, place: Place) -> AsyncIterator[Server]:
    """A contender's server, from its start to its end."""
    model, log = place.model.name, STATE / "logs" / f"models-{name}.log"
    if name in OURS:
        environment = {"predictor": {**OURS[name], "PREDICTOR_WEIGHTS_CACHE": str(place.cache)}}
        async with running_stack(models=f"{model}={place.model}", environment=environment) as stack:
            yield Server(stack.gateway, {process: stack.pid(process) for process in stack.names}, model)
    elif name == VLLM:
        environment = {"VLLM_CACHE_ROOT": str(place.cache), "TORCHINDUCTOR_CACHE_DIR": str(place.cache / "inductor")}
        environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{(os.cpu_count() or 2) - 1}"
        context = ("--max-model-len", str(_SMALL_CONTEXT if model in FAMILIES else _VLLM_CONTEXT))
        async with vllm_server(place.model, model, log, *context, environment=environment) as server:
            yield Server(server.address, {name: server.pid}, model)
    else:
        file = gguf_file(place.model, LLAMA_CPP[name], place.llama_cpp)
        async with llama_server(file, model, log, place.llama_cpp) as (address, pid):
            yield Server(address, {name: pid}, model)


def memory_gb(server: Server) -> float:
    """The proportional set size of all processes of a server."""
    total = 0
    for pid in roles(server.roots):
        with suppress(psutil.Error):
            total += psutil.Process(pid).memory_full_info().pss
    return total / 1e9


def weight_bytes_a_token(name: str, place: Place) -> float:
    """The bytes of weights that a token reads; 0 if that is not known."""
    if name in LLAMA_CPP:
        return weight_bytes(place.model, LLAMA_CPP[name], place.llama_cpp)
    config = config_of(place.model.name)
    if name == DEFAULT and multiplies_bfloat16():
        name = "bf16"
    of_layer, of_head = _BYTES_A_WEIGHT.get(name, (0.0, 0.0))
    head = config.vocab_size * config.hidden_size
    return (parameters(place.model.name) - head) * of_layer + head * of_head
