"""OpenAI's own client, unmodified, with the Responses API and the model storyteller: GATEWAY.

Run in the clients' environment; prints "done" if every check passed.
"""

import sys
from contextlib import contextmanager
from typing import Annotated, Literal

import openai
import pydantic

gateway = sys.argv[1]
client = openai.OpenAI(base_url=f"http://{gateway}/v1", api_key="any", max_retries=0)
INPUT = "Tell me a story about a fox."
GREEDY = {"model": "storyteller", "temperature": 0, "max_output_tokens": 24}
LIMITED = {**GREEDY, "extra_body": {"ignore_eos": True}}


@contextmanager
def raises(kind, param, text):
    raised = None
    try:
        yield
    except openai.APIStatusError as error:
        raised = error
    assert type(raised) is kind, raised
    assert raised.param == param, raised
    assert text in raised.message, raised


# A whole answer.
whole = client.responses.create(**LIMITED, input=INPUT)
assert (whole.object, whole.status, whole.model, whole.error) == ("response", "incomplete", "storyteller", None), whole
assert whole.incomplete_details.reason == "max_output_tokens", whole
assert (whole.usage.output_tokens, whole.usage.total_tokens) == (24, whole.usage.input_tokens + 24), whole
assert whole.output[0].role == "assistant", whole
ended = client.responses.create(**{**GREEDY, "max_output_tokens": 400}, input=INPUT)
assert (ended.status, ended.incomplete_details) == ("completed", None), ended
items = [{"role": "user", "content": [{"type": "input_text", "text": INPUT}]}]
assert client.responses.create(**LIMITED, input=items).output_text == whole.output_text

# A stream.
with client.responses.stream(**LIMITED, input=INPUT) as stream:
    events = list(stream)
kinds = [event.type for event in events if event.type != "response.output_text.delta"]
assert kinds == [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.incomplete",
], kinds
assert events[-1].response.output_text == whole.output_text, events[-1]
with client.responses.stream(**{**GREEDY, "max_output_tokens": 400}, input=INPUT) as stream:
    assert stream.get_final_response().output_text == ended.output_text
raw = list(client.responses.create(**GREEDY, input=INPUT, stream=True))
assert [event.sequence_number for event in raw] == list(range(len(raw))), raw
text = "".join(event.delta for event in raw if event.type == "response.output_text.delta")
assert whole.output_text.startswith(text), raw

# A conversation that goes on, without the instructions of its beginning.
first = client.responses.create(**LIMITED, input=INPUT, instructions="Be brief.")
second = client.responses.create(**LIMITED, input="Go on.", previous_response_id=first.id)
turns = [
    {"role": "user", "content": INPUT},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": first.output_text}]},
    {"role": "user", "content": "Go on."},
]
written = client.responses.create(**LIMITED, input=turns)
assert second.usage.input_tokens == written.usage.input_tokens, second
assert second.output_text == written.output_text, second
third = client.responses.create(**LIMITED, input="And then?", previous_response_id=second.id, instructions="Be brief.")
assert third.usage.input_tokens > second.usage.input_tokens + second.usage.output_tokens, third
found = client.responses.retrieve(second.id)
assert (found.id, found.status, found.output_text) == (second.id, "incomplete", second.output_text), found
assert found.usage.output_tokens == 24, found


# The input on record, in pages; a response that is deleted; one that cannot be cancelled.
listed = list(client.responses.input_items.list(third.id, limit=2, order="asc"))
assert [item.type for item in listed] == ["message"] * 5, listed
texts = [INPUT, first.output_text, "Go on.", second.output_text, "And then?"]
assert [item.content[0].text for item in listed] == texts, listed
newest = client.responses.input_items.list(third.id, limit=1)
assert (newest.data[0].content[0].text, newest.has_more) == ("And then?", True), newest
with raises(openai.BadRequestError, "after", "there is no item"):
    client.responses.input_items.list(third.id, after="msg_1")
with raises(openai.BadRequestError, None, "can be cancelled"):
    client.responses.cancel(third.id)
client.responses.delete(third.id)
with raises(openai.NotFoundError, None, "there is no response"):
    client.responses.retrieve(third.id)

# Log probabilities, whole and in events.
scored = {**LIMITED, "input": INPUT, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
scores = client.responses.create(**scored).output[0].content[0].logprobs
assert (len(scores), {len(score.top_logprobs) for score in scores}) == (24, {2}), scores
assert "".join(score.token for score in scores) == whole.output_text, scores
events = list(client.responses.create(**scored, stream=True))
parts = [score.token for event in events if event.type == "response.output_text.delta" for score in event.logprobs]
assert parts == [score.token for score in scores], parts
assert [score.token for score in events[-1].response.output[0].content[0].logprobs] == parts, events[-1]


# An answer of a form.
class Fox(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=12)]
    home: Literal["forest", "hill"]


formed = {"model": "storyteller", "max_output_tokens": 200, "extra_body": {"seed": 7}}
fox = client.responses.parse(**formed, input=INPUT, text_format=Fox)
assert isinstance(fox.output_parsed, Fox), fox
assert (fox.status, fox.text.format.type, fox.text.format.name) == ("completed", "json_schema", "Fox"), fox
with raises(openai.BadRequestError, "text.format", "only one form"):
    both = {"structured_outputs": {"choice": ["a"]}}
    client.responses.create(**GREEDY, input=INPUT, text={"format": {"type": "json_object"}}, extra_body=both)

# Refusals.
private = client.responses.create(**LIMITED, input=INPUT, store=False)
for wrong in (private.id, "resp_1"):
    with raises(openai.BadRequestError, "previous_response_id", "there is no response"):
        client.responses.create(**LIMITED, input="Go on.", previous_response_id=wrong)
with raises(openai.BadRequestError, "tools", "has no place for tools"):
    client.responses.create(**GREEDY, input=INPUT, tools=[{"type": "function", "name": "f", "parameters": {}}])
with raises(openai.BadRequestError, "input.0.content", "'input_image' are not supported"):
    image = {"type": "input_image", "image_url": "https://host/image.png"}
    client.responses.create(**GREEDY, input=[{"role": "user", "content": [image]}])
with raises(openai.NotFoundError, None, "no model 'nobody'"):
    client.responses.create(**{**GREEDY, "model": "nobody"}, input=INPUT, stream=True)
print("done")
