"""Headrace's engine, loaded as in the predictor, with one task for each caller on uvloop.

Arguments after the folder are settings of the predictor, such as `max_gap_ms=20`.

`generate` counts the tokens that readers took from their slots. `long_prompt` and `outside_forward` are measured only
for this engine.
"""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import uvloop

from bench.statistics import quantile
from bench.workers.protocol import Command, Contender, Generation
from headrace.errors import HeadraceError
from headrace.sampling import SamplingParameters
from headrace_predictor.engine.state.slot import MergingSlot
from headrace_predictor.generation.loading import load_generation
from headrace_predictor.settings import PredictorSettings
from headrace_protos.steps_pb2 import Submission
from tests.support.in_process_engine import submit

_SETTLED_TOKENS = 16  # The tokens of each stream before gaps are measured.
_QUIET_TOKENS = 64  # The tokens of each stream in the window without the long prompt.
_AFTER_TOKENS = 2  # The later tokens of each stream, so that the gap in which the prefill ended is complete.
_WINDOW_TIMEOUT_S = 120.0


class _Stream:
    """One caller: submits, reads to the end, and records the times of chunks and tokens."""

    def __init__(self, slot: MergingSlot) -> None:
        self.slot = slot
        self.ids: list[int] = []
        self.times: list[float] = []
        self.finished = False

    async def read_all(self, progress: asyncio.Event | None = None) -> None:
        while not self.finished:
            chunk = await self.slot.read()
            self.ids += chunk.output_ids
            if chunk.output_ids:
                self.times.append(time.perf_counter())
            self.finished = chunk.finish_reason is not None
            if progress is not None:
                progress.set()

    def gaps(self, start: float, end: float) -> list[float]:
        """The gaps between chunks that overlap a window."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False) if b > start and a < end]


class HeadraceEngine(Contender):
    """See the module."""

    packages = ("torch", "transformers", "uvloop")

    def __init__(self, folder: str, *arguments: str) -> None:
        torch.set_num_threads(1)
        changes: dict[str, Any] = {"dtype": "bf16"} | dict(argument.split("=") for argument in arguments)
        settings = PredictorSettings(device="cpu", threads=1, **changes)
        path = Path(folder)
        self._engine = load_generation(path.name, path, True, settings, torch.device("cpu")).engine
        self._loop = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._submitted = 0
        self.settings = {"max_running": settings.max_running, **changes, **self._engine.description}

    def own_commands(self) -> Mapping[str, Command]:
        return {"long_prompt": self.long_prompt, "outside_forward": self.outside_forward}

    def close(self) -> None:
        self._engine.close()
        self._loop.close()

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Generation:
        streams = self._loop.run(self._generate(prompts, new_tokens))
        return Generation([stream.ids for stream in streams], [stream.times[0] for stream in streams])

    async def _generate(self, prompts: list[list[int]], new_tokens: int) -> list[_Stream]:
        streams = [self._submit(prompt, new_tokens) for prompt in prompts]
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(stream.read_all())
        return streams

    def _submit(self, prompt: list[int], new_tokens: int) -> _Stream:
        self._submitted += 1
        sampling = SamplingParameters(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        sampling = sampling.resolved(self._engine.limits.room(len(prompt)))
        submission = Submission(
            request_id=f"bench-{self._submitted}", prompt_ids=prompt, sampling=sampling.model_dump_json().encode()
        )
        return _Stream(submit(self._engine, submission))

    def outside_forward(self, batches: list[list[list[int]]], new_tokens: int) -> Mapping[str, Any]:
        """The share of the steps' time outside of the model's forward pass."""
        # By name: an engine without these counters must not look like a slow one.
        before = self._forward_and_step_ns()
        for prompts in batches:
            self.generate(prompts, new_tokens)
        forward, step = (b - a for a, b in zip(before, self._forward_and_step_ns(), strict=True))
        return {"outside_forward": 1 - forward / step, "forward_s": forward / 1e9, "step_s": step / 1e9}

    def _forward_and_step_ns(self) -> tuple[int, int]:
        statistics: Any = self._engine.statistics
        return statistics.forward_ns, statistics.step_ns

    def long_prompt(self, prompts: list[list[int]], long_prompt: list[int], new_tokens: int) -> Mapping[str, Any]:
        """The gaps between tokens of running streams before and while a long prompt is prefilled."""
        return self._loop.run(self._long_prompt(prompts, long_prompt, new_tokens))

    async def _long_prompt(
        self, prompts: list[list[int]], long_prompt: list[int], new_tokens: int
    ) -> Mapping[str, Any]:
        streams = [self._submit(prompt, new_tokens) for prompt in prompts]
        progress = asyncio.Event()
        readers = [asyncio.create_task(stream.read_all(progress)) for stream in streams]

        async def each_has(more: int) -> float:
            wanted = [len(stream.ids) + more for stream in streams]
            async with asyncio.timeout(_WINDOW_TIMEOUT_S):
                while any(len(stream.ids) < least for stream, least in zip(streams, wanted, strict=True)):
                    progress.clear()
                    await progress.wait()
                    if any(stream.finished for stream in streams):
                        raise RuntimeError("a stream ended before the long prompt's prefill did; give more tokens")
            return time.perf_counter()

        try:
            quiet_start = await each_has(_SETTLED_TOKENS)
            quiet_end = await each_has(_QUIET_TOKENS)
            long_stream = self._submit(long_prompt, 1)
            async with asyncio.timeout(_WINDOW_TIMEOUT_S):
                await long_stream.read_all()
            prefilled = time.perf_counter()
            await each_has(_AFTER_TOKENS)
        finally:
            for stream in streams:
                stream.slot.cancel()
            ended = await asyncio.gather(*readers, return_exceptions=True)
        # A cancelled stream ends with a HeadraceError; any other error is a failure of the measurement.
        for outcome in ended:
            if isinstance(outcome, BaseException) and not isinstance(outcome, HeadraceError):
                raise outcome
        quiet = [gap for stream in streams for gap in stream.gaps(quiet_start, quiet_end)]
        busy = [gap for stream in streams for gap in stream.gaps(quiet_end, prefilled)]
        return {
            "first_token_ms": (prefilled - quiet_end) * 1e3,
            "gap_p50_ms": quantile(busy, 0.5) * 1e3,
            "gap_p99_ms": quantile(busy, 0.99) * 1e3,
            "tokens_per_s": len(streams) / mean(busy),
            "quiet_p50_ms": quantile(quiet, 0.5) * 1e3,
            "quiet_p99_ms": quantile(quiet, 0.99) * 1e3,
            "quiet_tokens_per_s": len(streams) / mean(quiet),
        }


create = HeadraceEngine
