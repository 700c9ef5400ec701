"""OpenAI's own client, unmodified, with tools and reasoning in the Responses API: GATEWAY.

The models caller and thinker answer with what follows the prompt's last "Say: ". Run in the clients' environment;
prints "done" if every check passed.
"""

import json
import sys

import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

client = openai.OpenAI(base_url=f"http://{sys.argv[1]}/v1", api_key="any", max_retries=0)
CALLER = {"model": "caller", "max_output_tokens": 250}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("weather", "time")]
CALLS = [("weather", '{"city": "Rome"}'), ("time", '{"city":"Paris","x":[1]}')]
WRITTEN = [f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in CALLS]


def written(name, arguments):
    """A call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


BOTH = f"Say: I look. {WRITTEN[0]}\n{WRITTEN[1]}"


def streamed(**fields):
    """A streamed response, whose events must fit together and make it."""
    events = list(client.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events))), events
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"], events
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event.to_dict(mode="json"))
        assert "usage" not in event.to_dict().get("response", {}) or event is events[-1], event
    response, items, texts = events[-1].response, [], []
    for event in events[2:-1]:
        if event.type == "response.output_item.added":
            assert (event.output_index, event.item.status) == (len(items), "in_progress"), event
            items.append(event.item)
            texts.append("")
            continue
        assert event.output_index == len(items) - 1, event
        if event.type == "response.output_item.done":
            assert (event.item, event.item.id) == (response.output[event.output_index], items[-1].id), event
            continue
        assert event.item_id == items[-1].id, event
        if event.type.endswith(".delta"):
            texts[-1] += event.delta
        elif event.type == "response.function_call_arguments.done":
            assert event.arguments == texts[-1] == response.output[-1 + len(items)].arguments, event
        elif event.type.endswith("_text.done"):
            assert event.text == texts[-1] == response.output[len(items) - 1].content[0].text, event
    assert len(items) == len(response.output) == len({item.id for item in items}), response
    with client.responses.stream(**fields) as stream:
        accumulated = list(stream)[-1].response
    assert without_ids(accumulated) == without_ids(response), accumulated
    return response


def without_ids(response):
    items = [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) for item in response.output]
    for part in (part for item in items for part in item.get("content") or ()):
        part.pop("parsed", None)
    return response.status, items


def answer(**fields):
    """A whole response; the streamed one must have the same output."""
    whole = client.responses.create(**fields)
    Response.model_validate(whole.to_dict(mode="json"))
    assert whole.usage.input_tokens_details.cache_write_tokens == 0, whole
    assert {tool.strict for tool in whole.tools if tool.type == "function"} <= {False}, whole
    assert without_ids(streamed(**fields)) == without_ids(whole), whole
    return whole


# Calls beside text, and what is left without more than one.
first = answer(**CALLER, input=BOTH, tools=TOOLS)
message, *calls = first.output
assert (first.status, message.type, first.output_text) == ("completed", "message", "I look."), first
assert [(call.type, call.name, call.arguments) for call in calls] == [("function_call", *call) for call in CALLS], first
assert len({call.call_id for call in calls}) == 2, first
assert (first.tool_choice, first.parallel_tool_calls, [tool.name for tool in first.tools]) == (
    "auto",
    True,
    ["weather", "time"],
), first
single = answer(**CALLER, input=BOTH, tools=TOOLS, parallel_tool_calls=False)
assert (len(single.output), single.parallel_tool_calls) == (2, False), single
cut = answer(**{**CALLER, "max_output_tokens": 40}, input=BOTH, tools=TOOLS)
assert (cut.status, cut.output[0].status, cut.output[-1].type) == ("incomplete", "completed", "function_call"), cut
assert cut.output[-1].status == "incomplete", cut
unread = answer(**CALLER, input=BOTH, tools=TOOLS, tool_choice="none")
assert unread.output_text == BOTH.removeprefix("Say: "), unread

# The result of a call goes back, by the response's id and with all items.
results = [{"type": "function_call_output", "call_id": call.call_id, "output": "It rains."} for call in calls]
question = {"role": "user", "content": "Say: It rains in Rome."}
later = {**CALLER, "tools": TOOLS}
by_id = client.responses.create(**later, previous_response_id=first.id, input=[*results, question])
history = [{"role": "user", "content": BOTH}, *(item.to_dict() for item in first.output)]
by_items = client.responses.create(**later, input=[*history, *results, question])
assert by_id.output_text == by_items.output_text == "It rains in Rome.", by_id
found = client.responses.retrieve(first.id)
assert [item.model_dump() for item in found.output] == [item.model_dump() for item in first.output], found
assert [tool.name for tool in found.tools] == ["weather", "time"], found

# Calls that must be made.
for choice in (
    "required",
    {"type": "function", "name": "time"},
    {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]},
):
    forced = client.responses.create(**CALLER, input=BOTH, tools=TOOLS, tool_choice=choice)
    echoed = forced.tool_choice if isinstance(choice, str) else forced.tool_choice.to_dict()
    assert echoed == choice, forced

# Reasoning, before text and before a call, and reasoning that goes back.
thinker = {"model": "thinker", "max_output_tokens": 250}
reasoned = answer(**thinker, input=f"Say: Rome is\nfar.\n</think>\n\n{WRITTEN[0]}", tools=TOOLS)
reasoning, call = reasoned.output
assert (reasoning.type, reasoning.summary, reasoning.content[0].text) == ("reasoning", [], "Rome is\nfar."), reasoned
assert (call.type, json.loads(call.arguments)) == ("function_call", {"city": "Rome"}), reasoned
details = reasoned.usage.output_tokens_details
assert 5 < details.reasoning_tokens < reasoned.usage.output_tokens, reasoned
result = {"type": "function_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "Sun."}]}
question = {"role": "user", "content": "Say: Hm.</think>It is sunny."}
by_id = answer(**thinker, previous_response_id=reasoned.id, input=[result, question], tools=TOOLS)
history = [{"role": "user", "content": f"Say: Rome is\nfar.\n</think>\n\n{WRITTEN[0]}"}]
history += [item.to_dict() for item in reasoned.output]
by_items = answer(**thinker, input=[*history, result, question], tools=TOOLS)
assert [item.type for item in by_id.output] == ["reasoning", "message"], by_id
assert by_id.output_text == by_items.output_text == "It is sunny.", by_id
cut = answer(**{**thinker, "max_output_tokens": 4}, input="Say: Rome is\nfar, so far.</think>Well.")
assert [(item.type, item.status) for item in cut.output] == [("reasoning", "incomplete")], cut
found = client.responses.retrieve(reasoned.id)
assert [item.type for item in found.output] == ["reasoning", "function_call"], found

# What coding agents send: tools of other types, reasoning that goes back alone, fields without effect.
custom = {"type": "custom", "name": "patch", "description": "Edits.", "format": {"type": "text"}}
space = {"type": "namespace", "name": "maps", "description": "Maps.", "tools": [TOOLS[0]]}
several = [custom, space, {"type": "web_search"}, {"type": "local_shell"}]
asked = "Say: " + written("patch", {"input": 'a\n"b"'}) + written("maps__weather", {"city": "Rome"})
edited = answer(**CALLER, input=asked, tools=several)
patch, weather = edited.output
assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", 'a\n"b"'), edited
assert (weather.type, weather.name, weather.namespace) == ("function_call", "weather", "maps"), edited
assert [(tool.type, tool.name) for tool in edited.tools] == [("custom", "patch"), ("namespace", "maps")], edited
given = [
    {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "Done."},
    {"type": "function_call_output", "call_id": weather.call_id, "output": "Sun."},
]
question = {"role": "user", "content": "Say: Edited."}
by_id = client.responses.create(**CALLER, tools=several, previous_response_id=edited.id, input=[*given, question])
history = [{"role": "user", "content": asked}, *(item.to_dict() for item in edited.output)]
assert answer(**CALLER, tools=several, input=[*history, *given, question]).output_text == by_id.output_text == "Edited."
found = client.responses.retrieve(edited.id)
assert [item.to_dict() for item in found.output] == [item.to_dict() for item in edited.output], found
sent = client.responses.with_raw_response.create(
    **thinker,
    input="Say: Rome is far.</think>Well.",
    include=["reasoning.encrypted_content"],
    reasoning={"effort": "high", "summary": "auto"},
    store=False,
    text={"verbosity": "low"},
    prompt_cache_key="k",
)
assert set(sent.headers["x-ignored-fields"].split(", ")) == {"prompt_cache_key", "reasoning.summary", "text.verbosity"}
alone, message = (item.to_dict() for item in sent.parse().output)
history = [{"role": "user", "content": "Rome?"}, alone | {"content": []}, message]
question = {"role": "user", "content": "Say: Hm.</think>It is far."}
assert answer(**thinker, input=[*history, question]).output_text == "It is far."
silent = client.responses.create(**thinker, input="Say: Well.", reasoning={"effort": "none"})
assert [item.type for item in silent.output] == ["message"], silent

# A conversation that is too long is read from a later message on.
turn = [{"role": "user", "content": "A word. " * 40}, {"role": "assistant", "content": "Another."}]
long = {**CALLER, "input": [*turn * 20, {"role": "user", "content": "Say: The end."}]}
assert answer(**long, truncation="auto", instructions="Be brief.").output_text == "The end."

# Refusals.
for fields, param, text in (
    ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools", "'file_search'; only functions"),
    ({"background": True}, "background", "is not supported"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "unknown"}}, "tool_choice", "not among the tools"),
    (long, "", "the context is 1024"),
):
    raised = None
    try:
        client.responses.create(**{**CALLER, "input": BOTH, **fields})
    except openai.BadRequestError as error:
        raised = error
    assert (raised.param or "", text in raised.message) == (param, True), raised
print("done")
