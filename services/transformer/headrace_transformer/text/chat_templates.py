"""Chat templates: programs of a model's author that process any messages of callers.

They are rendered in a process of their own, whose time and memory are limited: no signal interrupts `9 ** 9 ** 9`.
"""

import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import orjson
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import InvalidRequestError

_SLOW_S = 0.25
_END = secrets.token_hex(16)  # Stands behind a content that is continued.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Messages of callers may make a template raise any of these.
_ERRORS = (jinja2.TemplateError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)


@contextmanager
def refusals(model: str) -> Iterator[None]:
    """Turns what a template raises into InvalidRequestError."""
    try:
        yield
    except _ERRORS as error:
        raise InvalidRequestError(f"the chat template of {model!r} refuses the messages: {error}") from None


def conversation_of(messages: Iterable[Sequence[str]]) -> list[dict[str, Any]]:
    """Messages, each a role, a content and perhaps further fields as a JSON object, as templates take them.

    The arguments of a call are an object, or the text that a model wrote in its place.
    """
    conversation: list[dict[str, Any]] = []
    for role, content, *fields in messages:
        conversation.append({"role": role, "content": content})
        for field in fields:
            conversation[-1].update(orjson.loads(field))
        for call in conversation[-1].get("tool_calls") or ():
            call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return conversation


def _arguments(value: Any) -> Any:
    """The arguments of a call as an object, or as they are if they are not the text of one."""
    try:
        found = json.loads(value or "{}") if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, dict) else value


def _loosened(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with an object around arguments that are none, for a template that reads nothing else."""
    for message in conversation:
        for call in message.get("tool_calls") or ():
            if not isinstance(call["function"]["arguments"], dict):
                call["function"]["arguments"] = {"arguments": call["function"]["arguments"]}
    return conversation


def render(conversation: bytes, model: str, template: str, variables: Mapping[str, Any]) -> tuple[bool, bytes]:
    """Whether a conversation (JSON of messages and tools) was slow to render, and its prompt; for a body process."""
    messages, tools = orjson.loads(conversation)
    begun_s = time.process_time()
    text = rendered(messages, tools, model, template, variables)
    return time.process_time() - begun_s > _SLOW_S, text.encode()


def rendered(
    messages: Iterable[Sequence[str]], tools: str, model: str, template: str, variables: Mapping[str, Any]
) -> str:
    """The prompt that a template makes of messages and a JSON list of tools, as in transformers; raises
    InvalidRequestError.

    With `continue_final_message` among the variables it ends with the content of the last message, without white space
    at its end if the template trims contents.
    """
    with refusals(model):
        conversation = [_plain(message) for message in conversation_of(messages)]
        options = {"add_generation_prompt": True, **variables}
        is_continued = options.pop("continue_final_message", False) and conversation
        if is_continued:
            conversation[-1]["content"] += _END + " "
        listed = orjson.loads(tools) if tools else None
        given = {"tools": listed, "documents": None, **options}
        for message in conversation:
            if isinstance(content := message.get("content"), str) and _takes_parts(template, message["role"]):
                message["content"] = _as_parts(content)
        try:
            text = _compiled(template).render(messages=conversation, **given)
        except _ERRORS:
            text = _compiled(template).render(messages=_loosened(conversation), **given)
        if not is_continued:
            return text
        begun, end, behind = text.rpartition(_END)
        if not end or _END in begun:
            raise ValueError("the last message is not in the prompt as it is, so it cannot be continued")
        return begun if behind.startswith(" ") else begun.rstrip()


@lru_cache(maxsize=256)
def _takes_parts(template: str, role: str) -> bool:
    """Whether a template writes a role's contents as lists of parts alone, as those of models of images do.

    Beside a message of another role the user's is as the template takes it.
    """
    if "text" not in template:
        return False
    if role not in ("system", "user", "assistant"):  # Of which a template may write nothing without what came before.
        return _takes_parts(template, "user")
    user: list[dict[str, Any]] = []
    if role != "user":
        user = [{"role": "user", "content": _as_parts("x") if _takes_parts(template, "user") else "x"}]
    for content, found in ((_END, False), (_as_parts(_END), True)):
        with suppress(*_ERRORS):
            probe = [{"role": role, "content": content}]
            messages = user + probe if role == "assistant" else probe + user
            if _END in _compiled(template).render(messages=messages, add_generation_prompt=True):
                return found
    return False


def _as_parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message without absent fields, and with its reasoning under each name that templates read."""
    message = {name: value for name, value in message.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Generation(Extension):
    """`{% generation %}`, which marks answers for training; its body is written as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@lru_cache(maxsize=64)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment.from_string(template)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """transformers' filter, whose arguments need no names; Jinja's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)
