"""Requests for messages, and for the number of their tokens.

Of content in blocks, text, documents of text, calls of tools, their results and thinking are served; several texts are
joined by newlines. Beside Anthropic's fields those of the sampling table are read. Fields of blocks and of tools that
are not read, such as `cache_control`, are named as ignored. Source: Anthropic's API reference.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from headrace.errors import InvalidRequestError
from headrace_transformer.frontends.openai.chat_prompts import TemplateRequest
from headrace_transformer.frontends.openai.requests import SCORELESS, SampledRequest, text_of
from headrace_transformer.frontends.openai.structured_outputs import structured_outputs_of
from headrace_transformer.frontends.openai.tools import (
    TemplateMessage,
    ToolCall,
    ToolChoice,
    call_of,
    read_tools,
    template_message,
)
from headrace_transformer.text.tools import ToolFunction, ToolUse

_REDACTED = "redacted_thinking"
_READ = frozenset(("type", "text", "id", "name", "input", "caller", "tool_use_id", "content", "thinking", "signature"))
_READ_OF_DOCUMENTS = frozenset(("source", "title", "context", "data"))
_READ_OF_TOOLS = frozenset(("type", "name", "description", "input_schema", "strict"))
_CHOICES = {
    "auto": ToolChoice(mode="auto"),
    "any": ToolChoice(mode="required"),
    "none": ToolChoice(mode="none"),
}


class Turn(BaseModel):
    """One message of the conversation; its content as messages of chat templates."""

    role: Literal["user", "assistant", "system"]
    content: list[TemplateMessage]

    @field_validator("content", mode="before")
    @classmethod
    def _read_content(cls, value: Any, info: ValidationInfo) -> Any:
        role = info.data.get("role", "user")
        if isinstance(value, str):
            return [(role, value)]
        if not isinstance(value, list):
            raise ValueError("must be a string or a list of blocks")
        return messages_of(role, value)


class Thinking(BaseModel):
    """How much the model thinks; with `adaptive` as it does by itself."""

    model_config = ConfigDict(extra="allow")

    type: Literal["enabled", "adaptive", "disabled"]


class OutputConfig(BaseModel):
    """The form of the answer's text."""

    model_config = ConfigDict(extra="allow", strict=True)

    format: dict[str, Any] | None = None


class ConversationRequest(TemplateRequest):
    """A conversation whose next message is the assistant's; also a request for the number of its tokens."""

    UNSUPPORTED: ClassVar[Mapping[str, Sequence[Any]]] = {
        "mcp_servers": ([],),
    }

    messages: list[Turn] = Field(min_length=1)
    system: str = ""
    tool_choice: dict[str, Any] = Field(default_factory=lambda: {"type": "auto"})
    tools: tuple[ToolFunction, ...] = ()
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    unread: tuple[str, ...] = ()  # Of blocks and tools.

    @model_validator(mode="before")
    @classmethod
    def _note_unread(cls, values: Any) -> Any:
        return {**values, "unread": unread_fields(values)}

    @field_validator("tools", mode="before")
    @classmethod
    def _read_tools(cls, value: Any) -> Any:
        # The chat template gets them as chat completions have them.
        return read_tools([_function(*one) for one in enumerate(value)] if isinstance(value, list) else value)

    @field_validator("system", mode="before")
    @classmethod
    def _read_system(cls, value: Any) -> Any:
        return text_of_blocks(value)

    @property
    def template_hints(self) -> Mapping[str, Any]:
        variables = {"enabled": {"enable_thinking": True}, "disabled": {"enable_thinking": False}, "adaptive": {}}
        return {} if self.thinking is None else {"thinking": variables[self.thinking.type]}

    @property
    def template_options(self) -> dict[str, Any]:
        """Variables of the chat template: a last message of the assistant is continued."""
        is_begun = self.conversation[-1][0] == "assistant"
        continued = {"continue_final_message": True, "add_generation_prompt": False} if is_begun else {}
        return {**continued, **super().template_options}

    def _tools(self) -> ToolUse | None:
        choice, is_parallel = read_choice(self.tool_choice)
        return choice.use(self.tools, is_parallel)

    def check(self) -> None:
        super().check()
        self.read_tool_use("tool_choice", self._tools)
        system: list[TemplateMessage] = [("system", self.system)] if self.system else []
        self._conversation = [*system, *_combined(message for turn in self.messages for message in turn.content)]
        self.messages = []
        role, text, *calls = self._conversation[-1]
        if role == "assistant" and (calls or not text.strip()):
            raise InvalidRequestError("only a last message of text can be continued", param="messages")
        self._ignored += self.unread


class MessagesRequest(ConversationRequest, SampledRequest):
    """A request for the assistant's next message."""

    UNSUPPORTED: ClassVar[Mapping[str, Sequence[Any]]] = {**ConversationRequest.UNSUPPORTED, "container": ()}
    READ: ClassVar[frozenset[str]] = frozenset(SCORELESS)
    SAMPLING: ClassVar[Sequence[str]] = SCORELESS

    max_tokens: int = Field(ge=1)
    stream: bool = False
    stop: tuple[str, ...] = Field((), validation_alias="stop_sequences")
    output_format: dict[str, Any] | None = None  # The older place of `output_config.format`.

    def check(self) -> None:
        super().check()
        forms = {"output_format": self.output_format, "structured_outputs": self.extra.get("structured_outputs")}
        if self.output_config is not None:
            forms["output_config.format"] = self.output_config.format
        names = "output_config.format", "output_format"
        self._structured_outputs = structured_outputs_of(forms, *names, ignored=self._ignored)
        self.note_keywords()

    def sampling(self) -> dict[str, Any]:
        return super().sampling() | {"max_tokens": self.max_tokens}


def unread_fields(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The paths of fields of blocks and tools that have no effect."""
    turns = values.get("messages")
    contents = [turn.get("content") for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    blocks = [block for content in contents for block in _dicts(content)]
    blocks += [inner for block in blocks if _kind(block) == "tool_result" for inner in _dicts(block.get("content"))]
    found = [f"content.{_REDACTED}"] if any(_kind(block) == _REDACTED for block in blocks) else []
    places = [("system", _dicts(values.get("system")), _READ), ("content", blocks, _READ | _READ_OF_DOCUMENTS)]
    for place, objects, read in (*places, ("tools", _dicts(values.get("tools")), _READ_OF_TOOLS)):
        found += [f"{place}.{name}" for one in objects for name, value in one.items() if name not in read and value]
    return tuple(dict.fromkeys(found))


def messages_of(role: str, blocks: list[Any]) -> list[TemplateMessage]:
    """The messages that one of Anthropic's makes: each result of a tool is one of its own."""
    return [_answer_of(blocks)] if role == "assistant" else _question_of(role, blocks)


def _combined(messages: Iterable[TemplateMessage]) -> Iterator[TemplateMessage]:
    """The messages, with neighbours of the user or of the assistant as one."""
    for role, group in groupby(messages, itemgetter(0)):
        same = list(group)
        if len(same) == 1 or role not in ("user", "assistant"):
            yield from same
            continue
        fields = [orjson.loads(text) for _, _, *texts in same for text in texts]
        calls = [ToolCall(**call) for one in fields for call in one.get("tool_calls", ())]
        reasoning = "\n".join(one["reasoning_content"] for one in fields if "reasoning_content" in one)
        content = "\n".join(text for _, text, *_ in same if text)
        yield template_message(role, content, calls, reasoning=reasoning)


def text_of_blocks(content: Any) -> str:
    """The texts of blocks, joined by newlines; a text as it is."""
    plain = [_plain(block) for block in content] if isinstance(content, list) else content
    text = text_of(plain, part="block")
    if not isinstance(text, str):
        raise ValueError("must be a string or a list of blocks")
    return text


def _question_of(role: str, blocks: list[Any]) -> list[TemplateMessage]:
    messages: list[TemplateMessage] = []
    texts: list[Any] = []
    for block in blocks:
        if _kind(block) != "tool_result":
            texts.append(block)
            continue
        if texts:
            messages.append((role, text_of_blocks(texts)))
            texts = []
        content = text_of_blocks(block.get("content") or "")
        messages.append(template_message("tool", content, tool_call_id=_string(block, "tool_use_id")))
    return [*messages, (role, text_of_blocks(texts))] if texts or not messages else messages


def _answer_of(blocks: list[Any]) -> TemplateMessage:
    texts = [block for block in blocks if _kind(block) not in ("thinking", _REDACTED, "tool_use")]
    reasoning = "\n".join(_string(block, "thinking") for block in blocks if _kind(block) == "thinking")
    used = (block for block in blocks if _kind(block) == "tool_use")
    calls = [call_of(_string(block, "id"), _string(block, "name"), block.get("input")) for block in used]
    return template_message("assistant", text_of_blocks(texts), calls, reasoning=reasoning)


def _plain(block: Any) -> Any:
    """A block of text for a document or a search result; any other block as it is."""
    kind = _kind(block)
    if kind not in ("document", "search_result"):
        return block
    source, citations = block.get("source"), block.get("citations")
    if isinstance(citations, dict) and citations.get("enabled"):
        raise ValueError(f"citations of a {kind} are not supported")
    if kind == "search_result":
        before, content = [block.get("title"), source], block.get("content")
    else:
        of = source if isinstance(source, dict) else {}
        if (form := of.get("type")) not in ("text", "content"):
            raise ValueError(f"documents of a source of type {str(form)[:64]!r} are not supported, only text is")
        before = [block.get("title"), block.get("context")]
        content = of.get("data" if form == "text" else "content")
    texts = [*filter(None, before), text_of_blocks(content)]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"the title, source and context of a {kind} must be strings")
    return {"type": "text", "text": "\n".join(texts)}


def _dicts(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _string(block: dict[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise ValueError(f"a {block['type']} block must have a {name}, which is a string")
    return value


def read_choice(choice: Mapping[str, Any]) -> tuple[ToolChoice, bool]:
    """What the model may call, and whether it may call several at once."""
    kind, name = choice.get("type"), choice.get("name")
    is_single = choice.get("disable_parallel_tool_use")
    if not isinstance(is_single, bool | None):
        raise ValueError("disable_parallel_tool_use must be true or false")
    if kind == "tool" and isinstance(name, str):
        return ToolChoice(mode="required", names=frozenset([name])), not is_single
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise ValueError("must be of type auto, any or none, or tool with a name")
    return _CHOICES[kind], not is_single


def _function(number: int, tool: Any) -> Any:
    """A tool as chat completions have it."""
    if not isinstance(tool, dict):
        raise ValueError(f"tool {number} is not an object")
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise ValueError(f"tool {number} is of type {str(kind)[:64]!r}; only custom ones are supported")
    if not isinstance(tool.get("input_schema"), dict):
        raise ValueError(f"tool {number}: input_schema must be a JSON schema of an object")
    function = {name: tool.get(name) for name in ("name", "description", "strict")}
    function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
