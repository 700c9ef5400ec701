"""OpenAI's and Anthropic's own clients, unmodified, with calls that a model must make: GATEWAY, MODEL.

In the Responses API and in the Messages API, whole and streamed. Run in the clients' environment; prints "done" if
every check passed.
"""

import sys
from typing import Literal

import anthropic
import openai
from pydantic import BaseModel, ConfigDict

gateway, model = sys.argv[1:]
responses = openai.OpenAI(base_url=f"http://{gateway}/v1", api_key="any", max_retries=0).responses
messages = anthropic.Anthropic(base_url=f"http://{gateway}", api_key="any", max_retries=0).messages
USER = {"role": "user", "content": "Is it warm in Rome?"}


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Paris"]
    is_warm: bool


SCHEMA = Weather.model_json_schema()
NAMES = ("weather", "time")

# The Responses API; the result goes back by the response's id.
tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]
request = {"model": model, "tools": tools, "temperature": 0, "max_output_tokens": 200, "parallel_tool_calls": False}
for choice, names in (("required", NAMES), ({"type": "function", "name": "time"}, ("time",))):
    whole = responses.create(**request, input=[USER], tool_choice=choice)
    (call,) = whole.output
    Weather.model_validate_json(call.arguments)
    assert (whole.status, call.type, call.name in names) == ("completed", "function_call", True), whole
    with responses.stream(**request, input=[USER], tool_choice=choice) as stream:
        (streamed,) = stream.get_final_response().output
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments), streamed
result = {"type": "function_call_output", "call_id": call.call_id, "output": "Yes."}
after = responses.create(**request, input=[result], previous_response_id=whole.id)
written = responses.create(**request, input=[USER, call.to_dict(), result])
assert after.usage.input_tokens == written.usage.input_tokens > whole.usage.input_tokens, after

# The Messages API.
tools = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
request = {"model": model, "tools": tools, "max_tokens": 200, "extra_body": {"temperature": 0}}
single = {"disable_parallel_tool_use": True}
for choice, names in (({"type": "any"}, NAMES), ({"type": "tool", "name": "time"}, ("time",))):
    whole = messages.create(**request, messages=[USER], tool_choice=choice | single)
    (call,) = whole.content
    Weather.model_validate(call.input)
    assert (whole.stop_reason, call.type, call.name in names) == ("tool_use", "tool_use", True), whole
    with messages.stream(**request, messages=[USER], tool_choice=choice | single) as stream:
        (streamed,) = stream.get_final_message().content
    assert (streamed.name, streamed.input) == (call.name, call.input), streamed
result = {"type": "tool_result", "tool_use_id": call.id, "content": "Yes."}
turns = [USER, {"role": "assistant", "content": [call.to_dict()]}, {"role": "user", "content": [result]}]
counted = messages.count_tokens(model=model, messages=turns, tools=tools).input_tokens
usage = messages.create(**request, messages=turns).usage
assert usage.input_tokens + usage.cache_read_input_tokens == counted, usage
print("done")
