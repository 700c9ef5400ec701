"""An error has one meaning on every way in: status, hop, shape and retry delay; and the next call works.

The rows of the table of errors in docs/interface.md that can be provoked.
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

from headrace_protos import headrace_pb2
from headrace_protos import inference_pb2 as pb
from tests.support.full import usually
from tests.support.status import refusal
from tests.system.calls import channel, http_request, until_direct
from tests.system.faulty_predictor import FAILS, FAILS_LATER, HOLDS_LATER, PYTHON_MODEL
from tests.system.request_outcome import ON_STREAM, Request
from tests.system.rest_ways_in import anthropic_shape, openai_shape, rest_outcome, v2_shape
from tests.system.ways_in import DIRECT, PREDICTOR, RELAYED, REST_STREAMS, STREAMS, TEXT, WAYS_IN
from tests.waiting import until

Code = grpc.StatusCode
# The predictor's limit of requests per model: one of each way in, since text and ids go to the same model.
PLACES = len(TEXT) + len(PREDICTOR)
GOOD = Request()
FAULTS = ("hold", "hold_later", "down")
FILLERS = ("Generate", "ModelInfer, relayed")  # These fill both models.


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """The folder whose files are the present faults, see faulty_predictor."""
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
            # Otherwise requests wait for an absent predictor, see test_resume.py.
            "transformer": {"TRANSFORMER_PREDICTOR_WAIT": "0.2"},
        },
    ) as started:
        await until_direct(started.gateway, "tensors")
        yield started


@pytest.fixture
def fault(faults):
    """Two functions: one begins a fault, by name, the other ends it; all end with the test."""

    def begin(name):
        (faults / name).touch()

    def end(name):
        (faults / name).unlink(missing_ok=True)

    yield begin, end
    for name in FAULTS:
        end(name)


@pytest.fixture
def admitted(faults):
    """The number of requests that the engine and the Python model have accepted."""
    (faults / "admitted").touch()
    return lambda: (faults / "admitted").stat().st_size


@pytest_asyncio.fixture(autouse=True)
async def next_call_works(stack, fault):
    yield
    for name in FAULTS:
        fault[1](name)
    bad = {}

    async def all_work():
        results = await outcomes(stack.gateway, GOOD, WAYS_IN)
        bad.clear()
        bad.update({name: outcome for name, outcome in results.items() if not is_good(outcome)})
        return not bad

    # Held requests give their places back a moment after their release; a killed predictor starts in seconds.
    with suppress(AssertionError):
        await until(all_work)
    assert not bad


def is_good(outcome):
    return outcome.status in (200, Code.OK) and not outcome.message


async def outcomes(gateway, request, ways_in):
    """The outcomes of the request on every way in, all at once."""
    results = await asyncio.gather(*(way_in(gateway, request) for way_in in ways_in.values()))
    return dict(zip(ways_in, results, strict=True))


@dataclass(frozen=True)
class Row:
    """The expected outcome: `hops` are for ways of text, of relayed tensors, and to the predictor."""

    request: Request
    grpc: Code
    http: int
    hops: tuple[str, str, str]
    message: str
    ways_in: Mapping[str, Any] = field(default_factory=lambda: WAYS_IN)
    retry_after: bool = False
    predictor_ends_streams: bool = True  # False: the gateway ends streams to the predictor.
    direct_hop: str | None = None  # The hop for tensors that go directly to the predictor, if it differs.


def request_of(**changes):
    parameters = {**GOOD.parameters, **changes.pop("parameters", {})}
    return Request(**{"parameters": parameters, **changes})


TTP, PPP, TPP = (
    ("transformer", "transformer", "predictor"),
    ("predictor",) * 3,
    ("transformer", "predictor", "predictor"),
)
OIP = {name: way for name, way in WAYS_IN.items() if name.startswith(("Model", "infer", "generate"))}
UNARY = {name for name in OIP if name.startswith(("ModelInfer", "infer", "generate")) and "stream" not in name}
CHAT = {name: way for name, way in TEXT.items() if name.startswith("chat")}
ROWS = {
    "bad parameter": Row(request_of(parameters={"temperature": -1.0}), Code.INVALID_ARGUMENT, 400, TPP, "temperature"),
    "prompt too long": Row(
        request_of(prompt="once " * 1500), Code.INVALID_ARGUMENT, 400, TPP, "the context is 1024", TEXT | PREDICTOR
    ),
    "endpoint that the model does not support": Row(
        request_of(model="normalizer"), Code.INVALID_ARGUMENT, 400, TTP, "no chat template", CHAT
    ),
    "form that no answer can have": Row(
        request_of(parameters={"structured_outputs": '{"json": {"type": "string", "minLength": 2, "maxLength": 1}}'}),
        *(Code.INVALID_ARGUMENT, 400, TPP, "structured_outputs: Unsatisfiable schema: minLength (2)", TEXT | PREDICTOR),
    ),
    "no such model": Row(request_of(model="nobody"), Code.NOT_FOUND, 404, TTP, "no model 'nobody'"),
    "no such version": Row(request_of(version="7"), Code.NOT_FOUND, 404, TTP, "version '7'", OIP),
    "failed inside": Row(
        request_of(parameters={"seed": FAILS}), Code.INTERNAL, 500, PPP, "the model failed on this request"
    ),
}


def check(row, results):
    def wanted(name, outcome):
        on_stream = name.startswith("ModelStreamInfer") and "statuses" not in name
        on_stream &= row.predictor_ends_streams or name not in PREDICTOR
        status = ON_STREAM if on_stream else row.http if isinstance(outcome.status, int) else row.grpc
        hop = None if on_stream else row.hops[0 if name in TEXT else 1 if name in RELAYED else 2]
        if name in DIRECT and row.direct_hop:
            hop = row.direct_hop
        return status, hop, row.retry_after and not on_stream

    assert {name: (o.status, o.hop, o.retry_after is not None) for name, o in results.items()} == {
        name: wanted(name, outcome) for name, outcome in results.items()
    }
    assert {name: o.message for name, o in results.items() if row.message not in o.message} == {}
    assert not any(outcome.begun or "secret" in outcome.message for outcome in results.values())


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
async def test_an_error_has_one_meaning_on_every_way_in(stack, row):
    check(row, await outcomes(stack.gateway, row.request, row.ways_in))


async def test_a_full_queue_refuses_with_a_retry_delay(stack, fault, admitted):
    fault[0]("hold")
    before = admitted()
    holders = [asyncio.create_task(WAYS_IN[name](stack.gateway, GOOD)) for name in FILLERS for _ in range(PLACES)]
    await until(lambda: admitted() == before + len(holders))
    results = await outcomes(stack.gateway, request_of(goes_on=False), WAYS_IN)
    fault[1]("hold")
    check(Row(GOOD, Code.RESOURCE_EXHAUSTED, 429, PPP, "full", retry_after=True), results)
    assert all(int(outcome.retry_after) >= 1 for outcome in results.values() if outcome.retry_after is not None)
    assert all(map(is_good, await asyncio.gather(*holders)))


async def test_a_deadline_is_kept(stack, fault):
    fault[0]("hold")
    results = await outcomes(stack.gateway, request_of(timeout_s=0.3, goes_on=False), WAYS_IN)
    # A gRPC client keeps the deadline itself, wherever the request is.
    statuses = {name: 504 if isinstance(o.status, int) else Code.DEADLINE_EXCEEDED for name, o in results.items()}
    assert {name: outcome.status for name, outcome in results.items()} == statuses
    assert all("deadline" in outcome.message.lower() and not outcome.begun for outcome in results.values())
    assert all(outcome.hop in ("transformer", "predictor") for outcome in results.values() if outcome.status == 504)


async def test_a_predictor_that_dies_and_one_that_is_away_are_two_errors(stack, fault, admitted):
    broken = Row(
        GOOD, Code.UNAVAILABLE, 502, PPP, "the connection to the predictor broke", predictor_ends_streams=False
    )
    away = Row(GOOD, Code.UNAVAILABLE, 503, PPP, "no predictor is ready", predictor_ends_streams=False)
    fault[0]("hold")
    before = admitted()
    running = asyncio.create_task(outcomes(stack.gateway, request_of(goes_on=False), WAYS_IN))
    await until(lambda: admitted() == before + len(WAYS_IN))
    fault[0]("down")
    await stack.kill("predictor-0")
    results = await running
    # The gateway retries unary calls, the transformer generations: no predictor is left for them.
    again = UNARY | set(TEXT)
    retried = {name: outcome for name, outcome in results.items() if name in again and away.message in outcome.message}
    check(away, retried)
    check(broken, {name: outcome for name, outcome in results.items() if name not in retried})

    # Until the gateway has noticed, a call may still reach the closed port of the dead predictor.
    results = await until(
        lambda: outcomes(stack.gateway, request_of(goes_on=False), WAYS_IN),
        holds=lambda results: all(away.message in outcome.message for outcome in results.values()),
    )
    check(away, results)


async def test_an_error_after_a_part_of_the_answer_is_reported_in_the_stream(stack):
    failing = request_of(parameters={"seed": FAILS_LATER, "max_tokens": 20})
    for name, outcome in (await outcomes(stack.gateway, failing, {name: WAYS_IN[name] for name in STREAMS})).items():
        status = 200 if name in REST_STREAMS else ON_STREAM if name.startswith("ModelStreamInfer") else Code.INTERNAL
        assert (outcome.status if "statuses" not in name else ON_STREAM, outcome.begun) == (status, True), name
        assert outcome.message == "the model failed on this request", name


# Of the front ends that write errors into streams, each of which the test above has, one of events and one of V2.
@pytest.mark.parametrize("name", usually(("chat, events", "generate_stream"), REST_STREAMS))
async def test_a_deadline_in_the_middle_of_the_answer_is_reported_in_the_stream(stack, fault, name):
    for timeout_s in (1.5, 6, 24):  # On a busy machine three tokens take long.
        held = request_of(parameters={"seed": HOLDS_LATER, "max_tokens": 20}, timeout_s=timeout_s)
        fault[0]("hold_later")
        outcome = await WAYS_IN[name](stack.gateway, held)
        fault[1]("hold_later")
        if outcome.begun:
            break
    assert (outcome.status, outcome.begun) == (200, True), name
    assert "deadline" in outcome.message, name
    assert is_good(await WAYS_IN[name](stack.gateway, GOOD)), name


# MiB of text; as ids it is larger.
LARGE = {"Generate": 65, "Generate by REST": 65, "ModelInfer": 65, "completions, events": 61, "infer, binary": 61,
         "ModelInfer, predictor": 41}  # fmt: skip


async def test_too_large_requests_are_refused(stack):
    for name, size in LARGE.items():  # One after the other: together they would take gigabytes.
        outcome = await WAYS_IN[name](stack.gateway, request_of(prompt="x" * (size << 20)))
        is_rest = isinstance(outcome.status, int)
        assert outcome.status == (413 if is_rest else Code.RESOURCE_EXHAUSTED), (name, outcome)
        assert outcome.hop in ("gateway", "transformer") or not is_rest, (name, outcome)
        assert "larger than" in outcome.message, (name, outcome)


PATHS = {
    "unknown": ("GET", "/v3", 404, "gateway", v2_shape),
    "unknown, of OpenAI": ("POST", "/openai/v1/nothing", 404, "gateway", openai_shape),
    "unknown, of Anthropic": ("POST", "/v1/messages/batches", 404, "gateway", anthropic_shape),
    "unknown, of V2": ("POST", "/v2/models/storyteller/nothing", 404, "gateway", v2_shape),
    "unknown, of ours": ("GET", "/headrace/v1/nothing", 404, "gateway", v2_shape),
    "wrong method": ("GET", "/v1/completions", 404, "gateway", openai_shape),
    "no such model": ("GET", "/v1/models/nobody", 404, "transformer", openai_shape),
    "no such model, of V2": ("GET", "/v2/models/nobody/config", 404, "transformer", v2_shape),
    "no such record": ("GET", "/headrace/v1/payloads/nothing", 404, "logger", v2_shape),
    "no such filter": ("GET", "/headrace/v1/payloads?modle=x", 400, "gateway", v2_shape),
    "bad deadline": ("GET", "/v2?", 400, "gateway", v2_shape),
    "not allowed": ("POST", "/v2/repository/models/evil%2Fmodel/load", 403, "predictor", v2_shape),
    "nothing to load": ("POST", "/v2/repository/models/nobody/load", 404, "predictor", v2_shape),
    "not offered": ("GET", "/v2/systemsharedmemory/status", 501, "transformer", v2_shape),
}  # fmt: skip


async def test_rest_paths_that_do_not_generate_have_their_errors(stack):
    results = {}
    for case, (method, path, _, _, shape) in PATHS.items():
        headers = {"x-timeout-ms": "soon"} if case == "bad deadline" else {}
        body = {} if method == "POST" else None
        answer = await asyncio.to_thread(http_request, stack.gateway, method, path, body, headers)
        outcome = rest_outcome(answer, shape)
        results[case] = (outcome.status, outcome.hop, bool(outcome.message))
    assert results == {case: (status, hop, True) for case, (_, _, status, hop, _) in PATHS.items()}


SERVICE = "/inference.GRPCInferenceService/"
NOTHING = b""
METHODS = {
    "unknown method": (SERVICE + "Nothing", NOTHING, Code.UNIMPLEMENTED, "transformer"),
    "unknown service": ("/nobody.Service/Nothing", NOTHING, Code.UNIMPLEMENTED, "gateway"),
    "inner service": ("/headrace.v1.PayloadIngest/Append", NOTHING, Code.UNIMPLEMENTED, "gateway"),
    "no message": (SERVICE + "ModelInfer", b"\xff\xff", Code.INVALID_ARGUMENT, "transformer"),
    "not offered": (SERVICE + "SystemSharedMemoryStatus", NOTHING, Code.UNIMPLEMENTED, "transformer"),
    "not allowed": (
        SERVICE + "RepositoryModelLoad",
        pb.RepositoryModelLoadRequest(model_name="evil/model").SerializeToString(),
        Code.PERMISSION_DENIED,
        "predictor",
    ),
    "no such record": (
        "/headrace.v1.PayloadLog/Get",
        headrace_pb2.GetPayloadRequest(record_id="nothing").SerializeToString(),
        Code.NOT_FOUND,
        "logger",
    ),
}


async def test_methods_that_do_not_generate_have_their_errors(stack):
    results = {}
    async with channel(stack.gateway) as open_channel:
        for case, (path, request, _, _) in METHODS.items():
            raised = await refusal(open_channel.unary_unary(path)(request))
            hop = dict(raised.trailing_metadata()).get("x-failed-hop")
            results[case] = (raised.code(), hop, bool(raised.details()))
    assert results == {case: (status, hop, True) for case, (_, _, status, hop) in METHODS.items()}
