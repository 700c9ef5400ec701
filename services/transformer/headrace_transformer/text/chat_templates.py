"""Chat templates: programs of a model's author that process any messages of callers.

They are rendered in a process of their own, whose time and memory are limited: no signal interrupts `9 ** 9 ** 9`.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import lru_cache
from itertools import takewhile
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
    """Messages, each a role, a content and perhaps further fields as a JSON object, as templates take them."""
    conversation: list[dict[str, Any]] = []
    for role, content, *fields in messages:
        conversation.append({"role": role, "content": content})
        for field in fields:
            conversation[-1].update(orjson.loads(field))
    return conversation


def _arguments(value: Any) -> Any:
    """The arguments of a call as an object, or as they are if they are not the text of one."""
    try:
        found = json.loads(value or "{}") if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, dict) else value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _loosened(value: Any) -> dict[str, Any]:
    """Arguments as an object, with one around what is none, for a template that reads nothing else."""
    found = _arguments(value)
    return found if isinstance(found, dict) else {"arguments": found}


def _with_calls(
    conversation: Sequence[dict[str, Any]], read: Callable[[Any], Any], no_content: str | None
) -> Iterator[dict[str, Any]]:
    """The messages, of those with calls each `read` for its arguments and `no_content` for a content of no text."""
    for message in conversation:
        if calls := message.get("tool_calls"):
            functions = ({**call["function"], "arguments": read(call["function"]["arguments"])} for call in calls)
            calls = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
            message = {**message, "content": message.get("content") or no_content, "tool_calls": calls}
        yield message


def _one_by_one(conversation: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The messages, each with one call at most and its result behind it, for a template of single calls."""
    given: set[int] = set()  # Where the results behind a call are. Ids may come again in later turns, or be empty.
    for at, message in enumerate(conversation):
        calls = message.get("tool_calls") or ()
        results = [*takewhile(lambda place: conversation[place]["role"] == "tool", range(at + 1, len(conversation)))]
        for number, call in enumerate(calls):
            one = message if number == 0 else {"role": message["role"], "content": ""}
            yield {**one, "tool_calls": [call]}
            own = (place for place in results if conversation[place].get("tool_call_id", "") == call.get("id", ""))
            if (place := next((place for place in own if place not in given), None)) is not None:
                given.add(place)
                yield conversation[place]
        if not calls and at not in given:
            yield message


def _thought(message: dict[str, Any]) -> dict[str, Any]:
    """A message with calls whose text is a part of its reasoning."""
    if not (message.get("tool_calls") and message.get("thinking") and message.get("content")):
        return message
    reasoning = f"{message['thinking']}\n{message['content']}"
    return {**message, "content": "", "thinking": reasoning, "reasoning_content": reasoning}


def _written(template: str, conversation: Sequence[dict[str, Any]], given: Mapping[str, Any]) -> str:
    """What a template writes of a conversation in the form in which it reads calls: it may know a single one.

    Some write only the first call of a message, or refuse others, or refuse a text beside both reasoning and calls.
    """
    calls = [call["function"] for message in conversation for call in message.get("tool_calls") or ()]
    single = [*_one_by_one(conversation)]
    errors: list[Exception] = []
    best: tuple[int, str] | None = None
    for messages in (conversation, single, [*map(_thought, single)]) if calls else (conversation,):
        try:
            found = _shortest(template, messages, given, calls)
        except _ERRORS as error:
            errors.append(error)
            continue
        best = found if best is None or found[0] < best[0] else best
        if not best[0] or "tool_calls" not in template:
            break
    if best is None:
        raise errors[0]
    return best[1]


def _shortest(
    template: str, messages: Sequence[dict[str, Any]], given: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]
) -> tuple[int, str]:
    """The shortest text with most of the calls, behind the number of those that it lacks.

    Most templates read arguments as an object, some as a text: they raise, or write an object as Python does. Some
    write calls only beside a content that is null, or beside another an empty message.
    """
    texts, errors = [], []
    for no_content in ("", None) if calls and "none" in template.lower() else ("",):
        found: list[tuple[int, str]] = []
        for read in (_arguments, _text, _loosened) if calls else (_arguments,):
            try:
                text = _compiled(template).render(messages=[*_with_calls(messages, read, no_content)], **given)
            except _ERRORS as error:
                errors.append(error)
                continue
            found.append((sum(not _is_written(call, text) for call in calls), text))
            if not found[-1][0] or "tool_calls" not in template:
                break
        texts += sorted(found, key=lambda one: one[0])[:1]
    if not texts:
        raise errors[0]
    return min(texts, key=lambda one: (one[0], len(one[1])))


def _is_written(call: Mapping[str, Any], text: str) -> bool:
    """Whether a text has a call, whose name alone may be that of a declared tool."""
    arguments = _arguments(call["arguments"])
    if not isinstance(arguments, dict) or not arguments:
        return call["name"] in text
    values = [value for value in arguments.values() if isinstance(value, str)]
    forms = [(value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]) for value in values]
    has_values = all(any(form in text for form in one) for one in forms)
    return call["name"] in text and has_values and str(arguments) not in text


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
        text = _written(template, conversation, given)
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
