"""The engine's speed with a random model of a real shape, or, to compare, that of transformers' continuous batching.

Tokens a second are counted while all streams decode: from the last one's first token to the first one's last. Greedy,
prompts of 32 random tokens, no end tokens. The first answers of each number of streams do not count.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, Qwen3Config

from headrace.sampling import SamplingParameters
from headrace_predictor.engine.build import build_engine
from headrace_predictor.engine.engine import ContinuousBatchingEngine
from headrace_predictor.engine.state.slot import MergingSlot
from headrace_predictor.models.weights import prepare_torch
from headrace_predictor.settings import PredictorSettings
from tests.gpu.machine import bandwidth
from tests.gpu.report import Report, part_options
from tests.support.in_process_engine import submit
from tests.support.requests import submission

COMPARED_STREAMS = 64
_STREAMS = (1, 16, COMPARED_STREAMS, 256)
_PROMPT_TOKENS, _LONG_PROMPT_TOKENS = 32, 2048
_NEW_TOKENS, _WARM_UP_TOKENS = 128, 8
_SMALL_NEW_TOKENS, _SMALL_BLOCKS = 24, 64  # On a CPU, which has no 256 streams.
_PROMPTS = 3
_TIMEOUT_S = 60.0

# Of Qwen3-0.6B and Qwen3-4B: sizes of hidden states and feed-forward part, layers, query heads.
_SHAPES = {"0.6B": (1024, 3072, 28, 16), "4B": (2560, 9728, 36, 32)}
_SMALL = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}

# The time of a piece of an answer, and its number of tokens.
Pieces = Sequence[tuple[float, int]]


def main() -> None:
    options = part_options("engine", "shape", "weights")
    report = Report(options.report)
    if options.engine == "transformers":
        _transformers(options.shape, options.device, report)
    elif options.device == "cpu" and options.weights != "auto":
        report.note("not measured: int8 on a CPU, which needs Numba")
    else:
        _headrace(options.shape, options.weights, options.device, report)
    if options.device == "cuda":
        report.figure("memory taken GB", torch.cuda.max_memory_reserved() / 1e9)


def shape_model(shape: str, device: str) -> Any:
    """A random model in bf16, made on the device, so that no file of it is read. Head and embedding are one."""
    torch.manual_seed(0)
    hidden, inner, layers, heads = _SHAPES[shape]
    sizes = {
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    others: dict[str, Any] = {"max_position_embeddings": 40960, "tie_word_embeddings": True, "eos_token_id": None}
    config = Qwen3Config(**sizes | (_SMALL if device == "cpu" else {}), **others)
    auto: Any = AutoModelForCausalLM
    with torch.device(device):
        return auto.from_config(config, dtype=torch.bfloat16).eval()


def _new_tokens(device: str) -> int:
    return _SMALL_NEW_TOKENS if device == "cpu" else _NEW_TOKENS


def _rate(answers: Sequence[Pieces]) -> float:
    """Tokens a second of all answers together, while all run; 0: they never do."""
    begin, end = max(answer[0][0] for answer in answers), min(answer[-1][0] for answer in answers)
    counted = sum(tokens for answer in answers for at, tokens in answer if begin < at <= end)
    return counted / (end - begin) if counted else 0.0


def _headrace(shape: str, weights: Any, device: str, report: Report) -> None:
    copied = bandwidth(device)
    began = time.perf_counter()
    model = shape_model(shape, device)
    report.figure("seconds to make the model", time.perf_counter() - began)
    most = max(_STREAMS)
    limits = {"max_running": most, "max_waiting": 2 * most, "max_context": 4096}
    settings = PredictorSettings(device=device, weights=weights, prompt_lookup=False, **limits)
    prepare_torch(settings)
    began = time.perf_counter()
    engine = build_engine(shape, model, settings, eos_ids=frozenset())
    try:
        report.figure("seconds to build the engine", time.perf_counter() - began)
        size = int(engine.description["weights_bytes"])
        report.figure("weights GB", size / 1e9)
        report.figure("KV cache GB", int(engine.description["cache_bytes"]) / 1e9)
        for streams in _STREAMS[:-1] if device == "cpu" else _STREAMS:
            asyncio.run(_answers(engine, streams, _WARM_UP_TOKENS))
            tokens_s = _rate(asyncio.run(_answers(engine, streams, _new_tokens(device))))
            report.figure(f"tokens/s of {streams}", tokens_s)
            if streams == 1:
                report.figure("share of the bandwidth at 1, %", 100 * tokens_s * size / copied)
        first = [asyncio.run(_first_token_s(engine)) for _ in range(_PROMPTS)]
        report.figure(f"ms to the first token after {_LONG_PROMPT_TOKENS}", 1e3 * median(first))
    finally:
        engine.close()


async def _answers(
    engine: ContinuousBatchingEngine, streams: int, new_tokens: int, prompt_tokens: int = _PROMPT_TOKENS
) -> list[Pieces]:
    sampling = SamplingParameters(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    prompts = _random_prompts(engine.limits.vocabulary_size, streams, prompt_tokens)
    slots = [submit(engine, submission(str(i), prompt, sampling)) for i, prompt in enumerate(prompts)]
    return list(await asyncio.gather(*map(_read, slots)))


async def _first_token_s(engine: ContinuousBatchingEngine) -> float:
    began = time.perf_counter()
    (answer,) = await _answers(engine, 1, 1, _LONG_PROMPT_TOKENS)
    return answer[0][0] - began


async def _read(slot: MergingSlot) -> Pieces:
    pieces = []
    while True:
        chunk = await asyncio.wait_for(slot.read(), _TIMEOUT_S)
        if chunk.output_ids:
            pieces.append((time.perf_counter(), len(chunk.output_ids)))
        if chunk.finish_reason is not None:
            return pieces


def _random_prompts(vocabulary: int, count: int, tokens: int) -> list[list[int]]:
    return [random.choices(range(10, vocabulary), k=tokens) for _ in range(count)]


def _transformers(shape: str, device: str, report: Report) -> None:
    """transformers' own, with its defaults; on a CPU it takes what memory there is, so the cache is small."""
    model = shape_model(shape, device)
    small = {"num_blocks": _SMALL_BLOCKS, "max_batch_tokens": 4096} if device == "cpu" else {}
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=ContinuousBatchingConfig(**small), timeout=5
    ) as manager:
        for new_tokens in (_WARM_UP_TOKENS, _new_tokens(device)):
            answers = _batched(manager, model.config.vocab_size, new_tokens)
        report.figure("attention", str(model.config._attn_implementation))
        report.figure(f"tokens/s of {COMPARED_STREAMS}", _rate(answers))


def _batched(manager: Any, vocabulary: int, new_tokens: int) -> list[Pieces]:
    prompts = _random_prompts(vocabulary, COMPARED_STREAMS, _PROMPT_TOKENS)
    waiting = set(manager.add_requests(prompts, max_new_tokens=new_tokens, record_timestamps=True))
    answers: list[Pieces] = []
    while waiting:
        result = manager.get_result(timeout=_TIMEOUT_S)
        if result is None or result.error is not None:
            raise RuntimeError("no result within a minute" if result is None else result.error)
        if result.is_finished():
            waiting.remove(result.request_id)
            answers.append([(at, 1) for at in result.timestamps])
    return answers


if __name__ == "__main__":
    main()
