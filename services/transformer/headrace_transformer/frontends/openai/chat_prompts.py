"""What the chat template makes a prompt of: messages, tools and variables.

Source: OpenAI's API reference, and vLLM's.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from headrace.errors import InvalidRequestError
from headrace_transformer.frontends.openai.requests import OpenAIRequest, text_of
from headrace_transformer.frontends.openai.tools import (
    MAX_TOOLS,
    CalledFunction,
    TemplateMessage,
    ToolCall,
    Tools,
    template_message,
)

_MAX_TEMPLATE_OPTIONS = 64 * 1024


class Message(BaseModel):
    """One message of a conversation; of content in parts, only text is served.

    `function_call`, and the role `function` of its result, are OpenAI's older way of `tool_calls` and the role `tool`.
    """

    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1)
    content: str = ""
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_TOOLS)
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    function_call: CalledFunction | None = None
    audio: Any = None

    @field_validator("role")
    @classmethod
    def _read_role(cls, value: str) -> str:
        # OpenAI's newer name; chat templates know the older one.
        return "system" if value == "developer" else value

    @field_validator("content", mode="before")
    @classmethod
    def _read_content(cls, value: Any) -> Any:
        return "" if value is None else text_of(value, ("text", "refusal"))

    @field_validator("audio")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        if value:
            raise ValueError("not supported")
        return value

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a message of a tool needs tool_call_id")
        if self.role == "function" and not self.name:
            raise ValueError("a message of a function needs its name")
        if (self.tool_calls or self.function_call) and self.role != "assistant":
            raise ValueError("only the assistant's messages have tool_calls or a function_call")
        if self.tool_calls and self.function_call:
            raise ValueError("function_call is the older way of tool_calls; give one of both")
        return self

    def for_template(self) -> TemplateMessage:
        """The message as a chat template takes it; raises ValueError."""
        reasoning = self.reasoning_content or self.reasoning
        others = {"name": self.name, "refusal": self.refusal}
        role, calls, called = self.role, self.tool_calls or (), self.function_call
        if called is not None:
            calls = [ToolCall(id=_call_id(called.name), function=called)]
        if role == "tool":
            others["tool_call_id"] = self.tool_call_id
        elif role == "function":
            role, others["tool_call_id"] = "tool", _call_id(self.name or "")
        return template_message(role, self.content, calls, reasoning, **others)

    @property
    def unread(self) -> list[str]:
        """The paths of fields that have no effect."""
        return [f"messages.{name}" for name, value in (self.model_extra or {}).items() if value]


class TemplateRequest(OpenAIRequest):
    """A prompt of a chat template; of variables of equal names those of `chat_template_kwargs` count."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def template_options(self) -> dict[str, Any]:
        return {**super().template_options, **self.chat_template_kwargs}

    def check(self) -> None:
        super().check()
        _check_template_options(self.chat_template_kwargs)


class ChatPromptRequest(TemplateRequest):
    """`continue_final_message`: the answer continues the last message. `add_generation_prompt`: it begins a new one."""

    messages: list[Message] = Field(default_factory=list, min_length=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: Tools = ()

    @property
    def template_options(self) -> dict[str, Any]:
        begins = self.add_generation_prompt
        options = {} if begins is None else {"add_generation_prompt": begins}
        if self.continue_final_message:
            options = {"continue_final_message": True, "add_generation_prompt": False}
        return {**options, **super().template_options}

    def check(self) -> None:
        super().check()
        try:
            self._conversation = [message.for_template() for message in self.messages]
        except ValueError as error:
            raise InvalidRequestError(f"messages: {error}", param="messages") from None
        if not self.continue_final_message or not self.messages:
            return
        if self.add_generation_prompt:
            raise InvalidRequestError("not available with add_generation_prompt", param="continue_final_message")
        if self.messages[-1].tool_calls or self.messages[-1].function_call:
            raise InvalidRequestError("only a last message of text can be continued", param="continue_final_message")


def _call_id(name: str) -> str:
    """The id of a call that has none, the same at the call and its result; Mistral's templates want nine characters."""
    return hashlib.blake2b(name.encode(), digest_size=5).hexdigest()[:9]


def _check_template_options(options: Mapping[str, Any]) -> None:
    """Refuses variables of a chat template that are too large, or nested too deep to be rendered or recorded."""
    try:
        size = len(orjson.dumps(options)) if options else 0
    except orjson.JSONEncodeError as error:
        raise InvalidRequestError(f"cannot be written as JSON: {error}", param="chat_template_kwargs") from None
    if size > _MAX_TEMPLATE_OPTIONS:
        raise InvalidRequestError(
            f"more than {_MAX_TEMPLATE_OPTIONS} bytes of JSON are not supported", param="chat_template_kwargs"
        )
