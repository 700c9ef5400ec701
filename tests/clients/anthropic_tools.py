"""Anthropic's own client, unmodified, with tools and reasoning: GATEWAY.

The models caller and thinker answer with what follows the prompt's last "Say: ". Run in the clients' environment;
prints "done" if every check passed.
"""

import sys

import anthropic
from pydantic import TypeAdapter

client = anthropic.Anthropic(base_url=f"http://{sys.argv[1]}", api_key="any", max_retries=0)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": name, "description": "A tool.", "input_schema": SCHEMA} for name in ("weather", "time")]
CALLS = [("weather", '{"city": "Rome"}'), ("time", '{"city":"Paris","x":[1]}')]
INPUTS = [("weather", {"city": "Rome"}), ("time", {"city": "Paris", "x": [1]})]
WRITTEN = [f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in CALLS]
BOTH = f"Say: I look. {WRITTEN[0]}\n{WRITTEN[1]}"


def request(text, *before, **fields):
    user = {"role": "user", "content": text}
    return {"model": "caller", "max_tokens": 250, "messages": [*before, user], **fields}


def answer(**fields):
    """A whole message; the streamed one must have the same content, in blocks that follow each other."""
    whole = client.messages.create(**fields)
    events = list(client.messages.create(**fields, stream=True))
    check_fields(anthropic.types.Message, whole)
    for event in events:
        check_fields(anthropic.types.RawMessageStreamEvent, event)
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"]), kinds
    count, is_open = 0, False
    for event in events[1:-2]:
        assert event.index == count, event
        assert is_open == (event.type != "content_block_start"), event
        is_open = event.type != "content_block_stop"
        count += not is_open
    assert (count, is_open) == (len(whole.content), False), events
    with client.messages.stream(**fields) as stream:
        final = stream.get_final_message()
    assert without_ids(final) == without_ids(whole), final
    return whole


def check_fields(kind, received):
    """Every field that the API always has is there, and none is null that the API leaves out."""
    fields = received.to_dict(mode="json")
    TypeAdapter(kind).validate_python(fields)
    blocks = [*fields.get("content", ()), fields.get("content_block", {})]
    assert not any("citations" in block for block in blocks), fields
    for block in blocks:
        assert block.get("type") != "tool_use" or block["caller"] == {"type": "direct"}, block
    for end in (fields, fields.get("delta", {})):
        assert "stop_reason" not in end or end.keys() >= {"stop_sequence", "stop_details"}, end


def without_ids(message):
    return message.stop_reason, [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]


# Calls beside text, and what is left without more than one.
first = answer(**request(BOTH, tools=TOOLS))
text, *calls = first.content
assert (first.stop_reason, text.type, text.text) == ("tool_use", "text", "I look."), first
assert [(call.type, call.name, call.input) for call in calls] == [("tool_use", *call) for call in INPUTS], first
assert len({call.id for call in calls}) == 2, first
single = answer(**request(BOTH, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}))
assert [block.type for block in single.content] == ["text", "tool_use"], single
cut = answer(**request(BOTH, tools=TOOLS, max_tokens=40))
assert (cut.stop_reason, cut.content[-1].type) == ("max_tokens", "tool_use"), cut
unread = answer(**request(BOTH, tools=TOOLS, tool_choice={"type": "none"}))
assert (unread.stop_reason, unread.content[0].text) == ("end_turn", BOTH.removeprefix("Say: ")), unread

first_text = {"type": "text", "text": "You are brief."}

# The results of calls go back.
asked = [{"role": "user", "content": BOTH}, {"role": "assistant", "content": [b.to_dict() for b in first.content]}]
results = [
    {"type": "tool_result", "tool_use_id": calls[0].id, "content": "It rains."},
    {"type": "tool_result", "tool_use_id": calls[1].id, "content": [{"type": "text", "text": "Noon."}]},
    {"type": "text", "text": "Say: It rains in Rome."},
]
after = answer(**request(results, *asked, tools=TOOLS))
assert (after.stop_reason, after.content[0].text) == ("end_turn", "It rains in Rome."), after
counted = [
    client.messages.count_tokens(model="caller", messages=asked[:1], tools=tools).input_tokens for tools in ([], TOOLS)
]
assert counted[1] > counted[0], counted

# Calls that must be made.
for choice in ({"type": "any"}, {"type": "tool", "name": "time", "disable_parallel_tool_use": True}):
    assert client.messages.create(**request(BOTH, tools=TOOLS, tool_choice=choice)).stop_reason == "tool_use"

# Reasoning, before text and before a call, and reasoning that goes back.
question = f"Say: Rome is\nfar.\n</think>\n\n{WRITTEN[0]}"
reasoned = answer(**request(question, model="thinker", tools=TOOLS))
thinking, call = reasoned.content
assert (thinking.type, thinking.thinking, thinking.signature) == ("thinking", "Rome is\nfar.", ""), reasoned
assert (call.type, call.input, reasoned.stop_reason) == ("tool_use", {"city": "Rome"}, "tool_use"), reasoned
asked = [
    {"role": "user", "content": question},
    {"role": "assistant", "content": [b.to_dict() for b in reasoned.content]},
]
result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sun."}
sunny = [result, {"type": "text", "text": "Say: Hm.</think>It is sunny."}]
after = answer(**request(sunny, *asked, model="thinker", tools=TOOLS))
assert [block.type for block in after.content] == ["thinking", "text"], after
assert (after.content[1].text, after.stop_reason) == ("It is sunny.", "end_turn"), after
cut = answer(**request("Say: Rome is\nfar, so far.</think>Well.", model="thinker", max_tokens=4))
assert ([block.type for block in cut.content], cut.stop_reason) == (["thinking"], "max_tokens"), cut

# What coding agents send: thinking in each way, further messages of the system, cached and redacted blocks.
cache = {"cache_control": {"type": "ephemeral"}}
for thinking, said in (("adaptive", "Hm.</think>Well."), ("enabled", "Hm.</think>Well."), ("disabled", "Well.")):
    budget = {"budget_tokens": 1024} if thinking == "enabled" else {}
    sent = client.beta.messages.with_raw_response.create(
        **request(
            [{"type": "text", "text": f"Say: {said}", **cache}], model="thinker", system=[{**first_text, **cache}]
        ),
        thinking={"type": thinking, **budget},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "u"},
        betas=["context-management-2025-06-27"],
    )
    expected = ["text"] if thinking == "disabled" else ["thinking", "text"]
    assert [block.type for block in sent.parse().content] == expected, (thinking, sent.text)
    ignored = set(sent.headers["x-ignored-fields"].split(", "))
    assert {"content.cache_control", "system.cache_control", "context_management", "metadata"} < ignored, ignored
    assert ("thinking.budget_tokens" in ignored) == (thinking == "enabled"), ignored
redacted = {
    "role": "assistant",
    "content": [{"type": "redacted_thinking", "data": "x"}, *reasoned.to_dict()["content"]],
}
later = [{"role": "user", "content": "Rome?"}, redacted, {"role": "user", "content": [result]}]
after = answer(**request("Say: Yes.", *later, {"role": "system", "content": "Be brief."}, tools=TOOLS))
assert after.content[0].text == "Yes.", after

# An answer that is begun, one in a form, of a document, and one that may be longer than the context.
begun = {"role": "assistant", "content": "It is wa"}
assert answer(**{**request("Say: rm."), "messages": [{"role": "user", "content": "Say: rm."}, begun]}), begun
form = {"format": {"type": "json_schema", "schema": SCHEMA}}
assert answer(**request('Say: {"city": "Oslo"}', output_config=form)).content[0].text == '{"city": "Oslo"}'
source = {"type": "text", "media_type": "text/plain", "data": "It rains."}
document = {"type": "document", "source": source, "title": "Rome"}
read = [document, {"type": "text", "text": "Say: It does."}]
assert answer(**request(read, max_tokens=8_000)).content[0].text == "It does.", read

# Refusals.
for fields, text in (
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124'"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "unknown"}}, "not among the tools"),
):
    raised = None
    try:
        client.messages.create(**request(BOTH, **fields))
    except anthropic.BadRequestError as error:
        raised = error
    assert text in raised.body["error"]["message"], raised
print("done")
