"""LangChain, LiteLLM, instructor and OpenAI's client, unmodified, with tools and structured output: GATEWAY, MODEL.

The model is of the bundled storyteller's size, with a template that takes tools. It decides nothing by itself, so the
calls are forced. Run in an environment of its own; prints "done" if every check passed.
"""

import json
import sys
from typing import Literal

import instructor
import litellm
import openai
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

gateway, model = sys.argv[1:]
url = f"http://{gateway}/v1"
QUESTION = "Is it warm in Rome?"
USER = {"role": "user", "content": QUESTION}
CITIES = ("Rome", "Paris")
SETTINGS = {"temperature": 0, "max_tokens": 200}


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Paris"]
    is_warm: bool


@tool(args_schema=Weather)
def weather(city: str, is_warm: bool) -> str:
    """Looks the weather of a city up."""
    return f"{city}: {is_warm}"


def checked(arguments):
    found = Weather.model_validate_json(arguments) if isinstance(arguments, str) else Weather.model_validate(arguments)
    assert found.city in CITIES
    return found


# LangChain.
chat = ChatOpenAI(model=model, base_url=url, api_key="any", **SETTINGS)
bound = chat.bind_tools([weather], tool_choice="any")
answer = bound.invoke(QUESTION)
assert answer.tool_calls, answer
assert not answer.invalid_tool_calls
for call in answer.tool_calls:
    assert call["name"] == "weather"
    checked(call["args"])
assert answer.response_metadata["finish_reason"] == "tool_calls"
streamed = None
for chunk in bound.stream(QUESTION):
    streamed = chunk if streamed is None else streamed + chunk
assert [call["args"] for call in streamed.tool_calls] == [call["args"] for call in answer.tool_calls]
results = [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
after = chat.bind_tools([weather]).invoke([HumanMessage(QUESTION), answer, *results])
assert isinstance(after, AIMessage)
assert after.content or after.tool_calls
for method in ("function_calling", "json_schema"):
    found = chat.with_structured_output(Weather, method=method).invoke(QUESTION)
    assert isinstance(found, Weather), found

# LiteLLM.
declared = {"name": "weather", "description": "Looks up.", "parameters": Weather.model_json_schema()}
tools = [{"type": "function", "function": declared}]
request = {
    "model": f"openai/{model}",
    "api_base": url,
    "api_key": "any",
    "messages": [USER],
    "tools": tools,
    **SETTINGS,
}
whole = litellm.completion(tool_choice="required", parallel_tool_calls=False, **request)
(call,) = whole.choices[0].message.tool_calls
checked(call.function.arguments)
chunks = list(litellm.completion(tool_choice="required", parallel_tool_calls=False, stream=True, **request))
rebuilt = litellm.stream_chunk_builder(chunks, messages=[USER])
assert rebuilt.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
assert rebuilt.choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"

described = litellm.completion(response_format=Weather, **{**request, "tools": None})
checked(described.choices[0].message.content)

# instructor.
client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
found = patched.chat.completions.create(model=model, response_model=Weather, messages=[USER], max_retries=0, **SETTINGS)
assert isinstance(found, Weather)
*_, last = patched.chat.completions.create_partial(model=model, response_model=Weather, messages=[USER], **SETTINGS)
assert last.model_dump() == found.model_dump()
described = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
found = described.chat.completions.create(
    model=model, response_model=Weather, messages=[USER], max_retries=0, **SETTINGS
)
assert isinstance(found, Weather)

# OpenAI's client, with its own parsing of strict tools.
parsed = client.chat.completions.parse(
    model=model,
    messages=[USER],
    tools=[openai.pydantic_function_tool(Weather)],
    tool_choice={"type": "function", "function": {"name": "Weather"}},
    **SETTINGS,
)
for call in parsed.choices[0].message.tool_calls:
    assert isinstance(call.function.parsed_arguments, Weather)
with client.chat.completions.stream(
    model=model, messages=[USER], tools=tools, tool_choice="required", parallel_tool_calls=False, **SETTINGS
) as stream:
    kinds = {event.type for event in stream}
    final = stream.get_final_completion()
assert "tool_calls.function.arguments.done" in kinds
(call,) = final.choices[0].message.tool_calls
checked(json.loads(call.function.arguments))
print("done")
