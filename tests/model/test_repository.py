"""Models are loaded and unloaded by name while others are served: drained, freed, replaced, refused with a message."""

import asyncio
import concurrent.futures.thread
import os
import signal
import time
import weakref
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress

import numpy as np
import psutil
import pytest

from headrace.deadline import Deadline
from headrace.errors import (
    DeadlineError,
    DrainingError,
    HopBrokenError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    OverloadedError,
)
from headrace.oip.parameters import set_parameters
from headrace.oip.tensors import Tensor, add_input, decode_outputs
from headrace_predictor.engine.interface import EngineDeadError
from headrace_predictor.repository import entry, loading
from headrace_predictor.repository.repository import ModelRepository, State
from headrace_predictor.settings import PredictorSettings
from headrace_protos.inference_pb2 import ModelInferRequest
from tests.random_models import save_random_model
from tests.waiting import until

ANSWERS = """
import numpy as np
async def execute(request):
    return {"answer": np.array([ANSWER])}
"""
# Continues when the test lets it.
WAITS = """
import asyncio
import numpy as np
begun, go = [], asyncio.Event()
async def execute(request):
    begun.append(request.id)
    yield {"answer": np.array([0])}
    await go.wait()
    yield {"answer": np.array([1])}
"""
BLOCKS = """
import threading
import numpy as np
begun, go = [], threading.Event()
async def execute(request):
    begun.append(request.id)
    go.wait(60)
    return {"answer": np.array([0])}
"""
LOADS_SLOWLY = """
import pathlib, asyncio
async def load(folder):
    (folder / "begun").touch()
    while not (folder / "go").exists():
        await asyncio.sleep(0.005)
async def execute(request):
    return {}
"""


class Models:
    """Folders of Python models, and the repository that serves them."""

    def __init__(self, tmp_path, host):
        self.host = host
        self.folder = tmp_path / "repository"
        self.folder.mkdir()
        self.reported = []

    def write(self, name, code):
        (self.folder / name).mkdir(exist_ok=True)
        (self.folder / name / "model.py").write_text(code)
        return self.folder / name

    @asynccontextmanager
    async def serve(self, *configured, drain_s=5.0, **settings):
        async def report(ready):
            self.reported.append(ready)

        models = ",".join(f"{name}={self.folder / name}" for name in configured)
        repository = ModelRepository(
            PredictorSettings(
                MODELS=models, model_repository=self.folder, device="cpu", threads=1, drain_s=drain_s, **settings
            ),
            report,
            self.host,
        )
        try:
            yield repository
        finally:
            await repository.close()


@pytest.fixture
def models(tmp_path, engine_host):
    made = Models(tmp_path, engine_host)
    made.write("first", ANSWERS.replace("ANSWER]", "1]"))
    return made


async def ask(repository, name):
    message = ModelInferRequest(model_name=name, id="r")
    response = await repository.get(name).infer(message)
    return int(decode_outputs(response)["answer"].array[0])


async def states(repository):
    return {row.name: row.state for row in await repository.index()}


def variables(repository, name):
    return repository.get(name).model._code.execute.__globals__


async def test_a_load_of_a_loaded_model_takes_the_new_files_without_a_gap(models):
    async with models.serve("first") as repository:
        await repository.load_all()
        for answer in range(2, 5):
            models.write("first", ANSWERS.replace("ANSWER]", f"{answer}]"))
            loading = asyncio.create_task(repository.load("first"))
            while not loading.done():
                assert await ask(repository, "first") in (answer - 1, answer)
            await loading
            assert await ask(repository, "first") == answer
        assert models.reported == [True]


async def test_if_the_new_files_are_wrong_the_old_model_continues(models):
    async with models.serve("first") as repository:
        await repository.load_all()
        models.write("first", "1 / 0")
        with pytest.raises(InvalidRequestError, match=r"model first: .*line 1 cannot be imported: ZeroDivisionError"):
            await repository.load("first")
        assert await ask(repository, "first") == 1
        assert await states(repository) == {"first": State.READY}
        assert repository.ready


async def test_a_failed_load_gives_the_reason_and_other_models_are_served(models):
    models.write("broken", "1 / 0")
    (models.folder / "empty").mkdir()
    async with models.serve("first") as repository:
        await repository.load_all()
        with pytest.raises(InvalidRequestError, match="ZeroDivisionError"):
            await repository.load("broken")
        with pytest.raises(InvalidRequestError, match=r"no config\.json"):
            await repository.load("empty")
        reasons = {row.name: row.reason for row in await repository.index() if row.state is State.UNAVAILABLE}
        assert "ZeroDivisionError" in reasons["broken"]
        assert repository.ready
        with pytest.raises(NotFoundError):
            repository.get("broken")
        assert await ask(repository, "first") == 1
        models.write("broken", ANSWERS.replace("ANSWER]", "7]"))
        await repository.load("broken")
        assert await ask(repository, "broken") == 7


async def test_an_unload_lets_requests_in_flight_end_and_refuses_new_ones(models):
    models.write("waits", WAITS)
    async with models.serve("first", "waits") as repository:
        await repository.load_all()
        serving, own = repository.get("waits"), variables(repository, "waits")
        async with aclosing(serving.stream(ModelInferRequest(id="r"))) as responses:
            await anext(responses)
            unloading = asyncio.create_task(repository.unload("waits"))
            await until(lambda: not repository.is_ready("waits"))
            with pytest.raises(NotReadyError):
                repository.get("waits")
            assert (await states(repository))["waits"] is State.UNLOADING
            assert await ask(repository, "first") == 1
            own["go"]._loop.call_soon_threadsafe(own["go"].set)
            assert len([response async for response in responses]) == 1
        await unloading
        assert (await states(repository))["waits"] is State.UNAVAILABLE


@pytest.mark.parametrize("code", [WAITS, BLOCKS], ids=["code that waits", "code that blocks"])
async def test_requests_that_outlast_the_drain_end_as_unavailable(models, code):
    models.write("endless", code)
    async with models.serve("first", "endless", drain_s=0) as repository:
        await repository.load_all()
        own = variables(repository, "endless")
        endless = repository.get("endless")
        waiting = asyncio.create_task(_read_all(endless))
        await until(lambda: own["begun"])
        await repository.unload("endless")
        with pytest.raises(NotReadyError):
            await waiting
        with pytest.raises(NotReadyError, match="was unloaded"):
            await _read_all(endless)
        if code is BLOCKS:
            own["go"].set()


async def _read_all(serving):
    async with aclosing(serving.stream(ModelInferRequest(id="r"))) as responses:
        return [response async for response in responses]


async def test_an_unloaded_engine_leaves_neither_a_process_nor_memory(models, monkeypatch):
    run = concurrent.futures.thread._WorkItem.run

    def run_and_linger(item):  # As a thread of the pool may on a busy machine, with its work not yet finished.
        run(item)
        time.sleep(0.2)

    monkeypatch.setattr(concurrent.futures.thread._WorkItem, "run", run_and_linger)
    save_random_model("llama", models.folder / "llama")
    async with models.serve("first", kv_cache_memory="1MiB") as repository:
        await repository.load_all()
        for _ in range(2):
            await repository.load("llama")
            # A second load: there are never two of them at a time.
            await repository.load("llama")
            assert models.reported[-2:] == [False, True]
            engine = weakref.ref(repository.get("llama").model.engine)
            host = psutil.Process(models.host.pid)
            assert [process.pid for process in host.children()] == [engine().pid]
            await repository.unload("llama")
            assert engine() is None
            await until(lambda host=host: not host.children())


async def test_a_dead_engine_is_replaced_and_its_requests_end_with_its_error(models):
    save_random_model("llama", models.folder / "llama")
    async with models.serve("first", kv_cache_memory="1MiB") as repository:
        await repository.load_all()
        await repository.load("llama")
        death = asyncio.create_task(repository.engine_death())
        llama = repository.get("llama")
        undisturbed = await read_ids(llama, 20)
        with held(llama) as engine:
            in_flight = asyncio.create_task(read_ids(llama, 100))
            await until(lambda: llama._in_flight)
            os.kill(engine, signal.SIGKILL)
            with pytest.raises((HopBrokenError, NotReadyError)):
                await in_flight
        assert not repository.ready
        assert not repository.is_ready("llama")
        with pytest.raises(NotReadyError, match="the engine of model llama died"):
            repository.get("llama")
        assert await ask(repository, "first") == 1
        await until(lambda: repository.ready)
        assert await read_ids(repository.get("llama"), 20) == undisturbed
        assert repository.engines.restarts() == {"llama": 1}
        assert models.reported == [True, False, True]
        assert not death.done()
        death.cancel()


async def test_a_failed_replacement_is_repeated_and_the_index_has_the_reason(models, monkeypatch):
    monkeypatch.setattr(entry, "_FIRST_S", 0.05)
    save_random_model("llama", models.folder / "llama")
    config = models.folder / "llama" / "config.json"
    async with models.serve("llama", kv_cache_memory="1MiB") as repository:
        await repository.load_all()
        held_back = config.rename(config.with_suffix(".away"))
        os.kill(repository.get("llama").model.engine.pid, signal.SIGKILL)
        await until(lambda: "is started again" in repository._entries["llama"].reason)
        row = (await repository.index())[0]
        assert row.state is State.LOADING  # Not missing: it returns by itself.
        assert "llama" in row.reason
        with pytest.raises(NotReadyError, match="llama"):
            repository.get("llama")
        held_back.rename(config)
        await until(lambda: repository.ready)
        assert await read_ids(repository.get("llama"), 20)


async def test_a_model_whose_engine_is_replaced_can_be_unloaded(models):
    save_random_model("llama", models.folder / "llama")
    async with models.serve("first", "llama", kv_cache_memory="1MiB") as repository:
        await repository.load_all()
        os.kill(repository.get("llama").model.engine.pid, signal.SIGKILL)
        await until(lambda: not repository.ready)
        await repository.unload("llama")
        assert repository.ready
        with pytest.raises(NotFoundError):
            repository.get("llama")


async def test_the_death_of_the_host_replaces_it_and_every_engine(models):
    save_random_model("llama", models.folder / "llama")
    async with models.serve("llama", kv_cache_memory="1MiB") as repository:
        await repository.load_all()
        host = models.host.pid
        os.kill(host, signal.SIGKILL)
        await until(lambda: not repository.ready)
        await until(lambda: repository.ready)
        assert models.host.pid != host
        assert await read_ids(repository.get("llama"), 20)


async def test_loads_run_one_by_one_and_continue_if_their_caller_leaves(models):
    slow = models.write("slow", LOADS_SLOWLY)
    models.write("next", ANSWERS.replace("ANSWER]", "3]"))
    async with models.serve("first") as repository:
        await repository.load_all()
        with pytest.raises(DeadlineError, match="is still running"):
            await repository.load("slow", deadline=Deadline.after(0.01))
        await until((slow / "begun").exists)
        with pytest.raises(NotReadyError, match="loading"):
            repository.get("slow")
        behind = asyncio.create_task(repository.load("next"))
        await until(lambda: repository._entries.get("next"))
        assert (await states(repository)) == {"first": "READY", "slow": "LOADING", "next": "LOADING"}
        # The other models are served, and the server counts as ready.
        assert repository.ready
        assert await ask(repository, "first") == 1
        (slow / "go").touch()
        await behind
        assert (await states(repository)) == {"first": "READY", "slow": "READY", "next": "READY"}


async def test_too_many_loads_at_once_are_refused(models, monkeypatch):
    monkeypatch.setattr(loading, "_MAX_OPERATIONS", 3)
    slow = models.write("slow", LOADS_SLOWLY)
    async with models.serve("first") as repository:
        await repository.load_all()
        loads = [asyncio.create_task(repository.load("slow")) for _ in range(3)]
        await until((slow / "begun").exists)
        await until(lambda: len(repository._operations._tasks) == 3)
        with pytest.raises(OverloadedError, match="in progress"):
            await repository.load("slow")
        (slow / "go").touch()
        await asyncio.gather(*loads)


def is_reported_ready(repository, *names):
    """The readiness of ServerReady, ModelReady and the health name `ready`; the test fails unless they agree."""
    answers = {repository.ready, *(repository.is_ready(name) for name in names)}
    assert len(answers) == 1
    return answers.pop()


def generation(max_tokens):
    message = ModelInferRequest(model_name="llama", id="r")
    add_input(message, Tensor("input_ids", "INT64", np.array([5])))
    set_parameters(message.parameters, {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0})
    return message


async def read_ids(serving, max_tokens):
    ids = []
    async with aclosing(serving.stream(generation(max_tokens))) as responses:
        async for response in responses:
            ids += decode_outputs(response)["output_ids"].array.tolist()
    return ids


@pytest.mark.parametrize("drain", ["hand-back", "finish"])
async def test_a_drain_refuses_new_requests_and_lets_each_kind_end_in_its_own_way(models, drain):
    save_random_model("llama", models.folder / "llama")
    models.write("waits", WAITS)
    async with models.serve("first", "waits", drain=drain, kv_cache_memory="1MiB") as repository:
        await repository.load_all()
        await repository.load("llama")
        names = ("first", "waits", "llama")
        assert is_reported_ready(repository, *names)
        llama, own = repository.get("llama"), variables(repository, "waits")
        stays = asyncio.create_task(read_ids(llama, 100))
        waits = asyncio.create_task(_read_all(repository.get("waits")))
        await until(lambda: own["begun"] and llama.model.statistics.tokens > 4)
        draining = asyncio.create_task(repository.drain(60))
        await until(lambda: not repository.ready)
        assert not is_reported_ready(repository, *names)
        assert models.reported[-1] is False
        for name in names:
            with pytest.raises(DrainingError):
                repository.get(name)
        with pytest.raises(NotFoundError):
            repository.get("unheard of")
        with pytest.raises(DrainingError):
            await repository.load("first")
        assert repository.is_leaving == (drain == "hand-back")
        assert len(await stays) == 100
        assert not draining.done()
        own["go"]._loop.call_soon_threadsafe(own["go"].set)
        assert len(await waits) == 2
        await draining


@contextmanager
def held(serving):
    """Stops the process of a generating model; returns its id."""
    engine = serving.model.engine.pid
    os.kill(engine, signal.SIGSTOP)
    try:
        yield engine
    finally:
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGCONT)


async def test_after_the_death_of_a_model_in_this_process_nothing_is_ready(models):
    models.write("other", ANSWERS)
    async with models.serve("first", "other") as repository:
        await repository.load_all()
        assert is_reported_ready(repository, "first", "other")
        repository.get("other").model.thread._hangs.set()
        await until(lambda: not is_reported_ready(repository, "first", "other"))
        assert models.reported == [True, False]
        with pytest.raises(NotReadyError):
            repository.get("first")
        with pytest.raises(EngineDeadError):
            await repository.engine_death()


async def test_a_stopped_repository_has_no_operation_left(models):
    slow = models.write("slow", LOADS_SLOWLY)
    async with models.serve("first") as repository:
        await repository.load_all()
        loading = asyncio.create_task(repository.load("slow"))
        await until((slow / "begun").exists)
        await repository.close()
        with pytest.raises(NotReadyError, match="stopping"):
            await loading
        (slow / "go").touch()
