"""The capacity of a predictor: tokens a second through engine and front, with a model that computes nothing.

The predictor as `make up` starts it, with default settings except the number of running sequences, and a caller of
its connection (steps.proto) that counts the tokens and submits a sequence for each that ends: prompts of 32
tokens, 64 tokens out, greedy. Engine, front and host have one core together, the caller has the others. `--model
llama-10M` measures the same with that model, in bfloat16.

`us_a_token` is processor time by process (bench/processes.py) and by thread; `forward` the part of the runner.

`python -m bench.step_path` writes bench/results/step_path.json; a minute.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import uvloop

from bench import forward_times
from bench.cases import PROMPT_IDS
from bench.contenders import ROOT
from bench.processes import NAMED_THREADS, Usage, on_cores, roles, usage
from bench.runs import machine, parser, write
from bench.server_process import LOOPBACK, accepts, free_port, server_process, until
from headrace.endpoints import host_and_port, steps_port
from headrace.frames import FrameConnection
from headrace_protos import steps_pb2
from headrace_runner.services import predictor_tuning
from headrace_runner.settings import StackSettings

_MODELS_FOLDER = ROOT / ".run" / "bench" / "models"
_MODEL = "llama-10M"
_FREE = "free"
_PROMPT_TOKENS = 32
_WARM_UP_S = 1.0
_START_S = 120.0
# Small enough that its pages are allocated in the first round. Until then each of 2 MiB takes about 3 ms, which with
# this model costs 17 µs a token.
_CACHE = "256MiB"
_SAMPLING = {"max_tokens": 64, "temperature": 0, "ignore_eos": True, "seed": 1}
_LEAST_US = 0.5


class Server(NamedTuple):
    """A running predictor, and the file of its forward times."""

    pid: int
    address: str
    forward_times: Path


class Caller:
    """A transformer's call with `count` sequences in flight; `tokens` and `steps` count the received ones."""

    def __init__(self, count: int, tokens: int) -> None:
        self.tokens = 0
        self.steps = 0
        self._draw = random.Random(count)  # noqa: S311
        self._sampling = json.dumps(_SAMPLING | {"max_tokens": tokens}).encode()
        self._submitted = 0
        self._outgoing = steps_pb2.StepsRequest()
        self._to_submit = count  # Submitted once the model is ready.
        self._connection: FrameConnection | None = None

    @asynccontextmanager
    async def called(self, address: str) -> AsyncIterator[None]:
        host, port = host_and_port(address)
        self._connection = await FrameConnection.open(host, steps_port(port), self._take, self._send)
        self._send()
        try:
            yield
        finally:
            self._connection.abort()

    async def run(self, seconds: float) -> None:
        """Waits; raises the error that has ended the call."""
        await asyncio.sleep(seconds)
        if self._connection is not None and self._connection.ended.done():
            raise RuntimeError("the predictor has ended the connection") from self._connection.ended.exception()

    def _take(self, message: bytes) -> None:
        step = steps_pb2.Step.FromString(message)
        if self._to_submit and step.loads.models:
            for _ in range(self._to_submit):
                self._submit()
            self._to_submit = 0
        self.tokens += len(step.token_ids)
        self.steps += bool(step.token_ids)
        for ended in step.ended:
            if ended.HasField("error"):
                raise RuntimeError(f"a sequence has failed: {ended.error.message}")
            self._submit()
        self._send()

    def _send(self) -> None:
        if self._connection is not None and self._connection.can_send and self._outgoing.submissions:
            outgoing, self._outgoing = self._outgoing, steps_pb2.StepsRequest()
            self._connection.send(outgoing.SerializeToString())

    def _submit(self) -> None:
        self._submitted += 1
        submission = steps_pb2.Submission(
            number=self._submitted,
            model=_MODEL,
            request_id=f"request-{self._submitted}",
            prompt_ids=self._draw.choices(PROMPT_IDS, k=_PROMPT_TOKENS),
            sampling=self._sampling,
            timeout_s=600.0,
        )
        self._outgoing.submissions.append(submission.SerializeToString())


def main() -> None:
    options = parser(__doc__, "step_path")
    options.add_argument("--model", choices=(_FREE, _MODEL), default=_FREE)
    options.add_argument("--callers", type=int, nargs="+", default=(8, 32, 128))
    options.add_argument("--new-tokens", type=int, default=64)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=3.0)
    options.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="default: the last")
    arguments = options.parse_args()
    subprocess.run([sys.executable, "-m", "bench.architectures", str(_MODELS_FOLDER)], cwd=ROOT, check=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        samples = loop.run(_measure(arguments))
    report = {str(callers): _figures(found) for callers, found in sorted(samples.items())}
    write(
        arguments.out,
        {
            "machine": machine(),
            "model": arguments.model,
            "prompt_tokens": _PROMPT_TOKENS,
            "new_tokens": arguments.new_tokens,
            "rounds": arguments.rounds,
            "seconds": arguments.seconds,
            "callers": report,
        },
    )
    for callers, figures in report.items():
        print(f"{callers:>4} callers", json.dumps(figures))


async def _measure(arguments: argparse.Namespace) -> dict[int, list[dict[str, Any]]]:
    samples: dict[int, list[dict[str, Any]]] = defaultdict(list)
    async with _predictor(arguments) as server:
        with on_cores(os.sched_getaffinity(0) - {arguments.core} or {arguments.core}):
            for _ in range(arguments.rounds):
                for callers in random.sample(arguments.callers, len(arguments.callers)):
                    samples[callers].append(await _sample(server, callers, arguments))
    return samples


@asynccontextmanager
async def _predictor(arguments: argparse.Namespace) -> AsyncIterator[Server]:
    """A predictor on its core, which may still load its model."""
    port = free_port()
    async with AsyncExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        environment = {
            "PREDICTOR_HOST": LOOPBACK,
            "PREDICTOR_PORT": str(port),
            "PREDICTOR_METRICS_PORT": "0",
            "PREDICTOR_DEVICE": "cpu",
            "PREDICTOR_DTYPE": "bf16",
            "PREDICTOR_MAX_RUNNING": str(max(arguments.callers)),
            "PREDICTOR_KV_CACHE_MEMORY": _CACHE,
            "PREDICTOR_PAYLOAD_SPOOL": str(folder / "spool"),
            "MODELS": f"{_MODEL}={_MODELS_FOLDER / _MODEL}",
            forward_times.VARIABLE: str(folder / "forward-times"),
        }
        if arguments.model == _FREE:
            environment |= {"FREE": "1", "PACE_MS": "0"}
        command = (sys.executable, "-m", "bench.timed_predictor")
        log = ROOT / ".run" / "bench" / "step_path.log"
        environment |= predictor_tuning(StackSettings()) | NAMED_THREADS
        with on_cores({arguments.core}):
            process = await opened.enter_async_context(server_process("the predictor", command, log, environment))
        await until(lambda: accepts(steps_port(port)), process, _START_S)
        yield Server(process.pid, f"{LOOPBACK}:{port}", folder / "forward-times")


async def _sample(server: Server, callers: int, arguments: argparse.Namespace) -> dict[str, Any]:
    caller = Caller(callers, arguments.new_tokens)
    async with caller.called(server.address):
        while not caller.tokens:
            await caller.run(0.1)
        await caller.run(_WARM_UP_S)
        processes = roles({"front": server.pid})
        before, passes_before = usage(processes), forward_times.read(server.forward_times)
        tokens, steps, started = caller.tokens, caller.steps, time.perf_counter()
        await caller.run(arguments.seconds)
        used, passes = usage(processes).since(before), forward_times.read(server.forward_times)
        tokens, steps, seconds = caller.tokens - tokens, caller.steps - steps, time.perf_counter() - started
    return _sample_figures(tokens, steps, seconds, used, passes.cpu_s - passes_before.cpu_s)


def _sample_figures(tokens: int, steps: int, seconds: float, used: Usage, forward_s: float) -> dict[str, Any]:
    each = 1e6 / tokens
    return {
        "tokens_per_s": tokens / seconds,
        "tokens_a_message": tokens / steps,
        "us_a_token": {
            **{role: each * spent for role, spent in used.processes.items()},
            **{f"{role}:{name}": each * spent for (role, name), spent in used.threads.items()},
            "forward": each * forward_s,
        },
    }


def _figures(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds."""
    costs = {
        name: round(median(sample["us_a_token"].get(name, 0.0) for sample in samples), 2)
        for name in sorted({name for sample in samples for name in sample["us_a_token"]})
    }
    return {
        "tokens_per_s": round(median(sample["tokens_per_s"] for sample in samples)),
        "tokens_per_s_each_round": [round(sample["tokens_per_s"]) for sample in samples],
        "tokens_a_message": round(median(sample["tokens_a_message"] for sample in samples), 1),
        "us_a_token": {name: us for name, us in costs.items() if us >= _LEAST_US},
    }


if __name__ == "__main__":
    main()
