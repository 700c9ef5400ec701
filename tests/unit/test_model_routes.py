"""Routes: the contents of the file, which model answers a call, and what happens where a model cannot answer."""

import asyncio
from collections import Counter

import pytest

from headrace.clients import CLIENT, POLICY
from headrace.errors import (
    ForbiddenError,
    HopBrokenError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    OverloadedError,
    StartupError,
)
from headrace.files import replace_file
from headrace.rpc.server.call_context import CallContext, ServedModel
from headrace_transformer.models.models import RelayedModel, TextModel
from headrace_transformer.predictors.discovery.replicas import LOADING, READY, ModelState
from headrace_transformer.routing.router import CHOSEN_MODEL, Router
from headrace_transformer.routing.routes import parse_routes
from tests.waiting import until

CANARY = """
chat: {model: stable}
stable:
  split:
  - {model: stable, weight: 90}
  - {model: next, weight: 10}
  - {model: hidden, weight: 0}
  fallback: [small, {model: last, version: 2}]
"""


class Catalogue:
    """Models by name, or the error that looking one up raises."""

    def __init__(self, **models):
        self.models = models
        self.changed = asyncio.Event()

    @property
    def states(self):
        return {
            name: ModelState(READY if isinstance(model, TextModel) else LOADING) for name, model in self.models.items()
        }

    direct_names = ("stable", "other")
    ready = True

    def can_answer(self, name):
        return self.ready

    def lists(self, name):
        return name in self.models

    def find(self, name, version=""):
        model = self.models.get(name) or NotFoundError(f"no model {name!r}")
        if isinstance(model, Exception):
            raise model
        return model

    async def found_in_time(self, find, deadline):
        while True:
            try:
                return find()
            except NotReadyError:
                await self.changed.wait()

    def notify(self):
        self.changed.set()
        self.changed = asyncio.Event()

    def as_text(self, model):
        return model


def text_model(name):
    return TextModel(name, tokenizer=None, defaults=None, limits=None)


def a_router(tmp_path, text=CANARY, lacks=(), **models):
    """A router over text models, of which `lacks` have no predictor at the moment."""
    path = tmp_path / "routes.yaml"
    path.write_text(text)
    known = {name: text_model(name) for name in ("stable", "next", "hidden", "small", "last", "other")}
    catalogue = Catalogue(**known | models)
    return Router(catalogue, path, lambda name: name not in lacks), catalogue


def a_call(**headers):
    return CallContext("test", "r", tuple((name.replace("_", "-"), value) for name, value in headers.items()))


async def answered(router, name, call=None, version=""):
    return (await router.wait_for(name, version, call or a_call())).model.name


async def served(router, name, call, version=""):
    return (await router.wait_for(name, version, call)).served


LOADS = NotReadyError("loads", hop="predictor")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("- a", "is not a mapping"),
        ("a: {model: b", "is not YAML, line 1"),
        ("a: {}", "a.split: is missing"),
        ("a: {model: b, split: [c]}", "a: has a model or a split, not both"),
        ("a: {split: []}", "a.split: Tuple should have at least 1 item"),
        ("a: {split: [{model: b, weight: -1}]}", "a.split.0.weight: must be at least 0"),
        ("a: {split: [{model: b, weight: 0}]}", "a: a split needs a weight above 0"),
        ("a: {split: [{model: b, weight: .nan}]}", "a.split.0.weight: must be a finite number"),
        ("a: {model: b, fallbacks: [c]}", "a.fallbacks: unknown field"),
        ("a: {model: b, shadow: c}", "a.shadow: unknown field"),
        ("a: {model: ''}", "a.split.0.model: must not be empty"),
        ("'': {model: b}", "must not be empty"),
    ],
)
def test_the_error_of_an_unusable_file_names_the_place(text, fault):
    with pytest.raises(ValueError, match=r".") as raised:
        parse_routes(text)
    assert fault in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_empty_file_has_no_routes():
    assert parse_routes("") == {}


def test_a_file_is_read_into_routes():
    routes = parse_routes(CANARY)
    assert [target.served for target in routes["chat"].split] == [ServedModel("stable")]
    assert list(map(str, routes["stable"].targets)) == ["stable", "next", "hidden", "small", "last:2"]


def test_an_unusable_file_at_the_start_is_a_startup_error(tmp_path):
    with pytest.raises(StartupError, match="is not a mapping"):
        a_router(tmp_path, "- a")


async def test_a_name_without_a_route_is_the_name_of_a_model(tmp_path):
    router, _ = a_router(tmp_path)
    call = a_call()
    assert await answered(router, "other", call) == "other"
    assert (await served(router, "other", call), call.routed) == ("", {})
    with pytest.raises(NotFoundError):
        await answered(router, "nobody")


async def test_an_alias_leads_to_the_model_and_never_to_another_route(tmp_path):
    router, _ = a_router(tmp_path)
    call = a_call()
    assert {await answered(router, "chat") for _ in range(50)} == {"stable"}
    assert await served(router, "chat", call) == "stable"


async def test_a_split_goes_by_weight(tmp_path):
    router, _ = a_router(tmp_path)
    drawn = Counter([await answered(router, "stable") for _ in range(2000)])
    assert drawn.keys() == {"stable", "next"}
    assert 120 < drawn["next"] < 290  # 200 expected; 6 standard deviations are 80.


async def test_a_call_keeps_the_model_of_its_route(tmp_path):
    router, _ = a_router(tmp_path)
    for _ in range(50):
        call = a_call()
        first = await answered(router, "stable", call)
        assert {await answered(router, "stable", call.with_id("x")) for _ in range(20)} == {first}


@pytest.mark.parametrize("wanted", ["stable", "next", "hidden", "small", "last", "last:2"])
async def test_a_header_chooses_a_model_of_the_route(tmp_path, wanted):
    router, _ = a_router(tmp_path)
    call = a_call(**{CHOSEN_MODEL: wanted})
    answering = await router.wait_for("stable", "", call)
    assert answering.model.name == wanted.partition(":")[0]
    # A call that names a model gets no other.
    assert answering.wait_s is None
    with pytest.raises(NotReadyError):
        router.fall_back(answering, call, LOADS)


async def test_a_header_that_names_no_model_of_the_route_is_refused(tmp_path):
    router, _ = a_router(tmp_path)
    with pytest.raises(InvalidRequestError, match="none of the models behind 'stable'"):
        await answered(router, "stable", a_call(**{CHOSEN_MODEL: "other"}))
    assert await answered(router, "other", a_call(**{CHOSEN_MODEL: "stable"})) == "other"


async def test_a_request_for_a_version_gets_that_version(tmp_path):
    text = "m: {split: [{model: m, version: 1, weight: 99}, {model: m, version: 2, weight: 1}]}"
    router, _ = a_router(tmp_path, text, m=text_model("m"))
    for version in ("1", "2"):
        assert await served(router, "m", a_call(), version) == f"m:{version}"
    for headers in ({}, {CHOSEN_MODEL: "m:1"}):
        with pytest.raises(NotFoundError, match="model 'm' has no version '3'"):
            await answered(router, "m", a_call(**headers), version="3")
    call = a_call(**{CHOSEN_MODEL: "m"})
    router, _ = a_router(tmp_path, "m: {split: [m, {model: n, version: 2, weight: 0}]}", m=text_model("m"))
    assert await served(router, "m", call, "2") == "m:2"


async def test_a_version_without_weight_answers_requests_that_name_it(tmp_path):
    text = "m: {split: [{model: m, version: 1}, {model: m, version: 2, weight: 0}]}"
    router, _ = a_router(tmp_path, text, m=text_model("m"))
    assert await served(router, "m", a_call(), "2") == "m:2"


async def test_a_model_that_is_not_ready_is_passed_over(tmp_path):
    for lacks, missing in (
        (("stable", "next"), {}),
        ((), {"stable": NotReadyError("loads"), "next": NotFoundError("gone")}),
    ):
        router, _ = a_router(tmp_path, lacks=lacks, **missing)
        assert {await answered(router, "stable") for _ in range(20)} == {"small"}


async def test_where_no_model_is_ready_the_chosen_one_is_waited_for(tmp_path):
    everyone = ("stable", "next", "hidden", "small", "last")
    router, _ = a_router(tmp_path, lacks=everyone)
    assert await answered(router, "stable", a_call(**{CHOSEN_MODEL: "hidden"})) == "hidden"
    assert {await answered(router, "stable") for _ in range(500)} == {"stable", "next"}


async def test_a_model_that_loads_is_waited_for_and_one_that_is_gone_is_not(tmp_path):
    loads, gone = NotReadyError("loads"), NotFoundError("gone")
    router, catalogue = a_router(tmp_path, "m: {model: a, fallback: [b]}", a=gone, b=loads)
    waiting = asyncio.create_task(answered(router, "m"))
    await asyncio.sleep(0)
    catalogue.models["b"] = text_model("b")
    catalogue.notify()
    assert await waiting == "b"
    catalogue.models["b"] = gone
    with pytest.raises(NotFoundError, match="no model behind 'm' is loaded"):
        await answered(router, "m")


async def test_a_model_that_fails_gives_way_to_each_of_the_others_once(tmp_path):
    router, _ = a_router(tmp_path)
    call = a_call()
    answering = await router.wait_for("stable", "", call)
    assert answering.wait_s == 1.0
    seen = []
    while answering.others:
        answering = router.fall_back(answering, call, LOADS)
        seen.append((answering.model.name, answering.wait_s))
    assert seen == [("small", 1.0), ("last", None)]
    with pytest.raises(NotReadyError, match="loads"):
        router.fall_back(answering, call, LOADS)
    assert await served(router, "stable", call) == "last:2"


@pytest.mark.parametrize(
    "error",
    [
        OverloadedError("the key's minute is used up"),
        HopBrokenError("died", hop="predictor"),
        InvalidRequestError("bad", hop="predictor"),
        NotReadyError("this service drains"),
    ],
)
async def test_an_error_that_every_model_would_give_is_passed_on(tmp_path, error):
    router, _ = a_router(tmp_path)
    call = a_call()
    answering = await router.wait_for("stable", "", call)
    with pytest.raises(type(error)) as raised:
        router.fall_back(answering, call, error)
    assert raised.value is error


async def test_an_answer_that_weights_have_begun_stays_with_them(tmp_path):
    router, _ = a_router(tmp_path)
    call = a_call()
    answering = await router.resolve("stable", "", call, lambda model: model == "hidden")
    assert (answering.served, await served(router, "stable", call)) == ("hidden", "hidden")
    with pytest.raises(NotReadyError):
        router.fall_back(answering, call, LOADS)
    assert await served(router, "stable", a_call()) != "hidden"


async def test_a_model_of_another_kind_does_not_take_over(tmp_path):
    router, _ = a_router(tmp_path, "m: {model: stable, fallback: [tensors]}", tensors=RelayedModel("tensors"))
    call = a_call()
    answering = await router.wait_for("m", "", call)
    with pytest.raises(NotReadyError):
        router.fall_back(answering, call, LOADS)


async def test_keys_are_for_the_names_that_requests_use(tmp_path):
    router, _ = a_router(tmp_path)
    headers = {CLIENT: "alice", POLICY: '{"models": ["chat"]}'}
    assert await answered(router, "chat", a_call(**headers)) == "stable"
    with pytest.raises(ForbiddenError):
        await answered(router, "stable", a_call(**headers))


def test_the_names_are_those_of_models_and_of_routes_behind_which_there_is_one(tmp_path):
    router, catalogue = a_router(tmp_path)
    assert router.names == [*catalogue.models, "chat"]
    router, catalogue = a_router(tmp_path, "chat: {model: nobody}")
    assert router.names == [*catalogue.models]


def test_a_model_that_has_a_route_is_not_called_directly(tmp_path):
    router, _ = a_router(tmp_path)
    assert router.direct_names == ["other"]


async def test_a_changed_file_takes_effect_and_a_broken_one_does_not(tmp_path, caplog):
    router, _ = a_router(tmp_path, "m: {model: stable}")
    path = tmp_path / "routes.yaml"
    following = asyncio.create_task(router.follow())
    try:
        begun = a_call()
        assert await answered(router, "m", begun) == "stable"
        replace_file(path, "m: {model: next}")
        await until(lambda: answered(router, "m"), holds="next".__eq__)
        replace_file(path, "m: {")
        await until(lambda: "is not YAML" in caplog.text)
        assert await answered(router, "m") == "next"
        assert await answered(router, "m", begun) == "stable"
    finally:
        following.cancel()
