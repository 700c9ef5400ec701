"""A stream of an engine that passes as it is, and goes on at another engine after a failure.

An answer of nothing but text goes on from its text: the next engine gets the prompt with the text so far, as an
approximation, for text says less than tokens. Any other one (several choices, calls, reasoning, a form, log
probabilities) is asked for again, and what the client has is compared and left out: an engine that repeats itself
continues it exactly, and an answer that comes out as another one ends with an error.

Events pass unparsed in all but the model's name; those of a later engine get the id of the first. Pure.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from headrace.errors import HopBrokenError
from headrace_transformer.predictors.engines.engine import HOP
from headrace_transformer.predictors.engines.events import parsed
from headrace_transformer.predictors.tokens import APPROXIMATE, EXACT, RESTARTED

_CONTINUING_KINDS = ("vllm", "sglang", "headrace")  # They have `continue_final_message`.
_LIMITS = ("max_tokens", "max_completion_tokens")
_HEAD = ("id", "created")

Place = tuple[int, str]  # A choice, and where in it a text is.


class RepetitionError(HopBrokenError):
    """An answer came out as another one when it was asked for again."""


class PassedAnswer:
    """What the client has of one answer to `body`, whose model it calls `model`."""

    def __init__(self, body: Mapping[str, Any], model: str) -> None:
        self.finish_reason = ""
        self.usage: Mapping[str, Any] = {}
        self._body = body
        self._model = model
        self._shown: dict[Place, str] = {}
        self._left: dict[Place, str] = {}  # Of what is asked for again: what the client has.
        self._events = 0
        self._head: dict[str, Any] = {}
        self._begun: set[Place] = set()
        self._ended: set[int] = set()
        self._is_continued = False

    def is_whole(self) -> bool:
        """Every choice has ended."""
        return len(self._ended) >= self._choices

    @property
    def _choices(self) -> int:
        prompt, n = self._body.get("prompt"), self._body.get("n")
        prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
        return prompts * (n if type(n) is int and n > 0 else 1)

    def continuing(self, kind: str) -> tuple[dict[str, Any], str]:
        """The request that the next engine gets, and how it continues the answer."""
        self._is_continued = bool(self._shown or self._begun)
        if not self._is_continued:
            return dict(self._body), RESTARTED
        if (text := self._only_text()) is None:
            self._left = dict(self._shown)
            return dict(self._body), EXACT
        return self._after(text, kind), APPROXIMATE

    def take(self, data: bytes) -> tuple[bytes, str]:
        """The event that the client gets, b"" for none, and its text; raises HeadraceError."""
        event = parsed(data)
        try:
            written, text = self._take(event, data)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise HopBrokenError("the engine sends an event that is none of a completion", hop=HOP) from None
        return written, text

    def _take(self, event: dict[str, Any], data: bytes) -> tuple[bytes, str]:
        self.usage = event.get("usage") or self.usage
        texts, is_new = [], not event.get("choices")
        for choice in event.get("choices") or ():
            index = int(choice["index"])
            new = list(self._unshown(index, choice))
            texts += new
            is_new |= bool(new)
            if reason := choice.get("finish_reason"):  # Some servers have "" until the end.
                if any(left for (at, _), left in self._left.items() if at == index):
                    raise _differs()
                self.finish_reason = str(reason)
                self._ended.add(index)
                is_new = True
        self._head = self._head or {name: event[name] for name in _HEAD if name in event}
        self._events += bool(texts)
        if self._is_continued:
            if not is_new:
                return b"", ""
            data = orjson.dumps({**event, **self._head, "model": self._model})
        elif "model" in event and event["model"] != self._model:
            data = renamed(data, event["model"], self._model)
        return data, "".join(texts)

    def _unshown(self, index: int, choice: dict[str, Any]) -> Iterator[str]:
        """The texts of a choice that the client has not; what it has is taken out of the choice."""
        for place, holder, name in _texts(choice):
            at, given = (index, place), holder[name]
            left = self._left.get(at, "")
            known = given[: len(left)]
            if not left.startswith(known):
                raise _differs()
            if left:
                self._left[at] = left[len(known) :]
                holder[name] = given = given[len(known) :]
            if given:
                self._shown[at] = self._shown.get(at, "") + given
                yield given
        for place, holder in _heads(choice):
            if (index, place) in self._begun and self._is_continued:
                for name in ("id", "type", "role"):
                    holder.pop(name, None)
                holder.get("function", {}).pop("name", None)
            self._begun.add((index, place))

    def _only_text(self) -> str | None:
        """The text so far of an answer that has nothing else; None for any other one."""
        body = self._body
        further = ("tools", "functions", "response_format", "structured_outputs", "logprobs", "echo", "grammar")
        places = [place for _, place in self._shown]
        if any(body.get(name) for name in further) or not set(places) <= {"content", "text"} or len(places) != 1:
            return None
        return self._shown[next(iter(self._shown))] if self._choices == 1 else None

    def _after(self, text: str, kind: str) -> dict[str, Any]:
        body = copy.copy(dict(self._body))
        for name in _LIMITS:
            if isinstance(body.get(name), int):
                body[name] = max(1, body[name] - self._events)
        if isinstance(body.get("prompt"), str):
            return body | {"prompt": body["prompt"] + text}
        if "prompt" in body:
            raise HopBrokenError("the engine was lost, and the answer to token ids cannot go on from text", hop=HOP)
        messages = [*body["messages"], {"role": "assistant", "content": text}]
        options = {"continue_final_message": True, "add_generation_prompt": False} if kind in _CONTINUING_KINDS else {}
        return body | {"messages": messages} | options


def _texts(choice: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The texts of a choice: their place in it, and what holds them by which name."""
    if choice.get("text"):
        yield "text", choice, "text"
    delta = choice.get("delta") or {}
    for name in ("content", "reasoning", "reasoning_content", "refusal"):
        if delta.get(name):
            yield name, delta, name
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        if function.get("arguments"):
            yield f"call {call.get('index', 0)}", function, "arguments"


def _heads(choice: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What begins a message or a call, and is sent once."""
    delta = choice.get("delta") or {}
    if "role" in delta:
        yield "role", delta
    for call in delta.get("tool_calls") or ():
        if call.get("id") or (call.get("function") or {}).get("name"):
            yield f"head of call {call.get('index', 0)}", call


def renamed(data: bytes, served: str, model: str) -> bytes:
    """The events with another name of the model; in a text the quotation marks are escaped."""
    for space in (b"", b" "):
        old = b'"model":' + space + orjson.dumps(served)
        if old in data:
            return data.replace(old, b'"model":' + space + orjson.dumps(model))
    return data


def _differs() -> HopBrokenError:
    return RepetitionError("the engine was lost, and another one does not repeat the answer's beginning", hop=HOP)
