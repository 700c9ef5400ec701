"""An error has one meaning on every way in: status, hop, shape, when to come back; and the next call works.

INTERFACE's table of errors, row by row, as far as a row can be provoked.
"""

import asyncio
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import pytest_asyncio

from millrace_protos import inference_pb2 as pb
from millrace_protos import millrace_pb2
from tests.system.ask import ON_STREAM, Ask
from tests.system.calls import channel, http_request
from tests.system.direct import until_direct
from tests.system.faulty_predictor import FAILS, FAILS_LATER, HOLDS_LATER, PYTHON_MODEL
from tests.system.rest_ways_in import openai_shape, rest_outcome, v2_shape
from tests.system.ways_in import DIRECT, PREDICTOR, RELAYED, REST_STREAMS, STREAMS, TEXT, WAYS_IN
from tests.waiting import until

Code = grpc.StatusCode
# As many requests as the predictor takes of a model: one of each way in, text and ids going to the same one.
PLACES = len(TEXT) + len(PREDICTOR)
GOOD = Ask()
FAULTS = ("hold", "hold_later", "down")
FILLERS = ("Generate", "ModelInfer, relayed")  # Which fill both models.


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """The folder whose files are the faults that are wanted now, see faulty_predictor."""
    return tmp_path_factory.mktemp("faults")


@pytest_asyncio.fixture(scope="module")
async def stack(stacks, tmp_path_factory, faults):
    tensors = tmp_path_factory.mktemp("models") / "tensors"
    tensors.mkdir()
    (tensors / "model.py").write_text(PYTHON_MODEL)
    models = f"storyteller=models/storyteller,normalizer=models/normalizer,tensors={tensors}"
    async with stacks.use(
        models=models,
        commands={"predictor": (sys.executable, "-m", "tests.system.faulty_predictor")},
        environment={
            "predictor": {
                "FAULTS": str(faults),
                "PREDICTOR_MAX_RUNNING": str(PLACES),
                "PREDICTOR_MAX_WAITING": "0",
                "PREDICTOR_HUB_ALLOW": "good/*",
            },
            # Else requests wait for a predictor that is away, see test_resume.py.
            "transformer": {"TRANSFORMER_PREDICTOR_WAIT": "0.2"},
        },
    ) as started:
        await until_direct(started.gateway, "tensors")
        yield started


@pytest.fixture
def fault(faults):
    """Makes a fault by its name, and ends it with the test or by the second value."""

    def begin(name):
        (faults / name).touch()

    def end(name):
        (faults / name).unlink(missing_ok=True)

    yield begin, end
    for name in FAULTS:
        end(name)


@pytest.fixture
def admitted(faults):
    """How many requests the engine and the Python model have taken in."""
    (faults / "admitted").touch()
    return lambda: (faults / "admitted").stat().st_size


@pytest_asyncio.fixture(autouse=True)
async def next_call_works(stack, fault):
    yield
    for name in FAULTS:
        fault[1](name)
    bad = {}

    async def all_work():
        told = await outcomes(stack.gateway, GOOD, WAYS_IN)
        bad.clear()
        bad.update({name: outcome for name, outcome in told.items() if not is_good(outcome)})
        return not bad

    # What was held gives its place back a moment after it was let go; a killed predictor starts in seconds.
    with suppress(AssertionError):
        await until(all_work, 60)
    assert not bad


def is_good(outcome):
    return outcome.status in (200, Code.OK) and not outcome.message


async def outcomes(gateway, ask, ways_in):
    """What becomes of the request on every way in, all at once."""
    told = await asyncio.gather(*(way_in(gateway, ask) for way_in in ways_in.values()))
    return dict(zip(ways_in, told, strict=True))


@dataclass(frozen=True)
class Row:
    """What every way in must say: hop by way of text, of relayed tensors, and past the transformer."""

    ask: Ask
    grpc: Code
    http: int
    hops: tuple[str, str, str]
    message: str
    ways_in: Mapping[str, Any] = field(default_factory=lambda: WAYS_IN)
    retry_after: bool = False
    predictor_speaks: bool = True  # False: what ends its own streams is the gateway.
    direct_hop: str | None = None  # By way of tensors that go straight to the predictor, where that is another.


def ask(**changes):
    parameters = {**GOOD.parameters, **changes.pop("parameters", {})}
    return Ask(**{"parameters": parameters, **changes})


TTP, PPP, TPP = (
    ("transformer", "transformer", "predictor"),
    ("predictor",) * 3,
    ("transformer", "predictor", "predictor"),
)
OIP = {name: way for name, way in WAYS_IN.items() if name.startswith(("Model", "infer", "generate"))}
UNARY = {name for name in OIP if name.startswith(("ModelInfer", "infer", "generate")) and "stream" not in name}
CHAT = {name: way for name, way in TEXT.items() if name.startswith("chat")}
ROWS = {
    "bad parameter": Row(ask(parameters={"temperature": -1.0}), Code.INVALID_ARGUMENT, 400, TPP, "temperature"),
    "prompt too long": Row(
        ask(prompt="once " * 1500), Code.INVALID_ARGUMENT, 400, TPP, "the context is 1024", TEXT | PREDICTOR
    ),
    "endpoint that the model does not support": Row(
        ask(model="normalizer"), Code.INVALID_ARGUMENT, 400, TTP, "no chat template", CHAT
    ),
    "no such model": Row(ask(model="nobody"), Code.NOT_FOUND, 404, TTP, "no model 'nobody'"),
    "no such version": Row(ask(version="7"), Code.NOT_FOUND, 404, TTP, "version '7'", OIP, direct_hop="predictor"),
    "failed inside": Row(ask(parameters={"seed": FAILS}), Code.INTERNAL, 500, PPP, "the model failed on this request"),
}


def check(row, told):
    def wanted(name, outcome):
        on_stream = name.startswith("ModelStreamInfer") and "statuses" not in name
        on_stream &= row.predictor_speaks or name not in PREDICTOR
        status = ON_STREAM if on_stream else row.http if isinstance(outcome.status, int) else row.grpc
        hop = None if on_stream else row.hops[0 if name in TEXT else 1 if name in RELAYED else 2]
        if name in DIRECT and row.direct_hop:
            hop = row.direct_hop
        return status, hop, row.retry_after and not on_stream

    assert {name: (o.status, o.hop, o.retry_after is not None) for name, o in told.items()} == {
        name: wanted(name, outcome) for name, outcome in told.items()
    }
    assert {name: o.message for name, o in told.items() if row.message not in o.message} == {}
    assert not any(outcome.begun or "secret" in outcome.message for outcome in told.values())


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
async def test_an_error_has_one_meaning_on_every_way_in(stack, row):
    check(row, await outcomes(stack.gateway, row.ask, row.ways_in))


async def test_a_full_queue_says_when_to_come_back(stack, fault, admitted):
    fault[0]("hold")
    before = admitted()
    holders = [asyncio.create_task(WAYS_IN[name](stack.gateway, GOOD)) for name in FILLERS for _ in range(PLACES)]
    await until(lambda: admitted() == before + len(holders))
    told = await outcomes(stack.gateway, ask(goes_on=False), WAYS_IN)
    fault[1]("hold")
    check(Row(GOOD, Code.RESOURCE_EXHAUSTED, 429, PPP, "full", retry_after=True), told)
    assert all(int(outcome.retry_after) >= 1 for outcome in told.values() if outcome.retry_after is not None)
    assert all(map(is_good, await asyncio.gather(*holders)))


async def test_a_deadline_is_kept(stack, fault):
    fault[0]("hold")
    told = await outcomes(stack.gateway, ask(timeout_s=0.3, goes_on=False), WAYS_IN)
    # A gRPC client keeps the deadline by itself, wherever the request is by then.
    statuses = {name: 504 if isinstance(o.status, int) else Code.DEADLINE_EXCEEDED for name, o in told.items()}
    assert {name: outcome.status for name, outcome in told.items()} == statuses
    assert all("deadline" in outcome.message.lower() and not outcome.begun for outcome in told.values())
    assert all(outcome.hop in ("transformer", "predictor") for outcome in told.values() if outcome.status == 504)


async def test_a_predictor_that_dies_and_one_that_is_away_are_two_errors(stack, fault, admitted):
    broken = Row(GOOD, Code.UNAVAILABLE, 502, PPP, "the connection to the predictor broke", predictor_speaks=False)
    away = Row(GOOD, Code.UNAVAILABLE, 503, PPP, "no predictor is ready", predictor_speaks=False)
    fault[0]("hold")
    before = admitted()
    asking = asyncio.create_task(outcomes(stack.gateway, ask(goes_on=False), WAYS_IN))
    await until(lambda: admitted() == before + len(WAYS_IN))
    fault[0]("down")
    await stack.kill("predictor-0")
    told = await asking
    # The gateway sends again what has one answer, the transformer what it generates: nobody is left by then.
    again = UNARY | set(TEXT)
    retried = {name: outcome for name, outcome in told.items() if name in again and away.message in outcome.message}
    check(away, retried)
    check(broken, {name: outcome for name, outcome in told.items() if name not in retried})

    # Until the gateway knows, a call may still meet the closed port of the dead.
    async def all_know():
        told.update(await outcomes(stack.gateway, ask(goes_on=False), WAYS_IN))
        return all(away.message in outcome.message for outcome in told.values())

    await until(all_know)
    check(away, told)


@pytest.mark.parametrize("name", STREAMS)
async def test_an_error_after_some_of_the_answer_is_told_in_the_stream(stack, name):
    outcome = await WAYS_IN[name](stack.gateway, ask(parameters={"seed": FAILS_LATER, "max_tokens": 20}))
    status = 200 if name in REST_STREAMS else ON_STREAM if name.startswith("ModelStreamInfer") else Code.INTERNAL
    assert (outcome.status if "statuses" not in name else ON_STREAM, outcome.begun) == (status, True)
    assert outcome.message == "the model failed on this request"


@pytest.mark.parametrize("name", REST_STREAMS)
async def test_a_deadline_in_the_middle_of_the_answer_is_told_in_the_stream(stack, fault, name):
    fault[0]("hold_later")
    held = ask(parameters={"seed": HOLDS_LATER, "max_tokens": 20}, timeout_s=0.8)
    outcome = await WAYS_IN[name](stack.gateway, held)
    assert (outcome.status, outcome.begun) == (200, True)
    assert "deadline" in outcome.message


# MiB of text, of which ids make more.
LARGE = {"Generate": 65, "Generate by REST": 65, "ModelInfer": 65, "completions, events": 61, "infer, binary": 61,
         "ModelInfer, predictor": 41}  # fmt: skip


async def test_what_is_too_large_is_refused(stack):
    for name, size in LARGE.items():  # One by one: together they would take gigabytes.
        outcome = await WAYS_IN[name](stack.gateway, ask(prompt="x" * (size << 20)))
        is_rest = isinstance(outcome.status, int)
        assert outcome.status == (413 if is_rest else Code.RESOURCE_EXHAUSTED), (name, outcome)
        assert outcome.hop in ("gateway", "transformer") or not is_rest, (name, outcome)
        assert "larger than" in outcome.message, (name, outcome)


PATHS = {
    "unknown": ("GET", "/v3", 404, "gateway", v2_shape),
    "unknown, of OpenAI": ("POST", "/v1/nothing", 404, "gateway", openai_shape),
    "unknown, of V2": ("POST", "/v2/models/storyteller/nothing", 404, "gateway", v2_shape),
    "unknown, of ours": ("GET", "/millrace/v1/nothing", 404, "gateway", v2_shape),
    "wrong method": ("GET", "/v1/completions", 404, "gateway", openai_shape),
    "no such model": ("GET", "/v1/models/nobody", 404, "transformer", openai_shape),
    "no such record": ("GET", "/millrace/v1/payloads/nothing", 404, "logger", v2_shape),
    "no such filter": ("GET", "/millrace/v1/payloads?modle=x", 400, "gateway", v2_shape),
    "bad deadline": ("GET", "/v2?", 400, "gateway", v2_shape),
    "not allowed": ("POST", "/v2/repository/models/evil%2Fmodel/load", 403, "predictor", v2_shape),
    "nothing to load": ("POST", "/v2/repository/models/nobody/load", 404, "predictor", v2_shape),
    "not offered": ("GET", "/v2/systemsharedmemory/status", 501, "transformer", v2_shape),
}  # fmt: skip


async def test_rest_paths_that_generate_nothing_refuse_alike(stack):
    told = {}
    for case, (method, path, _, _, shape) in PATHS.items():
        headers = {"x-timeout-ms": "soon"} if case == "bad deadline" else {}
        body = {} if method == "POST" else None
        answer = await asyncio.to_thread(http_request, stack.gateway, method, path, body, headers)
        outcome = rest_outcome(answer, shape)
        told[case] = (outcome.status, outcome.hop, bool(outcome.message))
    assert told == {case: (status, hop, True) for case, (_, _, status, hop, _) in PATHS.items()}


SERVICE = "/inference.GRPCInferenceService/"
NOTHING = b""
METHODS = {
    "unknown method": (SERVICE + "Nothing", NOTHING, Code.UNIMPLEMENTED, "transformer"),
    "unknown service": ("/nobody.Service/Nothing", NOTHING, Code.UNIMPLEMENTED, "gateway"),
    "inner service": ("/millrace.v1.PayloadIngest/Append", NOTHING, Code.UNIMPLEMENTED, "gateway"),
    "no message": (SERVICE + "ModelInfer", b"\xff\xff", Code.INVALID_ARGUMENT, "transformer"),
    "not offered": (SERVICE + "SystemSharedMemoryStatus", NOTHING, Code.UNIMPLEMENTED, "transformer"),
    "not allowed": (
        SERVICE + "RepositoryModelLoad",
        pb.RepositoryModelLoadRequest(model_name="evil/model").SerializeToString(),
        Code.PERMISSION_DENIED,
        "predictor",
    ),
    "no such record": (
        "/millrace.v1.PayloadLog/Get",
        millrace_pb2.GetPayloadRequest(record_id="nothing").SerializeToString(),
        Code.NOT_FOUND,
        "logger",
    ),
}


async def test_methods_that_generate_nothing_refuse_alike(stack):
    told = {}
    async with channel(stack.gateway) as open_channel:
        for case, (path, request, _, _) in METHODS.items():
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await open_channel.unary_unary(path)(request, timeout=10)
            hop = dict(raised.value.trailing_metadata()).get("x-failed-hop")
            told[case] = (raised.value.code(), hop, bool(raised.value.details()))
    assert told == {case: (status, hop, True) for case, (_, _, status, hop) in METHODS.items()}
