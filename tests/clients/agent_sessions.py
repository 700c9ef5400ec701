"""OpenAI's Agents SDK, pydantic-ai and LangGraph, unmodified, each with a tool and a typed result: GATEWAY.

The model caller answers what its test has written: a call of `weather` first, then the result. Prints "done" if every
check passed.
"""

import asyncio
import sys
from typing import Literal

import agents
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

gateway = f"http://{sys.argv[1]}"
QUESTION = "Is it warm in Rome?"
called = []


class Weather(BaseModel):
    city: Literal["Rome", "Paris"]
    is_warm: bool


def weather(city: str) -> str:
    """Looks the weather of a city up."""
    called.append(city)
    return "28 degrees"


def check(name, result):
    assert result == Weather(city="Rome", is_warm=True), (name, result)
    assert called == ["Rome"], (name, called)
    called.clear()


async def main():
    agents.set_tracing_disabled(True)
    openai = AsyncOpenAI(base_url=f"{gateway}/v1", api_key="any", max_retries=0)
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        agent = agents.Agent(
            name="helper", model=kind("caller", openai), tools=[agents.function_tool(weather)], output_type=Weather
        )
        check(kind.__name__, (await agents.Runner.run(agent, QUESTION)).final_output)
    provider = OpenAIProvider(base_url=f"{gateway}/v1", api_key="any")
    for model in (
        OpenAIResponsesModel("caller", provider=provider),
        OpenAIChatModel("caller", provider=provider),
        AnthropicModel("caller", provider=AnthropicProvider(base_url=gateway, api_key="any")),
    ):
        # It asks Anthropic's API for a form only with models whose names it knows.
        form = PromptedOutput if isinstance(model, AnthropicModel) else NativeOutput
        result = await Agent(model, tools=[weather], output_type=form(Weather)).run(QUESTION)
        check(type(model).__name__, result.output)
    for chat in (
        ChatOpenAI(model="caller", base_url=f"{gateway}/v1", api_key="any", max_retries=0),
        ChatOpenAI(model="caller", base_url=f"{gateway}/v1", api_key="any", max_retries=0, use_responses_api=True),
        ChatAnthropic(model="caller", base_url=gateway, api_key="any", max_retries=0, max_tokens=300),
    ):
        graph = create_agent(chat, [weather], response_format=ProviderStrategy(Weather))
        state = await graph.ainvoke({"messages": [{"role": "user", "content": QUESTION}]})
        check(type(chat).__name__, state["structured_response"])


asyncio.run(main())
print("done")
