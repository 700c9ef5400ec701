"""Adapters are loaded into the engine of their base, as models of their own, and return when the engine is replaced."""

import asyncio
import copy
import json
import os
import signal
from contextlib import asynccontextmanager

import pytest

from headrace.errors import InvalidRequestError, NotReadyError
from headrace.models.sources import parse_models
from headrace.sampling import SamplingParameters
from headrace_predictor.repository.repository import ModelRepository, State
from headrace_predictor.settings import PredictorSettings
from tests.model.fakes import read_all
from tests.random_adapters import merge, save_random_adapter
from tests.random_models import greedy, save_random_model
from tests.support.requests import submission
from tests.waiting import until
from tests.zoo import VOCABULARY

PROMPT = [(7 * i + 1) % VOCABULARY for i in range(70)]


class Folders:
    """A base and adapters of it, and the greedy answers of the models that result from merging them."""

    def __init__(self, folder):
        self.folder = folder
        self.base = save_random_model("llama", folder / "llama")
        self.expected = {"base": greedy(self.base, PROMPT, 12)}

    def write(self, name, seed, base="base", **fields):
        weights = save_random_adapter(self.folder / name, self.base, base, seed, **fields)
        self.expected[name] = greedy(merge(copy.deepcopy(self.base), weights), PROMPT, 12)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = Folders(tmp_path_factory.mktemp("adapters"))
    made.write("poet", 1)
    made.write("cook", 2, base=str(made.folder / "llama"))
    return made


@pytest.fixture
def serve(engine_host, folders):
    @asynccontextmanager
    async def start(models, **settings):
        async def report(ready): ...

        sources = parse_models(models.replace("=", f"={folders.folder}/"))
        given = {"device": "cpu", "threads": 1, "kv_cache_memory": "1MiB", "drain_s": 5.0} | settings
        repository = ModelRepository(
            PredictorSettings(models=sources, model_repository=folders.folder, **given), report, engine_host
        )
        try:
            await repository.load_all()
            yield repository
        finally:
            await repository.close()

    return start


def submit(repository, name, tokens=12, pace=0.0):
    model = repository.get(name).model
    sampling = SamplingParameters(temperature=0, max_tokens=tokens, ignore_eos=True, seed=0, pace=pace)
    return model.engine.submit(submission("r", list(PROMPT), sampling, adapter=model.loaded.adapter))


async def answer(repository, name):
    """The tokens of a prompt, and how many of the prompt's came from the cache."""
    ids, chunks = await read_all(submit(repository, name))
    return ids, chunks[-1].usage.cached_tokens


async def test_adapters_and_their_base_answer_at_once_as_merged_models_and_share_no_prefix(serve, folders):
    async with serve("poet=poet,cook=cook,base=llama") as repository:
        engine = repository.get("base").model.engine
        assert repository.get("poet").model.engine is repository.get("cook").model.engine is engine
        names = ["base", "poet", "cook"] * 2
        together = await asyncio.gather(*(answer(repository, name) for name in names))
        for name, (ids, _) in zip(names, together, strict=True):
            assert ids == folders.expected[name]
        assert len({tuple(ids) for ids in folders.expected.values()}) == len(folders.expected)
        # The second of each model finds the blocks of the first, and no other's.
        assert sorted(cached for _, cached in together) == [0, 0, 0, 64, 64, 64]
        fingerprints = {repository.get(name).fingerprint for name in names}
        assert len(fingerprints) == 3
        # The engine is counted once, with its base.
        assert list(repository.engines.loads()) == ["base"]


async def test_an_adapter_is_loaded_again_with_new_files_and_unloaded_while_others_answer(serve, folders):
    folders.write("changing", 3)
    async with serve("base=llama") as repository:
        for seed in (3, 4):
            folders.write("changing", seed)
            (folders.folder / "changing" / "generation_config.json").write_text(json.dumps({"max_new_tokens": seed}))
            await repository.load("changing")
            assert (await answer(repository, "changing"))[0] == folders.expected["changing"]
            model = repository.get("changing").model
            assert (
                model.description.parameters["max_new_tokens"] == str(model.loaded.limits.max_new_tokens) == str(seed)
            )
            assert (await answer(repository, "base"))[0] == folders.expected["base"]
        slot = submit(repository, "changing", tokens=40, pace=20)
        await slot.read()
        await repository.unload("changing")
        # A sequence in flight keeps the adapter; the repository would have waited for a call.
        ids, _ = await read_all(slot)
        assert len(ids) > 12
        with pytest.raises(NotReadyError, match="the adapter was unloaded"):
            await read_all(
                repository.get("base").model.engine.submit(
                    submission("r", [5], SamplingParameters(max_tokens=2, seed=0), adapter=2)
                )
            )
        assert (await answer(repository, "base"))[0] == folders.expected["base"]


async def test_adapters_return_with_the_next_engine(serve, folders):
    async with serve("base=llama,poet=poet,cook=cook") as repository:
        fingerprint = repository.get("poet").fingerprint
        os.kill(repository.get("base").model.engine.pid, signal.SIGKILL)
        await until(lambda: not repository.ready)
        await until(lambda: repository.ready)
        for name in ("poet", "base", "cook"):
            assert (await answer(repository, name))[0] == folders.expected[name]
        assert repository.get("poet").fingerprint == fingerprint
        assert repository.engines.restarts() == {"base": 1}


async def test_a_base_is_kept_while_it_has_adapters_unless_they_are_unloaded_with_it(serve):
    async with serve("base=llama,poet=poet,cook=cook") as repository:
        for change in (repository.load, repository.unload):
            with pytest.raises(InvalidRequestError, match="'base' is the base of the adapters poet, cook; unload"):
                await change("base")
        await repository.unload("cook")
        await repository.unload("base", with_adapters=True)
        states = {row.name: row.state for row in await repository.index()}
        assert [states[name] for name in ("base", "poet", "cook")] == [State.UNAVAILABLE] * 3
        with pytest.raises(InvalidRequestError, match=r"model poet: its base 'base' is not loaded .*models here: none"):
            await repository.load("poet")
        await repository.load("base")
        await repository.load("poet")
        assert repository.is_ready("poet")


async def test_a_model_has_a_maximum_of_adapters_and_loading_one_again_does_not_count(serve, folders):
    async with serve("base=llama,poet=poet", max_adapters=1) as repository:
        with pytest.raises(InvalidRequestError, match="base has 1 adapters, the maximum"):
            await repository.load("cook")
        await repository.load("poet")
        await repository.unload("poet")
        await repository.load("cook")
        assert (await answer(repository, "cook"))[0] == folders.expected["cook"]


@pytest.mark.parametrize("architecture", ["doge", "t5"])
async def test_a_base_of_another_runner_refuses_adapters(serve, folders, architecture):
    model = save_random_model(architecture, folders.folder / architecture)
    save_random_adapter(folders.folder / f"of-{architecture}", model, "other")
    async with serve(f"other={architecture}") as repository:
        with pytest.raises(InvalidRequestError, match=r"its base other has the runner .*, which supports no adapters"):
            await repository.load(f"of-{architecture}")
        assert repository.ready
