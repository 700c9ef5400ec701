"""Models of the size that people serve, beside llama.cpp's server and vLLM's: OpenAI's server-sent events, greedy.

Random weights in the shapes of Qwen3-0.6B and Llama-3.2-1B, with vocabularies of real size (bench/llama_cpp.py), and,
where asked for, llama-10M and families of 50 to 100 million parameters, which llama.cpp does not get.
bench/model_servers.py has the servers. End tokens are ignored. Parts:

- start: seconds from the command to the first token of an answer, on the first start, without what earlier ones kept,
  and on the second, all files in the page cache. Memory (the proportional set size of all processes) then and after
  the load of 16 streams and a long prompt. No other server runs.
- decode: tokens/s of N streams of 64 tokens together, while all of them decode; for one stream also the share of the
  memory's bandwidth: what two threads read in a second before and in a second after, together.
- prompt: seconds to the first token of a prompt of 2,048 tokens.
- crowd: the median time to the first token of 64 callers with two requests each, 32 tokens in, 32 out.

Only one server runs at a time: on few cores even idle ones slow the measured one, above all llama.cpp's, whose threads
wait for each other at each operation. In each round every server is started and measured once, in random order. Figures
are medians with the lowest and the highest; ratios are of pairs (bench/statistics.py). A round of all parts but `start`
takes about a minute for each server of a shape, and 2 more for vLLM, and the files of both shapes 10, once (7 GB).

`python -m bench.models --llama-cpp FOLDER` writes bench/results/models.json. docs/benchmarks.md has llama.cpp's build.
"""

import argparse
import asyncio
import os
import random
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numba
import numpy as np
import uvloop

from bench.architectures import SHAPES
from bench.cases import PROMPT_IDS, VLLM
from bench.completions import Connection, Load, Stream
from bench.model_servers import (
    DEFAULT,
    LLAMA_CPP,
    NAMES,
    OURS,
    SMALL,
    STATE,
    Place,
    Server,
    absent_reasons,
    make_files,
    memory_gb,
    start_server,
    weight_bytes_a_token,
)
from bench.runs import machine, parser, write
from bench.statistics import estimate, paired_ratios, quantile

# With which peers figures are compared.
_PEERS = {
    DEFAULT: ("llama.cpp-bf16", VLLM),
    "bf16": ("llama.cpp-bf16", VLLM),
    "int8": ("llama.cpp-q8_0", VLLM),
    "int4": ("llama.cpp-q4_k_m", VLLM),
}

_PARTS = ("start", "decode", "prompt", "crowd")
_PROMPT_TOKENS, _LONG_PROMPT_TOKENS = 32, 2048
_NEW_TOKENS = 64
_LAST_ID = 1000  # The last of each prompt: whole text, after which the first token of an answer is not held back.
_LOADED_STREAMS = 16
_CROWD, _CROWD_ANSWERS, _CROWD_NEW_TOKENS = 64, 2, 32
_KEEP_S = 20
_READ_BYTES, _READ_S = 1 << 30, 1.0  # After idle seconds some memory is half as fast, for about one.


# Each contender's figures by name, one value for each round.
Rounds = dict[str, dict[str, list[float]]]


def main() -> None:
    options = parser(__doc__, "models")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--shapes", nargs="+", choices=(*SHAPES, *SMALL), default=tuple(SHAPES))
    options.add_argument("--contenders", nargs="+", choices=NAMES, default=NAMES)
    options.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    options.add_argument("--streams", type=int, nargs="+", default=(1, 4, 16))
    options.add_argument("--models", type=Path, default=STATE / "models", help="folder of the models' files")
    options.add_argument("--llama-cpp", type=Path, default=os.environ.get("LLAMA_CPP"), help="default: LLAMA_CPP")
    arguments = options.parse_args()
    for folder in (STATE / "logs", arguments.models):
        folder.mkdir(parents=True, exist_ok=True)
    absent = absent_reasons(arguments.contenders, arguments.llama_cpp)
    report: dict[str, Any] = {"machine": machine(), "rounds": arguments.rounds, "absent": absent, "shapes": {}}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        for shape in arguments.shapes:
            names = [name for name in arguments.contenders if name not in absent]
            if shape in SMALL:
                names = [name for name in names if name not in LLAMA_CPP]
            make_files(arguments.models / shape, names, arguments.llama_cpp)
            measured: Rounds = defaultdict(lambda: defaultdict(list))
            try:
                loop.run(_measure(shape, names, arguments, measured))
            finally:  # What was measured before a failure is kept.
                report["shapes"][shape] = _report(measured)
                write(arguments.out, report)
                print(f"\n{shape}\n{_table(report['shapes'][shape])}", flush=True)
    print("".join(f"\n{name} is absent: {reason}" for name, reason in absent.items()))


async def _measure(shape: str, names: Sequence[str], arguments: argparse.Namespace, measured: Rounds) -> None:
    if "start" in arguments.parts:
        for number in range(arguments.rounds):
            print(f"{shape}, starts {number + 1}", flush=True)
            for name in random.sample(names, len(names)):
                _add(measured[name], await _starts(name, arguments.models / shape, arguments.llama_cpp))
    if set(arguments.parts) == {"start"}:
        return
    data = np.ones(_READ_BYTES // 8, np.int64)
    place = Place(arguments.models / shape, STATE / "cache", arguments.llama_cpp)
    for number in range(arguments.rounds):
        print(f"{shape}, round {number + 1}", flush=True)
        for name in random.sample(names, len(names)):
            async with start_server(name, place) as server:
                await _answers(server, _LOADED_STREAMS, 4)
                await _kept(name, place)
                try:
                    figures = await _figures(server, arguments, name, data)
                except Exception as error:
                    error.add_note(f"of {name}")
                    raise
                size = weight_bytes_a_token(name, place)
                if (alone := figures.get("tokens_per_s_1")) and size:
                    figures["bandwidth_share"] = alone * size / (figures["bandwidth_gb_per_s"] * 1e9)
                _add(measured[name], figures)


async def _starts(name: str, model: Path, llama_cpp: Path) -> dict[str, float]:
    figures = {}
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        own = Path(folder) / model.name  # What a start keeps beside the model is not there yet.
        if name not in LLAMA_CPP:
            shutil.copytree(model, own, copy_function=os.link)
        place = Place(model if name in LLAMA_CPP else own, Path(folder) / "cache", llama_cpp)
        for start in ("first", "second"):
            began = time.perf_counter()
            async with start_server(name, place) as server:
                await _answers(server, 1, 1)
                figures[f"{start}_start_s"] = time.perf_counter() - began
                await _kept(name, place)
                if start == "second":
                    figures["ready_gb"] = memory_gb(server)
                    await _answers(server, _LOADED_STREAMS, _NEW_TOKENS)
                    await _answers(server, 1, 1, _LONG_PROMPT_TOKENS)
                    figures["loaded_gb"] = memory_gb(server)
    return figures


async def _kept(name: str, place: Place) -> None:
    """Waits until our first start has kept its packed weights; where it packs none, for the whole time."""
    for _ in range(10 * _KEEP_S if name in OURS else 0):
        if any(place.cache.glob("*.weights")):
            return
        await asyncio.sleep(0.1)


async def _figures(server: Server, arguments: argparse.Namespace, name: str, data: Any) -> dict[str, float]:
    figures = {}
    if "decode" in arguments.parts:
        for count in arguments.streams:
            before = _bandwidth(data) if count == 1 else 0.0
            figures[f"tokens_per_s_{count}"] = _rate(await _answers(server, count, _NEW_TOKENS))
            if count == 1:
                figures["bandwidth_gb_per_s"] = (before + _bandwidth(data)) / 2e9
    if "prompt" in arguments.parts:
        (prompt,) = await _answers(server, 1, 1, _LONG_PROMPT_TOKENS)
        figures["prompt_s"] = prompt.first_token_s
    if "crowd" in arguments.parts and name not in LLAMA_CPP:  # It accepts few connections at once, and closes others.
        crowd = await _answers(server, _CROWD, _CROWD_NEW_TOKENS, answers=_CROWD_ANSWERS)
        figures["crowd_s"] = quantile([answer.first_token_s for answer in crowd], 0.5)
    return figures


class Answer(NamedTuple):
    """An answer's time to the first token, and the time and the tokens of each of its pieces."""

    first_token_s: float
    pieces: Sequence[tuple[float, int]]


async def _answers(
    server: Server, callers: int, new_tokens: int, prompt_tokens: int = _PROMPT_TOKENS, answers: int = 1
) -> list[Answer]:
    """Answers to callers that call at once, each `answers` times in sequence, with random prompts."""

    async def call() -> list[Answer]:
        connection = await Connection.open(server.address, words=server.model in SMALL)
        try:
            return [await answer(connection) for _ in range(answers)]
        finally:
            connection.close()

    async def answer(connection: Connection) -> Answer:
        load = Load()
        prompt = [*random.choices(PROMPT_IDS, k=prompt_tokens - 1), _LAST_ID]  # noqa: S311
        stream = Stream(prompt, new_tokens, server.model, lambda: load)
        await stream.run(connection)
        return Answer(load.first_token_s[0], stream.arrivals)

    return [found for several in await asyncio.gather(*(call() for _ in range(callers))) for found in several]


def _rate(answers: Sequence[Answer]) -> float:
    """Tokens a second of all streams, from the last one's first token to the first one's last."""
    begin, end = max(answer.pieces[0][0] for answer in answers), min(answer.pieces[-1][0] for answer in answers)
    if end <= begin:
        raise RuntimeError("the streams were not all running at once")
    pieces = [piece for answer in answers for piece in answer.pieces]
    counted = sum(tokens for at, tokens in pieces if begin < at <= end)
    # A piece with two tokens of text counts as one.
    return counted * len(answers) * _NEW_TOKENS / sum(tokens for _, tokens in pieces) / (end - begin)


def _bandwidth(data: Any) -> float:
    """Bytes a second that both cores read, for about a second."""
    numba.set_num_threads(min(2, numba.config.NUMBA_NUM_THREADS))
    _total(data[:2])
    began, reads = time.perf_counter(), 0
    while (seconds := time.perf_counter() - began) < _READ_S:
        _total(data)
        reads += 1
    return float(reads * data.nbytes / seconds)


@numba.njit(parallel=True)  # type: ignore[untyped-decorator]
def _total(data: Any) -> int:
    total = 0
    for index in numba.prange(data.size):
        total += data[index]
    return total


def _add(rounds: dict[str, list[float]], figures: Mapping[str, float]) -> None:
    for name, value in figures.items():
        rounds[name].append(value)


def _report(measured: Rounds) -> dict[str, Any]:
    contenders = {
        name: {
            figure: {
                **{key: round(of(values), 3) for key, of in (("median", median), ("low", min), ("high", max))},
                "each_round": [round(value, 3) for value in values],
            }
            for figure, values in figures.items()
        }
        for name, figures in measured.items()
    }
    ratios: dict[str, Any] = {}
    for ours, peer in ((name, peer) for name in OURS for peer in _PEERS[name]):
        for figure, values in measured.get(ours, {}).items():
            theirs = measured.get(peer, {}).get(figure, [])
            if len(theirs) == len(values) and not figure.startswith("bandwidth"):
                ratio = estimate(paired_ratios(values, theirs))
                found = {"median": ratio.median, "low": ratio.low, "high": ratio.high}
                ratios.setdefault(f"{ours} / {peer}", {})[figure] = {key: round(v, 3) for key, v in found.items()}
    return {"contenders": contenders, "ratios": ratios}


def _table(shape: Mapping[str, Any]) -> str:
    lines = []
    for rows in (shape["contenders"], shape["ratios"]):
        for name, figures in rows.items():
            lines.append(name)
            lines += [
                f"  {key:<22}{f['median']:>9.3f} ({f['low']:.3f} to {f['high']:.3f})" for key, f in figures.items()
            ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
