"""A user's model.py: it streams as it yields, waits for its reader and ends with its caller; requests fail alone."""

import asyncio
import re
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import HopBrokenError, InvalidRequestError, NotReadyError, RequestFailedError
from headrace.oip.model_description import config_of
from headrace.oip.stream_infer import FINAL
from headrace.oip.tensors import Tensor, decode_outputs
from headrace_predictor.engine.interface import EngineDeadError
from headrace_predictor.repository.lease import Serving
from tests.unit.python_models import globals_of, infer, python_models, request
from tests.waiting import until


@pytest.fixture
def make(tmp_path):
    with python_models(tmp_path) as start:
        yield start


async def stream(model, message):
    async with aclosing(model.stream(message)) as responses:
        return [response async for response in responses]


def tasks_of(model):
    """The number of tasks on the model's loop that have not ended."""
    return len(asyncio.all_tasks(model.thread._loop))


async def idle(model):
    """Waits until no task of a request is left on the model's loop."""
    await until(lambda: tasks_of(model) == 0)


COUNT = """
import asyncio
import numpy as np

made, closed = [], []

async def execute(request):
    try:
        for i in range(request.parameters.get("n", 3)):
            made.append(i)
            yield {"i": np.full(request.parameters.get("size", 1), i)}
        while request.parameters.get("wait"):
            await asyncio.sleep(3600)
    finally:
        closed.append(True)
"""


async def test_a_function_answers_with_arrays(make):
    model = make("""
        async def execute(request):
            x = request.inputs["x"]
            return {"double": x * 2, "id": __import__("numpy").array([request.id, str(request.parameters["k"])])}
    """)
    answer = await infer(model, request(k=7))
    assert answer["double"].tolist() == [0, 2, 4]
    assert answer["double"].dtype == np.int32
    assert answer["id"].tolist() == [b"r", b"7"]
    assert not config_of(model.name, model.description).model_transaction_policy.decoupled


async def test_the_model_of_the_documentation_works(make):
    page = (Path(__file__).parents[2] / "docs" / "python-models.md").read_text()
    [code] = re.findall(r"^```py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    model = make(code)
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    responses = await stream(model, request(Tensor("x", "FP32", rows)))
    assert [decode_outputs(response)["row"].array.tolist() for response in responses] == rows.tolist()
    with pytest.raises(InvalidRequestError, match="x is empty"):
        await stream(model, request(Tensor("x", "FP32", rows[:0])))


async def test_a_generator_answers_once_for_each_yield(make):
    model = make(COUNT)
    responses = await stream(model, request(n=20))
    assert [decode_outputs(response)["i"].array[0] for response in responses] == list(range(20))
    assert not any(response.parameters[FINAL].bool_param for response in responses[:-1])
    assert config_of(model.name, model.description).model_transaction_policy.decoupled


async def test_the_last_response_is_marked_where_the_generator_has_ended(make):
    model = make(COUNT)
    async with aclosing(model.stream(request(n=2))) as responses:
        await anext(responses)
        await idle(model)
        assert (await anext(responses)).parameters[FINAL].bool_param


async def test_infer_takes_one_response_or_none_and_refuses_more(make):
    model = make(COUNT)
    assert (await infer(model, request(n=1)))["i"].tolist() == [0]
    assert await infer(model, request(n=0)) == {}
    with pytest.raises(InvalidRequestError, match="use ModelStreamInfer"):
        await infer(model, request(n=1000))
    await idle(model)
    assert len(globals_of(model)["closed"]) == 3


@pytest.mark.parametrize(("size", "unread"), [(1, 16), (100_000, 4)])
async def test_a_slow_reader_holds_the_generator_back(make, size, unread):
    model = make(COUNT)
    async with aclosing(model.stream(request(n=1000, size=size))) as responses:
        await anext(responses)
        await until(lambda: len(globals_of(model)["made"]) >= unread + 1)
        # As many as may wait, the one that was read, and the one that waits to be put.
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(globals_of(model)["made"]) <= unread + 2
    await idle(model)
    assert globals_of(model)["closed"] == [True]


@pytest.mark.parametrize("n", [1, 1000], ids=["while it waits", "while it is held back"])
async def test_a_caller_that_leaves_ends_the_generator_and_frees_its_slot(make, n):
    model = make(COUNT, max_running=1)
    for _ in range(3):
        async with aclosing(model.stream(request(n=n, wait=1))) as responses:
            await anext(responses)
    await idle(model)
    assert globals_of(model)["closed"] == [True] * 3
    await until(lambda: model.statistics.cancelled == 3)
    assert model.statistics.steps == 3


async def test_a_cancelled_call_ends_the_function(make):
    model = make("""
        import asyncio
        state = []
        async def execute(request):
            state.append("begun")
            try:
                await asyncio.Event().wait()
            finally:
                state.append("ended")
    """)
    call = asyncio.create_task(model.infer(request()))
    await until(lambda: globals_of(model)["state"])
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await idle(model)
    assert globals_of(model)["state"] == ["begun", "ended"]


async def test_callers_that_leave_at_any_moment_leave_no_slot_taken(make):
    model = make(COUNT, max_running=4, max_waiting=200)

    async def leaves_after(steps):
        call = asyncio.create_task(stream(model, request(n=50, wait=steps % 2)))
        for _ in range(steps):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])

    await asyncio.gather(*(leaves_after(steps) for steps in range(150)))
    await idle(model)
    assert (await infer(model, request(n=1)))["i"].tolist() == [0]
    # Every slot is free again: as many as may run do so at the same time.
    async with AsyncExitStack() as stack:
        streams = [model.stream(request(n=1, wait=1)) for _ in range(4)]
        for one in streams:
            stack.push_async_callback(one.aclose)
        await asyncio.gather(*map(anext, streams))


async def test_code_that_blocks_does_not_hold_up_the_event_loop(make):
    model = make("""
        import threading
        gate = threading.Event()
        async def execute(request):
            gate.wait(30)
            return {}
    """)
    call = asyncio.create_task(model.infer(request()))
    await until(lambda: tasks_of(model) == 1)
    gave_up = asyncio.create_task(model.infer(request()))
    await asyncio.sleep(0)
    gave_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gave_up
    assert not call.done()
    globals_of(model)["gate"].set()
    await call
    await idle(model)


FAILURES = {
    "an exception": ("raise RuntimeError('secret')", RequestFailedError, "the model failed on this request"),
    "the end of the process": ("raise SystemExit(3)", RequestFailedError, "the model failed on this request"),
    "an interrupt": ("raise KeyboardInterrupt", RequestFailedError, "the model failed on this request"),
    "its own cancel": ("raise __import__('asyncio').CancelledError", RequestFailedError, "the model failed on"),
    "a refusal": ("from headrace.errors import InvalidRequestError as E; raise E('no')", InvalidRequestError, "no"),
    "no dict": ("return 7", RequestFailedError, "answered with int"),
    "no array": ("return {'y': [1, 2]}", RequestFailedError, "output 'y' is list, not a numpy array"),
    "a dtype that OIP lacks": ("import numpy; return {'y': numpy.array([1j])}", RequestFailedError, "complex128"),
    "objects": ("import numpy; return {'y': numpy.array([{}])}", RequestFailedError, "neither bytes nor text"),
    "a name that is none": ("import numpy; return {1: numpy.array([1])}", RequestFailedError, "not text"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
async def test_a_failing_request_fails_alone(make, case, caplog):
    code, error, text = FAILURES[case]
    model = make(f"""
        async def execute(request):
            if "fail" in request.parameters:
                {code}
            return request.raw
    """)
    good = [asyncio.create_task(infer(model, request())) for _ in range(3)]
    with pytest.raises(error, match=text) as raised:
        await infer(model, request(fail=1))
    assert "secret" not in str(raised.value)
    for answer in await asyncio.gather(*good):
        assert answer["x"].tolist() == [0, 1, 2]
    await idle(model)
    await until(lambda: (model.statistics.failed, model.statistics.succeeded) == (1, 3))


async def test_a_failing_generator_has_sent_its_responses_before_the_error(make, caplog):
    model = make("""
        import numpy
        async def execute(request):
            yield {"i": numpy.array([1])}
            raise ValueError("secret")
    """)
    async with aclosing(model.stream(request())) as responses:
        assert not (await anext(responses)).parameters[FINAL].bool_param
        with pytest.raises(RequestFailedError, match="the model failed on this request"):
            await anext(responses)
    assert "ValueError: secret" in caplog.text


async def test_a_task_of_the_code_cannot_end_the_loop(make, caplog):
    model = make("""
        import asyncio
        async def leave():
            raise SystemExit(1)
        async def execute(request):
            if "leave" in request.parameters:
                await asyncio.wait([asyncio.create_task(leave())])
            return request.raw
    """)
    await infer(model, request(leave=1))
    assert (await infer(model, request()))["x"].tolist() == [0, 1, 2]


async def test_a_stop_ends_the_requests_in_flight(make):
    model = make(COUNT)
    async with aclosing(model.stream(request(n=1, wait=1))) as responses:
        await anext(responses)
        await asyncio.to_thread(model.close)
        with pytest.raises(NotReadyError):
            await anext(responses)
    assert globals_of(model)["closed"] == [True]


async def test_a_model_that_blocks_for_ever_counts_as_dead_and_its_callers_get_an_error(make):
    model = make(
        """
        import threading

        gate = threading.Event()

        async def execute(request):
            gate.wait(60)
            return {}
        """,
        timeout_s=0.5,
    )
    dies = asyncio.create_task(model.died())
    calls = [asyncio.create_task(model.infer(request())) for _ in range(3)]
    try:
        outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
        assert [type(outcome) for outcome in outcomes] == [HopBrokenError] * 3
        with pytest.raises(EngineDeadError, match="mine died"):
            await dies
    finally:
        globals_of(model)["gate"].set()


async def test_an_optional_input_may_be_left_out_and_a_response_has_parameters(make):
    model = make("""
        import numpy as np
        from headrace.python_tensors import Response

        INPUTS = {"x": ("INT32", [-1]), "k": ("INT32", [1], {"optional": True})}

        async def execute(request):
            k = request.inputs.get("k", np.array([1], dtype=np.int32))
            return Response({"y": request.inputs["x"] * k}, {"took": 0.5, "k": int(k[0]), "how": "fast", "ok": True})
    """)
    x, k = Tensor("x", "INT32", np.arange(3, dtype=np.int32)), Tensor("k", "INT32", np.array([2], dtype=np.int32))
    response = await model.infer(request(x))
    assert decode_outputs(response)["y"].array.tolist() == [0, 1, 2]
    sent = response.parameters
    values = (sent["took"].double_param, sent["k"].int64_param, sent["how"].string_param, sent["ok"].bool_param)
    assert values == (0.5, 1, "fast", True)
    assert (await infer(model, request(x, k)))["y"].tolist() == [0, 2, 4]
    assert [(each.name, each.optional) for each in config_of(model.name, model.description).input] == [
        ("x", False),
        ("k", True),
    ]
    with pytest.raises(InvalidRequestError, match="'x' is missing"):
        await model.infer(request(k))


@pytest.mark.parametrize("parameters", ['{"triton_final_response": True}', "{1: 2}", "[1]", '{"x": object()}'])
async def test_parameters_that_cannot_be_sent_fail_the_request(make, parameters):
    model = make(f"""
        from headrace.python_tensors import Response

        async def execute(request):
            return Response({{}}, {parameters})
    """)
    with pytest.raises(RequestFailedError, match="parameters"):
        await model.infer(request())


@pytest.mark.parametrize("how", ["twice", "classified"])
async def test_requests_for_unsupported_output_forms_are_refused(make, how):
    model = make("""
        async def execute(request):
            return {"y": request.inputs["x"]}
    """)
    message = request(outputs=("y", "y") if how == "twice" else ("y",))
    if how == "classified":  # As tritonclient's class_count does.
        message.outputs[0].parameters["classification"].int64_param = 1
    serving = Serving(model)
    with pytest.raises(InvalidRequestError, match="'y' is given twice" if how == "twice" else "class_count"):
        await serving.infer(message)
    with pytest.raises(InvalidRequestError, match="'y'"):
        await anext(serving.stream(message))
