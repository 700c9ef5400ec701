"""A predictor dies in the middle of many answers, and each continues undisturbed, on every way in."""

import asyncio
import json
import signal
import sys
from collections import Counter

import pytest
import pytest_asyncio

from headrace.oip.tensors import decode_outputs
from headrace_protos import headrace_pb2, headrace_pb2_grpc
from headrace_protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.prometheus import read_page
from tests.support.full import FULL
from tests.system.calls import channel, each, generate, http_request, query, text_request
from tests.waiting import until

MODELS = "storyteller=models/storyteller,normalizer=models/normalizer"
PROMPT, NUMBERS = "Once upon a time", "in 1984, 27 days, 3 hours and 15 minutes"
TOKENS = 40
SAMPLING = {
    "greedy": {"temperature": 0.0, "seed": 0},
    "sampled": {"temperature": 1.0, "seed": 11},
    "constrained": {"temperature": 1.0, "seed": 12, "structured_outputs": '{"regex": "([a-z]{2,9}[ ,.]){99}"}'},
}
# FULL=1: the promised number and duration, with the default interval of comments.
AWAY_S, KEEP_ALIVE = (90, {}) if FULL else (3, {"TRANSFORMER_SSE_KEEP_ALIVE": "0.5"})
REPEATS = 2 if FULL else 1
# Less than an answer takes: an answer that cannot move meanwhile is handed back.
SHORT_DRAIN = {"PREDICTOR_DRAIN_S": "0.5"}
SLOW = {"predictor": (sys.executable, "-m", "tests.system.faulty_predictor")}


@pytest_asyncio.fixture(
    scope="module",
    params=[pytest.param(2, id="two predictors"), pytest.param(1, id="one predictor", marks=pytest.mark.full)],
)
async def slow_stack(request, stacks, tmp_path_factory):
    """Predictors that are slow enough for a test to act between two tokens."""
    faults = tmp_path_factory.mktemp("faults")
    environment = {
        "predictor": {"SLOW_MS": "40", "PREDICTOR_DTYPE": "fp32", "FAULTS": str(faults)} | SHORT_DRAIN,
        # On a busy machine a predictor restarts slowly.
        "transformer": {"TRANSFORMER_PREDICTOR_START_WAIT": "120", "TRANSFORMER_SILENCE_LIMIT": "2"} | KEEP_ALIVE,
    }
    async with stacks.use(models=MODELS, predictors=request.param, commands=SLOW, environment=environment) as stack:
        stack.away = faults / "down"
        yield stack


@pytest_asyncio.fixture(scope="module")
async def undisturbed(slow_stack):
    """The undisturbed answers of each way in."""
    return await send_all(slow_stack, "first")


async def generated(gateway, name, sampling, came, model="storyteller", prompt=PROMPT):
    """Over Generate: ids, text, finish reason and usage."""
    request = headrace_pb2.GenerateRequest(
        model=model, prompt=prompt, max_tokens=TOKENS, ignore_eos=True, logprobs=True, request_id=name, **sampling
    )
    ids, logprobs, text = [], [], ""
    async with channel(gateway) as open_channel:
        async for response in headrace_pb2_grpc.TextGenerationStub(open_channel).Generate(request, timeout=300):
            came[name] += len(response.token_ids)
            ids += response.token_ids
            logprobs += response.logprobs
            text += response.text
    assert len(logprobs) == len(ids) == TOKENS
    usage = response.usage
    return ids, text, response.finish_reason, usage.prompt_tokens, usage.completion_tokens


async def normalized(gateway, name, sampling, came):
    """The same of an encoder-decoder model."""
    return await generated(gateway, name, sampling, came, "normalizer", NUMBERS)


async def inferred(gateway, name, sampling, came):
    """Over ModelStreamInfer: text and finish reason."""
    request = text_request("storyteller", PROMPT, max_tokens=TOKENS, seed=sampling["seed"])
    request.id = name
    request.parameters["ignore_eos"].bool_param = True
    request.parameters["temperature"].double_param = sampling["temperature"]
    if "structured_outputs" in sampling:
        request.parameters["structured_outputs"].string_param = sampling["structured_outputs"]
    text = b""
    async with channel(gateway) as open_channel:
        async for response in GRPCInferenceServiceStub(open_channel).ModelStreamInfer(each(request), timeout=300):
            assert not response.error_message
            came[name] += 1
            text += decode_outputs(response.infer_response)["text_output"].array[0]
    return text, response.infer_response.parameters["finish_reason"].string_param


async def chatted(gateway, name, sampling, came, comments=None):
    """Over server-sent events: text, finish reason and usage; the number of comments is added to `comments`."""
    body = {"model": "storyteller", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, **sampling}

    def came_one():
        came[name] += 1

    headers = {"x-request-id": name}
    answer = await asyncio.to_thread(http_request, gateway, "POST", "/v1/chat/completions", body, headers, came_one)
    assert answer.events[-1] == "[DONE]"
    if comments is not None and answer.comments:
        comments[name] = len(answer.comments)
    events = [json.loads(event) for event in answer.events[:-1]]
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, choices[-1]["finish_reason"], events[-1]["usage"]["completion_tokens"]


WAYS_IN = {"Generate": generated, "ModelStreamInfer": inferred, "chat": chatted, "T5": normalized}


async def send_all(stack, prefix, came=None, comments=None):
    """The answers of each way in to each kind of request, several times, all at once."""
    keys = [(way_in, kind, number) for way_in in WAYS_IN for kind in SAMPLING for number in range(REPEATS)]
    came = Counter() if came is None else came
    answers = await asyncio.gather(
        *(
            WAYS_IN[way_in](
                *(stack.gateway, f"{prefix} {way_in} {kind} {number}", SAMPLING[kind], came),
                **({"comments": comments} if way_in == "chat" else {}),
            )
            for way_in, kind, number in keys
        )
    )
    return dict(zip(keys, answers, strict=True))


async def is_chosen(stack):
    """Whether the gateway gives the first predictor, which may have just restarted, its share of the requests."""
    _, page, _ = stack.metrics_pages["predictor"][0]

    async def tokens():
        samples = await asyncio.to_thread(read_page, page)
        return sum(sample.value for sample in samples if sample.name == "headrace_tokens_total")

    before = await tokens()
    one = {"model": "storyteller", "prompt": PROMPT, "max_tokens": 1}
    await asyncio.gather(*(generate(stack.gateway, **one) for _ in range(8)))
    return await tokens() > before


async def send_all_while(stack, prefix, disturb, comments=None):
    """The same, with `disturb` called once each answer has five tokens or messages, which may come at once."""
    await until(lambda: is_chosen(stack))
    came = Counter()
    sending = asyncio.create_task(send_all(stack, prefix, came, comments))
    expected = len(WAYS_IN) * len(SAMPLING) * REPEATS
    await until(lambda: sending.done() or (len(came) == expected and min(came.values()) >= 5))
    if sending.done():  # With an error, or too soon.
        sending.result()
    await disturb()
    assert not sending.done()
    return await sending


async def resumed_records(stack, prefix):
    """The records of a round's resumed answers, once there are some."""

    async def found():
        records = await query(stack.gateway, page_size=500)
        return [record for record in records if record.resumes and record.request_id.startswith(prefix)]

    return await until(found)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=lambda signum: signum.name)
async def test_answers_continue_after_any_end_of_their_predictor(slow_stack, undisturbed, signum):
    prefix = f"while {signum.name}"
    process = slow_stack.pid("predictor-0")
    late = None

    async def disturb():
        nonlocal late
        await slow_stack.kill("predictor-0", signum)
        late = asyncio.create_task(generated(slow_stack.gateway, "late", SAMPLING["greedy"], Counter()))
        if signum == signal.SIGSTOP:
            # It continues after its calls were given up: its messages are too late then.
            await until(lambda: "fell silent" in slow_stack.log("transformer"))
            await slow_stack.kill("predictor-0", signal.SIGCONT)

    assert await send_all_while(slow_stack, prefix, disturb) == undisturbed
    # A request that arrived while one predictor, or none, was ready.
    assert late is not None
    assert await late == undisturbed["Generate", "greedy", 0]
    # With two predictors, least-request balancing has sent about half of them to the one that died.
    for record in await resumed_records(slow_stack, prefix):
        assert record.status == "OK"
        assert sum(len(chunk.token_ids) for chunk in record.chunks) == record.usage.completion_tokens == TOKENS
        assert "".join(chunk.text for chunk in record.chunks) == record.text
    await slow_stack.wait_ready()
    assert (slow_stack.pid("predictor-0") == process) == (signum == signal.SIGSTOP)
    assert "Traceback" not in slow_stack.log("predictor-0")


@pytest.mark.timeout(400)
async def test_answers_survive_a_long_absence_of_every_predictor(slow_stack, undisturbed):
    comments, late = Counter(), None

    async def disturb():
        nonlocal late
        slow_stack.away.touch()
        for number in range(len(slow_stack.settings.predictor_ports)):
            await slow_stack.kill(f"predictor-{number}", signal.SIGKILL)
        late = asyncio.create_task(generated(slow_stack.gateway, "late", SAMPLING["greedy"], Counter()))
        await asyncio.sleep(AWAY_S)
        slow_stack.away.unlink()

    assert await send_all_while(slow_stack, "away", disturb, comments) == undisturbed
    # A request that arrived while no predictor was ready.
    assert late is not None
    assert await late == undisturbed["Generate", "greedy", 0]
    assert len(comments) == len(SAMPLING) * REPEATS, "each stream of events got some"
    for record in await resumed_records(slow_stack, "away"):
        assert record.status == "OK"
    await slow_stack.wait_ready()
