"""OpenAI's own client, unmodified, against the models of tests/system/test_openai.py: GATEWAY.

Run in the clients' environment; prints "done" if every check passed.
"""

import asyncio
import json
import re
import sys
from contextlib import contextmanager
from typing import Annotated, Literal

import openai
import pydantic

gateway = sys.argv[1]
url = f"http://{gateway}/v1"
client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]
SLOWLY = {"ignore_eos": True, "pace": 20}  # So an answer of many tokens lasts on every machine.


@contextmanager
def raises(kind, code, param=None, text=""):
    raised = None
    try:
        yield
    except openai.OpenAIError as error:
        raised = error
    assert type(raised) is kind, raised
    assert (raised.code, raised.param) == (code, param), raised
    assert text in raised.message, raised


# Models.
listed = {model.id: model for model in client.models.list()}
generating = dict.fromkeys(("storyteller", "caller", "normalizer"), "generation")
assert {name: model.kind for name, model in listed.items()} == {**generating, "embedder": "embedding"}, listed
assert client.models.retrieve("storyteller").owned_by == "headrace"
for name in ("nobody", "identity"):
    with raises(openai.NotFoundError, "model_not_found", text=name):
        client.models.retrieve(name)


# Completions.
def complete(**fields):
    return client.completions.create(**{"model": "storyteller", "prompt": PROMPT, "seed": 1, **fields})


assert complete(extra_body={"ignore_eos": True}).usage.completion_tokens == 16
answer = complete(max_tokens=20, n=3, extra_body={"ignore_eos": True, "top_k": 40})
assert [choice.index for choice in answer.choices] == [0, 1, 2]
assert len({choice.text for choice in answer.choices}) == 3
assert [choice.finish_reason for choice in answer.choices] == ["length"] * 3
assert answer.usage.completion_tokens == 60
assert answer.usage.prompt_tokens == complete(max_tokens=1).usage.prompt_tokens

greedy = {"temperature": 0, "max_tokens": 8}
first, second = complete(**greedy), complete(prompt="The fox", **greedy)
once, other = first.choices[0].text, second.choices[0].text
both = complete(prompt=[PROMPT, "The fox"], n=2, **greedy)
assert [choice.text for choice in both.choices] == [once, once, other, other]
assert both.usage.prompt_tokens == first.usage.prompt_tokens + second.usage.prompt_tokens
assert both.usage.completion_tokens == 2 * (first.usage.completion_tokens + second.usage.completion_tokens)
assert complete(echo=True, **greedy).choices[0].text == PROMPT + once
stopped = complete(temperature=0, max_tokens=40, stop=once[4:8])
assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (once[: once.index(once[4:8])], "stop")

answer = complete(logprobs=2, **greedy)
logprobs = answer.choices[0].logprobs
assert "".join(logprobs.tokens) == once
assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.text_offset) == 8
assert all(token in top and len(top) == 2 for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))
assert [once[at : at + len(token)] for token, at in zip(logprobs.tokens, logprobs.text_offset, strict=True)] == (
    logprobs.tokens
)

texts, usage, offsets = ["", ""], None, [[], []]
stream = complete(stream=True, n=2, max_tokens=30, logprobs=0, stream_options={"include_usage": True})
for chunk in stream:
    for choice in chunk.choices:
        texts[choice.index] += choice.text
        offsets[choice.index] += choice.logprobs.text_offset
    usage = chunk.usage
whole = complete(n=2, max_tokens=30, logprobs=0)
assert texts == [choice.text for choice in whole.choices]
assert offsets == [choice.logprobs.text_offset for choice in whole.choices]
assert usage.total_tokens == whole.usage.total_tokens

# Events with ids.
stream = complete(stream=True, max_tokens=30, extra_headers={"Accept": "text/event-stream"})
assert "".join(chunk.choices[0].text for chunk in stream) == complete(max_tokens=30).choices[0].text

with raises(openai.NotFoundError, "model_not_found"):
    complete(model="nobody")
with raises(openai.BadRequestError, "unsupported_parameter", "suffix", "suffix='x' is not supported"):
    complete(suffix="x")
echoed = complete(echo=True, logprobs=1).choices[0].logprobs.token_logprobs
assert echoed[0] is None
assert all(logprob < 0 for logprob in echoed[1:])
with raises(openai.BadRequestError, "context_length_exceeded", text="the context is 1024"):
    complete(prompt="once " * 1500)
with raises(openai.BadRequestError, "context_length_exceeded", "max_tokens"):
    complete(max_tokens=5000, stream=True)
with raises(openai.InternalServerError, "deadline_exceeded"):
    complete(max_tokens=1000, extra_body=SLOWLY, extra_headers={"x-timeout-ms": "50"})
stream = complete(max_tokens=1000, stream=True, extra_body=SLOWLY, extra_headers={"x-timeout-ms": "1000"})
chunks = iter(stream)
next(chunks)
with raises(openai.APIError, "deadline_exceeded"):
    for _ in chunks:
        pass


# Chat completions.
def chat(**fields):
    return client.chat.completions.create(**{"model": "storyteller", "messages": MESSAGES, "seed": 1, **fields})


answer = chat(max_completion_tokens=12, logprobs=True, top_logprobs=3, temperature=0)
message, content = answer.choices[0].message, answer.choices[0].logprobs.content
assert message.role == "assistant"
assert "".join(entry.token for entry in content) == message.content
assert all(len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token for entry in content)
assert b"".join(bytes(entry.bytes) for entry in content) == message.content.encode()
parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
assert chat(messages=parts, max_tokens=12, temperature=0).choices[0].message.content == message.content
assert len({choice.message.content for choice in chat(n=4, max_tokens=30).choices}) == 4

texts, roles = ["", "", ""], []
for chunk in chat(stream=True, n=3, max_tokens=30):
    for choice in chunk.choices:
        texts[choice.index] += choice.delta.content or ""
        roles += [choice.delta.role] if choice.delta.role else []
assert texts == [choice.message.content for choice in chat(n=3, max_tokens=30).choices]
assert roles == ["assistant"] * 3

tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
with raises(openai.BadRequestError, "invalid_argument", "tools", "'storyteller' has no place for tools"):
    chat(tools=[tool])
with raises(openai.BadRequestError, "invalid_argument", "messages.0.content", "'image_url' are not supported"):
    chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}])
with raises(openai.BadRequestError, "invalid_argument", text="no chat template; use completions"):
    chat(model="normalizer")
assert complete(model="normalizer", prompt="date: 3 Mar 2021").choices[0].text == "2021-03-03"


# Answers of a form.
class Fox(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=12)]
    age: Annotated[int, pydantic.Field(ge=1, le=15)]
    likes: Annotated[list[Literal["berries", "rain"]], pydantic.Field(max_length=2)]
    home: Literal["forest", "hill"] | None


asked = {"model": "storyteller", "messages": MESSAGES, "seed": 7, "max_tokens": 200}
parsed = client.chat.completions.parse(response_format=Fox, **asked).choices[0]
assert isinstance(parsed.message.parsed, Fox), parsed
assert parsed.finish_reason == "stop"
# Tokens that wait together are one event, so the streams are paced.
with client.chat.completions.stream(response_format=Fox, extra_body={"pace": 50}, **asked) as stream:
    deltas = [event.delta for event in stream if event.type == "content.delta"]
    assert stream.get_final_completion().choices[0].message.parsed == parsed.message.parsed
assert deltas
assert "".join(deltas) == parsed.message.content
answers = {choice.message.content for choice in chat(n=4, extra_body={"guided_choice": ["red", "blue"]}).choices}
assert answers <= {"red", "blue"}
assert isinstance(
    json.loads(chat(response_format={"type": "json_object"}, max_tokens=900).choices[0].message.content), dict
)
assert re.fullmatch("[a-f]{8}", complete(extra_body={"structured_outputs": {"regex": "[a-f]{8}"}}).choices[0].text)
with raises(openai.BadRequestError, "invalid_argument", "structured_outputs", 'Unimplemented keys: ["not"]'):
    schema = {"name": "n", "schema": {"type": "object", "not": {}}, "strict": True}
    chat(response_format={"type": "json_schema", "json_schema": schema})


# Calls of tools, which are forced: the model is the storyteller with another template.
class Trip(pydantic.BaseModel):
    city: Literal["Rome", "Paris"]
    days: Annotated[list[Literal["Monday", "Sunday"]], pydantic.Field(max_length=2)]


asked |= {"model": "caller", "tools": [openai.pydantic_function_tool(Trip)], "tool_choice": "required"}
asked |= {"parallel_tool_calls": False}
answer = client.chat.completions.parse(**asked).choices[0]
assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
(call,) = answer.message.tool_calls
assert isinstance(call.function.parsed_arguments, Trip)
with client.chat.completions.stream(**asked, extra_body={"pace": 50}) as stream:
    kinds = [event.type for event in stream]
    streamed = stream.get_final_completion().choices[0]
assert "tool_calls.function.arguments.done" in kinds
assert streamed.finish_reason == "tool_calls"
assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
messages = [*MESSAGES, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "Sold out."}]
again = client.chat.completions.create(**asked | {"messages": messages, "tool_choice": "auto", "max_tokens": 8})
assert again.choices[0].finish_reason in ("stop", "length")
with raises(openai.BadRequestError, "invalid_argument", "tool_choice", "names 'nothing'"):
    client.chat.completions.create(**asked | {"tool_choice": {"type": "function", "function": {"name": "nothing"}}})

# Embeddings.
inputs = ["the fox sat on the mat", "a bird"]
by_client = client.embeddings.create(model="embedder", input=inputs)  # The client asks for base64 by itself.
by_float = client.embeddings.create(model="embedder", input=inputs, encoding_format="float")
assert [row.index for row in by_client.data] == [0, 1]
for ours, theirs in zip(by_client.data, by_float.data, strict=True):
    assert len(ours.embedding) == 32
    assert all(abs(a - b) < 1e-6 for a, b in zip(ours.embedding, theirs.embedding, strict=True))
assert by_client.usage.prompt_tokens == by_client.usage.total_tokens == 12
with raises(openai.BadRequestError, "invalid_argument", "model", "generates text"):
    client.embeddings.create(model="storyteller", input="text")
with raises(openai.BadRequestError, "context_length_exceeded", "input", "input 1: the prompt has 72 tokens"):
    client.embeddings.create(model="embedder", input=["fox", "fox " * 70])


async def in_parallel():
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as parallel:

        async def story():
            text = ""
            stream = await parallel.completions.create(
                model="storyteller", prompt=PROMPT, stream=True, max_tokens=30, temperature=0
            )
            async for chunk in stream:
                text += chunk.choices[0].text
            return text

        stories = await asyncio.gather(*(story() for _ in range(20)))
        assert set(stories) == {complete(max_tokens=30, temperature=0).choices[0].text}
        with raises(openai.BadRequestError, "unsupported_parameter", "audio"):
            await parallel.chat.completions.create(model="storyteller", messages=MESSAGES, audio={"voice": "a"})
        # After a cancelled stream the connection and the stack serve the next request.
        stream = await parallel.completions.create(
            model="storyteller", prompt=PROMPT, stream=True, max_tokens=900, extra_body=SLOWLY
        )
        async for _ in stream:
            break
        await stream.close()
        assert await story() == stories[0]


asyncio.run(in_parallel())

# KServe's path; its completions and embeddings are in tests/system/test_generate.py and test_encoders.py.
kserve = openai.OpenAI(base_url=f"http://{gateway}/openai/v1", api_key="any", max_retries=0)
assert {model.id for model in kserve.models.list()} == set(listed)
assert kserve.models.retrieve("storyteller").id == "storyteller"
fields = {"model": "storyteller", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
answers = {one.chat.completions.create(**fields).choices[0].message.content for one in (client, kserve)}
assert len(answers) == 1, answers
print("done")
