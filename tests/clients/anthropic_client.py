"""Anthropic's own client, unmodified, against the model storyteller: GATEWAY.

Run in the clients' environment; prints "done" if every check passed.
"""

import sys
from contextlib import contextmanager

import anthropic

gateway = sys.argv[1]
client = anthropic.Anthropic(base_url=f"http://{gateway}", api_key="any", max_retries=0)
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]
GREEDY = {"model": "storyteller", "messages": MESSAGES, "max_tokens": 24, "extra_body": {"temperature": 0}}
LIMITED = {**GREEDY, "extra_body": {"temperature": 0, "ignore_eos": True}}


@contextmanager
def raises(error_type, kind, text):
    raised = None
    try:
        yield
    except anthropic.APIStatusError as error:
        raised = error
    assert type(raised) is error_type, raised
    assert raised.body["type"] == "error", raised.body
    assert raised.body["error"]["type"] == kind, raised.body
    assert text in raised.body["error"]["message"], raised.body
    assert raised.body["request_id"] == raised.request_id, (raised.body, raised.request_id)


# A whole answer.
whole = client.messages.create(**LIMITED)
(block,) = whole.content
assert (whole.type, whole.role, whole.model, block.type) == ("message", "assistant", "storyteller", "text"), whole
assert whole.id.startswith("msg_"), whole
assert (whole.stop_reason, whole.stop_sequence, whole.usage.output_tokens) == ("max_tokens", None, 24), whole
counted = client.messages.count_tokens(model="storyteller", messages=MESSAGES).input_tokens
assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens, whole
ended = client.messages.create(**{**GREEDY, "max_tokens": 400})
assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None), ended
middle = block.text[10:14]
stopped = client.messages.create(**LIMITED, stop_sequences=[middle])
assert stopped.content[0].text == block.text[: block.text.index(middle)], stopped
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", middle), stopped

# Blocks of text, a system prompt, and turns.
blocks = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
assert client.messages.create(**{**LIMITED, "messages": blocks}).content[0].text == block.text
longer = [*MESSAGES, {"role": "assistant", "content": "Once."}, {"role": "user", "content": "Go on."}]
system = [{"type": "text", "text": "Be brief."}]
assert client.messages.count_tokens(model="storyteller", messages=longer, system=system).input_tokens > counted
sampled = {**GREEDY, "messages": longer, "extra_body": {"top_p": 0.9, "top_k": 20}}
assert client.messages.create(**sampled, system=system).content

# An answer that is begun: the model goes on where it would.
middle = block.text.index(" ", len(block.text) // 2)
begun = [*MESSAGES, {"role": "assistant", "content": block.text[:middle]}]
assert client.messages.create(**{**LIMITED, "messages": begun}).content[0].text.startswith(block.text[middle:])

# The models, in Anthropic's shape.
listed = client.models.list()
assert [model.id for model in listed.data if model.id == "storyteller"] == ["storyteller"], listed
assert (listed.has_more, {model.type for model in listed.data}) == (False, {"model"}), listed
found = client.models.retrieve("storyteller")
assert (found.id, found.created_at.tzinfo is not None, found.max_tokens > 100) == ("storyteller", True, True), found
with raises(anthropic.NotFoundError, "not_found_error", "nobody"):
    client.models.retrieve("nobody")

# A stream.
with client.messages.stream(**LIMITED) as stream:
    events = list(stream)
    final = stream.get_final_message()
kinds = [event.type for event in events]
assert kinds[:2] == ["message_start", "content_block_start"], kinds
assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"], kinds
assert "content_block_delta" in kinds, kinds
assert final.content[0].text == block.text, final
assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 24), final
assert final.usage.input_tokens + final.usage.cache_read_input_tokens == counted, final

# Refusals, by the transformer, in a stream too, and by the gateway.
with raises(anthropic.NotFoundError, "not_found_error", "no model 'nobody'"):
    client.messages.create(**{**GREEDY, "model": "nobody"})
with raises(anthropic.NotFoundError, "not_found_error", "no model 'nobody'"):
    client.messages.create(**{**GREEDY, "model": "nobody"}, stream=True)
tools = [{"name": "f", "input_schema": {"type": "object"}}]
with raises(anthropic.BadRequestError, "invalid_request_error", "has no place for tools"):
    client.messages.create(**GREEDY, tools=tools)
with raises(anthropic.BadRequestError, "invalid_request_error", "has no place for tools"):
    client.messages.count_tokens(model="storyteller", messages=MESSAGES, tools=tools)
with raises(anthropic.BadRequestError, "invalid_request_error", "max_tokens: Field required"):
    client.post("/v1/messages", body={"model": "storyteller", "messages": MESSAGES}, cast_to=object)
call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
with raises(anthropic.BadRequestError, "invalid_request_error", "only a last message of text can be continued"):
    client.messages.create(**{**GREEDY, "messages": [*MESSAGES, {"role": "assistant", "content": [call]}]})
with raises(anthropic.BadRequestError, "invalid_request_error", "x-timeout-ms"):
    client.messages.create(**GREEDY, extra_headers={"x-timeout-ms": "soon"})
with raises(anthropic.NotFoundError, "not_found_error", ""):
    client.post("/v1/messages/batches", body={}, cast_to=object)
print("done")
