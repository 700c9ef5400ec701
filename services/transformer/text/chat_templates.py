"""Chat templates: programs of a model that process any messages of callers.

A small conversation is rendered on the event loop, with a bound on the processor's time; a large one, and any by a
template that once went beyond that bound, in a process of its own, which can be ended.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jinja2
import orjson

from millrace.errors import InvalidRequestError

_MAX_TIME_S = 0.25
# Messages of callers may make a template raise any of these.
_ERRORS = (jinja2.TemplateError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)


class TemplateTimeoutError(Exception):
    """A template takes longer than the event loop can wait."""


@contextmanager
def refusals(model: str) -> Iterator[None]:
    """Turns what a template raises into InvalidRequestError."""
    try:
        yield
    except _ERRORS as error:
        raise InvalidRequestError(f"the chat template of {model!r} refuses the messages: {error}") from None


@contextmanager
def bounded() -> Iterator[None]:
    """Raises TemplateTimeoutError inside the block if that takes too much CPU time.

    By a signal, so only on the main thread, where the event loop runs; anywhere else there is no bound.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(number: int, frame: FrameType | None) -> None:
        raise TemplateTimeoutError

    before = signal.signal(signal.SIGVTALRM, give_up)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, _MAX_TIME_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def conversation_of(messages: Iterable[Sequence[str]]) -> list[dict[str, Any]]:
    """Messages, each a role, a content and perhaps further fields as a JSON object, as templates take them."""
    conversation: list[dict[str, Any]] = []
    for role, content, *fields in messages:
        conversation.append({"role": role, "content": content})
        for field in fields:
            conversation[-1].update(orjson.loads(field))
    return conversation


def render(conversation: bytes, model: str, template: str, variables: Mapping[str, Any]) -> tuple[None, bytes]:
    """Renders a conversation, which is JSON of messages and tools; for a process of bodies."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages, tools = orjson.loads(conversation)
    if tools:
        variables = {**variables, "tools": orjson.loads(tools)}
    with refusals(model):
        rendered: Any = render_jinja_template(
            conversations=[conversation_of(messages)], chat_template=template, **variables
        )
    return None, rendered[0][0].encode()
