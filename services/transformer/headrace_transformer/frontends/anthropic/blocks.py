"""Messages in blocks as Anthropic writes them, and the messages of chat templates that they make.

A document and a search result are texts, after their title, source and context. What is given to the model without a
copy for us, such as redacted thinking, is left out. All raises ValueError. Source: Anthropic's API reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_transformer.frontends.openai.requests import text_of
from headrace_transformer.frontends.openai.tools import (
    TemplateMessage,
    ToolCall,
    ToolChoice,
    call_of,
    read_tools,
    template_message,
)
from headrace_transformer.text.tools import ToolFunction

_REDACTED = "redacted_thinking"
_READ = frozenset(("type", "text", "id", "name", "input", "caller", "tool_use_id", "content", "thinking", "signature"))
_READ_OF_DOCUMENTS = frozenset(("source", "title", "context", "data"))
_READ_OF_TOOLS = frozenset(("type", "name", "description", "input_schema", "strict"))
_CHOICES = {
    "auto": ToolChoice(mode="auto"),
    "any": ToolChoice(mode="required"),
    "none": ToolChoice(mode="none"),
}


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
    calls = [_call(block) for block in blocks if _kind(block) == "tool_use"]
    return template_message("assistant", text_of_blocks(texts), calls, reasoning=reasoning)


def _call(block: dict[str, Any]) -> ToolCall:
    return call_of(_string(block, "id"), _string(block, "name"), block.get("input"))


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


def read_declarations(value: Any) -> tuple[ToolFunction, ...]:
    """The tools of a request, which the chat template gets as chat completions have them."""
    return read_tools([_function(*one) for one in enumerate(value)] if isinstance(value, list) else value)


def read_choice(choice: Mapping[str, Any]) -> tuple[ToolChoice, bool]:
    """What the model may call, and whether it may call several at once."""
    kind, name = choice.get("type"), choice.get("name")
    is_single = choice.get("disable_parallel_tool_use", False)
    if not isinstance(is_single, bool):
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
