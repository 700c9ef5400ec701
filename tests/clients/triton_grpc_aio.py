"""Triton's own asyncio client against the models of tests/conformance: GATEWAY.

Run in the clients' environment; prints "done" if every check passed.
"""

import asyncio
import sys

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
PROMPT = "Once upon a time"


def text_input(name, text):
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=object))
    return tensor


async def refused(status, text, call):
    refusal = None
    try:
        await call
    except InferenceServerException as error:
        refusal = error
    assert refusal is not None, f"was not refused: {text}"
    assert refusal.status() == f"StatusCode.{status}", refusal
    assert text in refusal.message(), refusal


def request_of(model, name, text, id, **parameters):
    """The arguments of stream_infer for a request."""
    empty_final = parameters.pop("empty_final", False)
    inputs = [text_input(name, text)]
    return {
        "model_name": model,
        "inputs": inputs,
        "request_id": id,
        "parameters": parameters,
        "enable_empty_final_response": empty_final,
    }


async def one_answer(client):
    assert await client.is_server_live()
    assert await client.is_server_ready()
    assert await client.is_model_ready("storyteller", "1")
    assert not await client.is_model_ready("nobody")
    assert (await client.get_server_metadata(as_json=True))["name"] == "headrace"
    assert (await client.get_model_metadata("identity")).name == "identity"
    assert (await client.get_model_config("chunks")).config.model_transaction_policy.decoupled
    assert (await client.get_inference_statistics("identity")).model_stats[0].name == "identity"
    whole = await client.infer("storyteller", [text_input("text_input", PROMPT)], parameters=GREEDY)
    story = whole.as_numpy("text_output")[0].decode()
    values = np.random.default_rng(0).random((64, 1024), dtype=np.float32)
    tensor = triton.InferInput("x", values.shape, "FP32")
    tensor.set_data_from_numpy(values)
    answers = await asyncio.gather(*(client.infer("identity", [tensor], request_id=str(i)) for i in range(20)))
    for i, answer in enumerate(answers):
        assert answer.get_response().id == str(i)
        assert np.array_equal(answer.as_numpy("x"), values)
    return story


async def refusals(client):
    await refused("NOT_FOUND", "no model 'nobody'", client.infer("nobody", [text_input("INPUT", "x")]))
    bad = client.infer("storyteller", [text_input("text_input", PROMPT)], parameters={"top_p": 2})
    await refused("INVALID_ARGUMENT", "top_p", bad)
    long = client.infer("storyteller", [text_input("text_input", "once " * 1500)])
    await refused("INVALID_ARGUMENT", "the context is 1024", long)
    waits = {"inputs": [text_input("INPUT", "a")], "parameters": {"waits": True}}
    await refused("DEADLINE_EXCEEDED", "", client.infer("chunks", client_timeout=0.3, **waits))


async def stream(client, story):
    requests = [
        request_of("storyteller", "text_input", PROMPT, f"text {i}", empty_final=i == 0, **GREEDY) for i in range(4)
    ]
    requests += [request_of("chunks", "INPUT", "abc" * i, f"chunks {i}", size=2) for i in range(1, 4)]
    requests += [request_of("nobody", "INPUT", "x", "nobody"), request_of("chunks", "INPUT", "x", "chunks", size=1001)]
    requests.append(request_of("chunks", "INPUT", "after", "after", size=9))

    async def each():
        for request in requests:
            yield request

    texts, finals, errors = {}, set(), []
    async for result, error in client.stream_infer(each()):
        if error is not None:
            errors.append(error.message())
            continue
        response = result.get_response()
        for output in response.outputs:
            texts[response.id] = texts.get(response.id, "") + result.as_numpy(output.name)[0].decode()
        if response.parameters["triton_final_response"].bool_param:
            finals.add(response.id)
    assert texts == {
        **{f"text {i}": story for i in range(4)},
        **{f"chunks {i}": "abc" * i for i in range(1, 4)},
        "after": "after",
    }
    assert finals == texts.keys()
    assert sorted(errors) == ["no model 'nobody'", "the model failed on this request"]


async def cancelled(client):
    async def each():
        yield request_of("chunks", "INPUT", "a", "waits", waits=True)
        await asyncio.Event().wait()

    responses = client.stream_infer(each())
    result, error = await anext(aiter(responses))
    assert (error, result.as_numpy("OUTPUT").tolist()) == (None, [b"a"])
    assert responses.cancel()


async def main():
    async with triton.InferenceServerClient(sys.argv[1]) as client:
        story = await one_answer(client)
        await refusals(client)
        await stream(client, story)
        await cancelled(client)
        await client.load_model("spare")
        assert await client.is_model_ready("spare")
        await client.unload_model("spare")
        assert not await client.is_model_ready("spare")
        states = {model.name: model.state for model in (await client.get_model_repository_index()).models}
        assert states["spare"] == "UNAVAILABLE"
        assert await one_answer(client) == story


asyncio.run(main())
print("done")
