"""An engine in its own process has the same tokens, refusals, cancels, times and load. Its death is noticed."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress

import numpy as np
import psutil
import pytest

from headrace.errors import (
    HopBrokenError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    StartupFault,
)
from headrace.sampling import SamplingParameters
from headrace_predictor.engine.interface import EngineProcessError
from headrace_predictor.engine_process import launch
from headrace_predictor.engine_process.engine_host import EngineHost
from headrace_predictor.engine_process.launch import launch_engine
from headrace_predictor.generation.loading import load_generation
from headrace_predictor.settings import PredictorSettings
from tests.model.fakes import read_all
from tests.random_models import save_random_model
from tests.support.in_process_engine import submit
from tests.support.requests import submission
from tests.waiting import until

# Longer than any test, on every machine; others may run in its place.
ENDLESS = {"max_tokens": 200, "pace": 5}


def request(prompt=(5, 6, 7), name="r", **fields):
    sampling = {"seed": 3, "max_tokens": 12, "ignore_eos": True}
    sampling |= {key: fields.pop(key) for key in list(fields) if key in SamplingParameters.model_fields}
    return submission(name, list(prompt), SamplingParameters(**sampling), **fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    save_random_model("llama", folder)
    return folder


def settings(**given):
    return PredictorSettings(**{"device": "cpu", "threads": 1, "kv_cache_memory": "1MiB", **given})


@pytest.fixture
def engine_of(engine_host, folder):
    @asynccontextmanager
    async def start(**given):
        loaded = await launch_engine(engine_host, "llama", folder, True, settings(**given))
        try:
            yield loaded.engine
        finally:
            await asyncio.to_thread(loaded.engine.close)

    return start


@pytest.fixture(scope="module")
def in_process(folder):
    import torch

    loaded = load_generation("llama", folder, True, settings(), torch.device("cpu"))
    yield loaded.engine
    loaded.engine.close()


ASKED = [
    {"temperature": 0},
    {"temperature": 0.9, "logprobs": True, "top_logprobs": 3},
    {"output_ids": [9, 8], "moved": True},
    {"prompt_logprobs": 2},
    {"prompt": (5,), "prompt_logprobs": 2},
    {"chunk_tokens": 5},
    {"output_ids": [9] * 12},
]


async def test_answers_equal_those_of_an_engine_in_this_process(engine_of, in_process):
    async with engine_of() as engine:
        for fields in ASKED:
            await check_equal(engine, in_process, fields)


async def check_equal(engine, in_process, fields):
    ids, chunks = await read_all(engine.submit(request(**fields)))
    expected_ids, expected = await read_all(submit(in_process, request(**fields)))
    assert ids == expected_ids
    assert chunks[-1].finish_reason == expected[-1].finish_reason
    assert vars(chunks[-1].usage) | {"cached_tokens": 0} == vars(expected[-1].usage) | {"cached_tokens": 0}
    chosen, theirs = ([p.chosen for chunk in each for p in chunk.logprobs] for each in (chunks, expected))
    assert chosen == pytest.approx(theirs)
    tops, theirs = ([p.top for chunk in each for p in chunk.logprobs] for each in (chunks, expected))
    assert [[token for token, _ in top] for top in tops] == [[token for token, _ in top] for top in theirs]
    prompt, other = chunks[0].prompt, expected[0].prompt
    assert (prompt is None) == (other is None)
    if prompt is not None:
        np.testing.assert_array_equal(prompt.top_ids, other.top_ids)
        np.testing.assert_allclose(prompt.chosen, other.chosen, rtol=1e-5)


async def test_times_and_figures_are_the_engines_own(engine_of):
    async with engine_of() as engine:
        begun = time.monotonic()
        slot = engine.submit(request())
        await read_all(slot)
        line = slot.timeline
        assert begun <= line.submitted <= line.started <= line.first_token <= line.ended <= time.monotonic()
        assert (engine.statistics.tokens, engine.load.running, engine.load.waiting) == (12, 0, 0)
        assert (engine.statistics.succeeded, engine.statistics.ended) == (1, 1)
        assert engine.statistics.steps >= 12


async def test_a_refusal_of_the_engine_is_the_slots_error_without_times(engine_of, slow_models):
    async with engine_of(max_running=1, max_waiting=0, kv_cache_memory="512KiB", max_context=256) as engine:
        slot = engine.submit(request(prompt=[5] * 200, max_tokens=10_000))
        with pytest.raises(InvalidRequestError, match="the cache holds"):
            await slot.read()
        assert not slot.timeline.submitted
        long = engine.submit(request(max_tokens=200))
        await until(lambda: engine.load.running)
        slot = engine.submit(request())
        with pytest.raises(OverloadedError, match="the queue is full: 0 wait") as raised:
            await slot.read()
        assert raised.value.retry_after_ms
        long.cancel()
        await until(lambda: engine.statistics.cancelled == 1 and not engine.load.blocks_in_use)


async def test_a_death_blames_running_requests_and_not_waiting_ones(engine_of, slow_models):
    async with engine_of(max_running=1) as engine:
        running = engine.submit(request(max_tokens=200))
        await running.read()
        waiting = engine.submit(request())
        await until(lambda: engine.load.waiting)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineProcessError, match="the engine of model llama died"):
            await engine.died()
        for slot, error in ((running, HopBrokenError), (waiting, NotReadyError)):
            with pytest.raises(error):
                await read_all(slot)
        with pytest.raises(NotReadyError):
            engine.submit(request())


async def test_a_process_without_progress_is_killed(engine_of, monkeypatch):
    monkeypatch.setattr(launch, "_SILENCE_S", 1.0)
    async with engine_of() as engine:
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(EngineProcessError):
            await engine.died()


async def test_a_close_ends_the_process_and_the_requests_in_flight(engine_of, engine_host):
    async with engine_of() as engine:
        slot = engine.submit(request(**ENDLESS))
        await slot.read()
        await asyncio.to_thread(engine.close)
        with pytest.raises(NotReadyError):
            await read_all(slot)
        with suppress(psutil.NoSuchProcess):
            psutil.Process(engine.pid).wait(10)


async def test_a_host_that_was_started_before_makes_the_first_engine():
    host = EngineHost()
    host.start()
    pid = host.pid
    host.start()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = await host.start_engine(theirs)
        assert host.pid == pid == psutil.Process(engine).ppid()
        await host.close()


async def test_an_idle_host_ends_and_one_with_an_engine_stays():
    host = EngineHost()
    host.start()
    first = psutil.Process(host.pid)
    await host.close_idle()
    assert not host.pid
    assert not first.is_running()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = await host.start_engine(theirs)
        await host.close_idle()
        assert psutil.pid_exists(engine)
        await host.close()


async def test_the_log_has_the_reason_why_a_host_failed(monkeypatch, caplog):
    monkeypatch.setattr(f"{EngineHost.__module__}._START_S", 0.01)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(StartupFault, match="see the log"):
        await EngineHost().start_engine(theirs)
    assert "the engine host failed: TimeoutError" in caplog.text


# Prints where kernels are kept, and why nowhere once others may write there, which Numba executes, or it is a link.
KERNELS = """
import sys
from pathlib import Path
from headrace_predictor.engine.cpu import compiled
print(compiled.config.CACHE_DIR)
own = Path(sys.argv[1])
def again():
    compiled.config.CACHE_DIR = ""
    try:
        print(compiled._folder())
    except OSError as error:
        print(error)
own.chmod(0o777)
again()
own.rename(own.with_name("others"))
own.symlink_to(own.with_name("others"))
own.chmod(0o700)
again()
"""


def test_kernels_are_kept_in_tmpdir_where_the_home_cannot_be_written(tmp_path):
    # Not even root can write there.
    environment = os.environ | {"HOME": "/proc", "NUMBA_CACHE_DIR": "", "TMPDIR": str(tmp_path)}
    own = tmp_path / f"headrace-kernels-{os.getuid()}"
    command = [sys.executable, "-c", KERNELS, str(own)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    first, shared, linked = done.stdout.splitlines()
    assert first.startswith(f"{own}/")
    assert "can be kept neither" in shared
    assert "can be kept neither" in linked


async def test_the_host_uses_one_thread(engine_of, engine_host):
    async with engine_of():
        assert psutil.Process(engine_host.pid).num_threads() == 1
