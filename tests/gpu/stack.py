"""Predictor and transformer as users start them: streams, the death of an engine, cancels. gRPC without the gateway.

The storyteller in fp32 with PREDICTOR_EXACT, so that resumed answers are the undisturbed ones. The streams are paced:
they last on any machine.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress

import psutil

from headrace.endpoints import steps_port
from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.gpu.report import Report, part_options
from tests.gpu.run import ROOT
from tests.support.steps_caller import calling
from tests.system.calls import channel, serves
from tests.waiting import until

_MODEL = "storyteller"
_STREAMS = 64
_TOKENS, _PACE = 60, 20
_START_S, _ANSWER_S, _CANCEL_S = 120.0, 60.0, 20.0
_HOST = "127.0.0.1"


def main() -> None:
    options = part_options()
    asyncio.run(_measure(options.device, Report(options.report)))


async def _measure(device: str, report: Report) -> None:
    began = time.perf_counter()
    async with _running(device) as (predictor, port, target), channel(target) as open_channel:
        await until(lambda: serves(f"{_HOST}:{port}", "ready"), _START_S)
        report.figure("seconds to start", time.perf_counter() - began)
        stub = headrace_pb2_grpc.TextGenerationStub(open_channel)
        answer = await _Stream(stub, 0, pace=0).run()
        report.promise("a stream has all its tokens", len(answer.ids), _TOKENS)
        report.figure("ms to a stream's first token", 1e3 * answer.first_s)

        began = time.perf_counter()
        undisturbed = await _all(_Stream(stub, seed, pace=0) for seed in range(_STREAMS))
        report.figure(f"tokens/s of {_STREAMS} streams", _STREAMS * _TOKENS / (time.perf_counter() - began))

        streams = [_Stream(stub, seed) for seed in range(_STREAMS)]
        running = asyncio.create_task(_all(streams))
        await until(lambda: all(stream.ids for stream in streams), _ANSWER_S)
        (engine,) = _engines(predictor)
        unfinished = sum(len(stream.ids) < _TOKENS for stream in streams)
        began = time.perf_counter()
        engine.kill()
        resumed = await running
        report.figure("seconds from the death to the last answer's end", time.perf_counter() - began)
        same = sum(a.ids == b.ids for a, b in zip(resumed, undisturbed, strict=True))
        report.promise("answers as undisturbed, the engine killed under them", same, _STREAMS)
        report.promise("streams that ran when it was killed", unfinished, _STREAMS)
        report.promise("another engine serves", int([engine.pid] != [one.pid for one in _engines(predictor)]), 1)

        streams = [_Stream(stub, seed, tokens=900) for seed in range(_STREAMS)]
        running = asyncio.create_task(_all(streams))
        await until(lambda: all(stream.ids for stream in streams), _ANSWER_S)
        for stream in streams:
            stream.cancel()
        await asyncio.wait([running])
        async with calling(steps_port(port)) as caller:
            await until(lambda: any(message.HasField("loads") for message in caller.messages), _CANCEL_S)
            with suppress(AssertionError):
                await until(lambda: not caller.load().running and not caller.load().waiting, _CANCEL_S)
            left = caller.load().running + caller.load().waiting
            report.promise("cancelled streams that left the engine", _STREAMS - left, _STREAMS)


class _Stream:
    """One call; `ids` are its tokens so far."""

    def __init__(
        self, stub: headrace_pb2_grpc.TextGenerationStub, seed: int, *, pace: int = _PACE, tokens: int = _TOKENS
    ) -> None:
        self.ids: list[int] = []
        self.first_s = 0.0
        self._began = time.perf_counter()
        request = headrace_pb2.GenerateRequest(
            model=_MODEL,
            prompt=f"Once upon a time there was a fox, number {seed}",
            max_tokens=tokens,
            ignore_eos=True,
            seed=seed,
            temperature=0.8 if seed % 2 else 0,
            pace=pace,
        )
        self._call = stub.Generate(request, timeout=_ANSWER_S)

    async def run(self) -> "_Stream":
        async for response in self._call:
            self.first_s = self.first_s or time.perf_counter() - self._began
            self.ids += response.token_ids
        return self

    def cancel(self) -> None:
        self._call.cancel()


async def _all(streams: object) -> list[_Stream]:
    return list(await asyncio.gather(*(stream.run() for stream in streams)))


def _engines(predictor: int) -> list[psutil.Process]:
    """The predictor's engine processes: children of its host."""
    return [engine for host in psutil.Process(predictor).children() for engine in host.children()]


@asynccontextmanager
async def _running(device: str) -> AsyncIterator[tuple[int, int, str]]:
    """The predictor's process id and port, and the transformer's address."""
    port, transformer, http = _free_ports()
    address = f"{_HOST}:{port}"
    models = f"{_MODEL}={ROOT / 'models' / _MODEL}"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as processes:
        shared = {"MODELS": models, "PREDICTOR_LOG_LEVEL": "WARNING", "TRANSFORMER_LOG_LEVEL": "WARNING"}
        own = {"PORT": port, "METRICS_PORT": 0, "DEVICE": device, "DTYPE": "fp32", "PAYLOAD_LOG": "off"}
        own |= {"PAYLOAD_SPOOL": f"{folder}/predictor", "MAX_RUNNING": _STREAMS, "EXACT": "true"}
        predictor = _start("predictor", shared | {f"PREDICTOR_{name}": str(value) for name, value in own.items()})
        processes.callback(_end, predictor)
        own = {"PORT": transformer, "HTTP_PORT": http, "METRICS_PORT": 0, "PREDICTOR": address, "PAYLOAD_LOG": "off"}
        own |= {"PREDICTOR_REPLICAS": address, "PAYLOAD_SPOOL": f"{folder}/transformer"}
        text = _start("transformer", shared | {f"TRANSFORMER_{name}": str(value) for name, value in own.items()})
        processes.callback(_end, text)
        await until(lambda: serves(f"{_HOST}:{transformer}"), _START_S)
        yield predictor.pid, port, f"{_HOST}:{transformer}"


def _start(service: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen((sys.executable, "-m", f"headrace_{service}"), env=os.environ | environment, cwd=ROOT)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_ports() -> tuple[int, int, int]:
    """Those of the predictor, whose fourth after it is free too, and of the transformer."""
    while True:
        with ExitStack() as bound:
            probes = [bound.enter_context(socket.socket()) for _ in range(4)]
            for probe in probes[:3]:
                probe.bind((_HOST, 0))
            ports = [probe.getsockname()[1] for probe in probes[:3]]
            try:
                probes[3].bind((_HOST, steps_port(ports[0])))
            except OSError:
                continue
            return ports[0], ports[1], ports[2]


if __name__ == "__main__":
    main()
