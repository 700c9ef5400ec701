"""A moved generation as its caller sees it: the same text, consistent chunks, and waits for models."""

import asyncio
from contextlib import AsyncExitStack

import grpc
import orjson
import pytest
from tokenizers import Tokenizer

from headrace.errors import HopBrokenError, InvalidRequestError, NotReadyError
from headrace.oip.tensors import decode_outputs
from headrace_protos import inference_pb2 as pb
from tests.support.scripted_predictor import MODEL, ScriptedPredictor, breaks, raises, serving
from tests.support.status import code_of, refusal
from tests.support.transformer_fixtures import transformer
from tests.system.calls import each, text_request
from tests.waiting import until

STORY = "Once upon a time there was a little mill — “an old one”, said the miller — by the river."
TELLER = f"{MODEL}=models/storyteller"


@pytest.fixture(scope="module")
def answer():
    tokenizer = Tokenizer.from_file("models/storyteller/tokenizer.json")
    return tokenizer.encode(STORY, add_special_tokens=False).ids


def story_request(**parameters):
    return text_request(MODEL, "Tell me", **{"max_tokens": 200, "seed": 1, **parameters})


async def read(stub, request):
    """Text, finish reason and log probabilities of one ModelStreamInfer."""
    responses = [response.infer_response async for response in stub.ModelStreamInfer(each(request))]
    outputs = [decode_outputs(response) for response in responses]
    text = b"".join(each["text_output"].array[0] for each in outputs).decode()
    values = [
        entry["logprob"]
        for each in outputs
        if "logprobs" in each
        for position in orjson.loads(each["logprobs"].array[0])
        for entry in position.values()
    ]
    return text, responses[-1].parameters["finish_reason"].string_param, values


async def test_the_text_is_the_same_at_whichever_token_the_call_breaks(answer):
    predictor = ScriptedPredictor(answer=answer)
    async with serving(predictor) as address, transformer(address, TELLER) as (stub, _):
        for stop, step in ((None, 1), ("little mill", 3), ("“an", 3)):
            request = story_request()
            if stop is not None:
                request.parameters["stop"].string_param = stop
            undisturbed = await read(stub, request)
            assert undisturbed[0].strip() == (STORY.partition(stop)[0].strip() if stop else STORY)
            for after in range(1, len(answer), step):
                predictor.script.append(breaks(after))
                assert await read(stub, request) == undisturbed
                predictor.script.clear()


@pytest.mark.parametrize(
    ("salt", "client", "reports_cached_tokens", "cached"),
    [
        (None, "", False, 0),
        ("", "", False, 0),
        ("mine", "", False, 101),
        (None, "alice", False, 101),
        (None, "", True, 101),
    ],
    ids=["a stranger", "an empty salt", "the owner of a cache", "a client with a key", "where all may know"],
)
async def test_usage_reports_cached_tokens_only_to_their_owner(answer, salt, client, reports_cached_tokens, cached):
    predictor = ScriptedPredictor(breaks(2), answer=answer)
    body = {"model": MODEL, "prompt": "Tell me", "max_tokens": 200}
    if salt is not None:
        body["cache_salt"] = salt
    metadata = (("x-headrace-client", client),) if client else ()
    async with (
        serving(predictor) as address,
        transformer(address, TELLER, reports_cached_tokens=reports_cached_tokens) as (stub, _),
    ):
        whole = orjson.loads((await stub.openai("Completions", orjson.dumps(body), metadata)).data)
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}


async def test_each_choice_is_resumed_by_itself(answer):
    # A break would concern both choices, which share the connection.
    ends = [raises(HopBrokenError("the engine died"), after) for after in (2, 5, 7)]
    predictor = ScriptedPredictor(*ends, answer=answer)
    async with serving(predictor) as address, transformer(address, TELLER) as (stub, _):
        body = {"model": MODEL, "prompt": "Tell me", "n": 2, "max_tokens": 200, "stream": True}
        texts = ["", ""]
        events = (await stub.openai("Completions", orjson.dumps(body))).data
        *lines, done = (event.removeprefix(b"data: ") for event in events.strip().split(b"\n\n"))
        for event in lines:
            for choice in orjson.loads(event)["choices"]:
                texts[choice["index"]] += choice["text"]
        assert done == b"[DONE]"
        assert [text.strip() for text in texts] == [STORY, STORY]
        assert len(predictor.calls) == 5


# ------------------------------------------------------------------ models that are absent


async def test_a_request_waits_for_a_model_that_loads(answer):
    predictor = ScriptedPredictor(answer=answer)
    async with serving(predictor) as address, transformer(address, TELLER) as (stub, _):
        predictor.state = "LOADING"
        await until(lambda: not stub.router.is_ready(MODEL))
        reading = [asyncio.create_task(read(stub, story_request())) for _ in range(3)]
        await refusal(
            stub.ModelInfer(story_request(), metadata=(("x-first-token-timeout-ms", "300"),)), "no token within 300 ms"
        )
        assert not predictor.calls
        assert not any(task.done() for task in reading)
        predictor.state = "READY"
        assert {text.strip() for text, _, _ in await asyncio.gather(*reading)} == {STORY}


async def test_a_request_for_an_unknown_model_does_not_wait(answer):
    predictor = ScriptedPredictor(answer=answer)
    async with serving(predictor) as address, transformer(address, TELLER) as (stub, catalogue):
        for name in ("nobody", MODEL):
            assert await code_of(stub.ModelInfer(text_request(name, "Tell me"))) is grpc.StatusCode.NOT_FOUND
            predictor.state = ""
            await until(lambda: not catalogue.lists(MODEL))


async def test_a_request_for_tensors_waits_only_for_its_predictor():
    away = [NotReadyError("the model loads") for _ in range(3)]
    predictor = ScriptedPredictor(*away, InvalidRequestError("wrong"))
    request = pb.ModelInferRequest(model_name=MODEL)
    request.parameters["max_tokens"].int64_param = 100
    async with serving(predictor) as address, transformer(address) as (stub, _):
        await refusal(stub.ModelInfer(request), "wrong")
        assert len(predictor.calls) == 4
        predictor.script.extend(raises(error) for error in away)
        responses = [response async for response in stub.ModelStreamInfer(each(request))]
        assert responses[-1].infer_response.parameters["finish_reason"].string_param == "stop"
        assert len(predictor.calls) == 8
        predictor.script.append(raises(NotReadyError("the model loads"), after=1))
        responses = [response async for response in stub.ModelStreamInfer(each(request))]
        assert (len(responses), responses[-1].error_message) == (2, "the model loads")


async def test_every_kind_of_readiness_agrees_while_a_predictor_leaves_and_returns(answer):
    predictor = ScriptedPredictor(answer=answer)

    async def ready(stub):
        return [
            (await stub.ServerReady(pb.ServerReadyRequest())).ready,
            (await stub.ModelReady(pb.ModelReadyRequest(name=MODEL))).ready,
            (await stub.ModelReady(pb.ModelReadyRequest(name=MODEL, version="1"))).ready,
        ]

    async with AsyncExitStack() as stack:
        async with serving(predictor) as address:
            stub, catalogue = await stack.enter_async_context(transformer(address, TELLER))
            assert await ready(stub) == [True] * 3
            predictor.is_ready = False
            await until(lambda: not catalogue.ready)
            assert await ready(stub) == [False] * 3
            predictor.is_ready = True
            await until(lambda: catalogue.ready)
            assert await ready(stub) == [True] * 3
        await until(lambda: not catalogue.ready)
        assert await ready(stub) == [False] * 3
        async with serving(predictor, int(address.rpartition(":")[2])):
            await until(lambda: catalogue.ready)
            assert await ready(stub) == [True] * 3
            await catalogue.drain(5.0)
            assert await ready(stub) == [False] * 3
            await catalogue.refresh()
            assert await ready(stub) == [False] * 3


class LoadsAfterListing(ScriptedPredictor):
    """Its model has been loaded just after the first list."""

    def __init__(self):
        super().__init__()
        self.is_ready, self.state = False, "LOADING"

    async def RepositoryIndex(self, request, context):  # noqa: N802
        listed = await super().RepositoryIndex(request, context)
        self.is_ready, self.state = True, "READY"
        return listed


async def test_readiness_comes_with_the_model_that_is_loaded_just_after_it_was_listed():
    async with serving(LoadsAfterListing()) as address, transformer(address, TELLER) as (stub, _):
        assert stub.router.is_ready(MODEL)
