"""A stream of an engine that passes as it is, and goes on at another engine after a failure.

An answer of nothing but text goes on from its token ids, where its engine gave them and the next one takes them: they
are asked for, and the client does not get them. It goes on behind the last token whose text was shown, if the engine's
own tokenizer makes that text of the ids; else from its text: the next engine gets the prompt with the text so far, as
an approximation, for text says less than tokens. Any other one (several choices, calls, reasoning, a form, log
probabilities) is asked for again, and what the client has is compared and left out: an engine that repeats itself
continues it exactly, and an answer that comes out as another one ends with an error.

Events pass unchanged in all but the model's name and ids that the client has not asked for; those of a later engine
get the id of the first. Pure. Source: vLLM's `return_token_ids`.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import orjson

from headrace.errors import HopBrokenError
from headrace.oip.prompt_scores import PROMPT_LOGPROBS
from headrace_transformer.predictors import APPROXIMATE, EXACT, RESTARTED
from headrace_transformer.predictors.engines.engine import HOP
from headrace_transformer.predictors.engines.events import parsed
from headrace_transformer.predictors.engines.token_call import FORMS

_CONTINUING_KINDS = ("vllm", "sglang", "headrace")  # They have `continue_final_message`.
ID_KINDS = ("vllm", "headrace")  # They give the ids of text, the text of ids, and log probabilities of prompts.
_LIMITS = ("max_completion_tokens", "max_tokens")
_COMPLETION_TOKENS = 16  # Without max_tokens.
_HEAD = ("id", "object", "created")
_COMPLETIONS = "/completions"
# What else than text an answer may have; what only chats have, or have as another type.
_BEYOND = ("tools", "functions", "structured_outputs", "logprobs", PROMPT_LOGPROBS, "echo", *FORMS)
_OF_CHATS = re.compile(
    "messages|documents|.*tool.*|.*chat_template.*|add_generation_prompt|.*_final_message|.*logprobs|.*reasoning.*"
)
_TEXT_PARTS = ("text", "refusal", "input_text", "output_text", "tool_use", "tool_result", "thinking")
_CONTEXT = 8  # Ids before the answer that decide how its first one is written.

Place = tuple[int, str]  # A choice, and where in it a text is.


class RepetitionError(HopBrokenError):
    """An answer came out as another one when it was asked for again."""


class PassedAnswer:
    """What the client has of one answer to `body` at `path`, whose model it calls `model`."""

    def __init__(self, path: str, body: Mapping[str, Any], model: str) -> None:
        self.finish_reason = ""
        self.usage: Mapping[str, Any] = {}
        self._path = path
        self._body = body
        self._model = model
        self._shown: dict[Place, str] = {}
        self._left: dict[Place, str] = {}  # Of what is asked for again: what the client has.
        self._events = 0
        self._head: dict[str, Any] = {}
        self._begun: set[Place] = set()
        self._ended: set[int] = set()
        self._is_continued = False
        is_beyond = any(map(body.get, _BEYOND)) or has_media(body)
        hides_ids = body.get("include_reasoning") is False  # vLLM leaves out those of what it hides.
        self._may_have_ids = self._choices == 1 and not is_beyond and not hides_ids
        self._is_by_ids = False
        self._prompt_ids: list[int] = []
        self._ids: list[int] = []
        self._shown_ids = 0  # How many of the ids have text that was shown, or are before one that has.

    def is_whole(self) -> bool:
        """Every choice has ended."""
        return len(self._ended) >= self._choices

    @property
    def _choices(self) -> int:
        prompt, n = self._body.get("prompt"), self._body.get("n")
        prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
        return prompts * (n if type(n) is int and n > 0 else 1)

    def first(self, kind: str) -> dict[str, Any]:
        """The request that the first engine gets, and each later one until the answer has begun."""
        self._may_have_ids = self._may_have_ids and kind in ID_KINDS
        return {**self._body, "return_token_ids": True} if self._may_have_ids else dict(self._body)

    def shown_ids(self, kind: str) -> Sequence[int]:
        """Ids whose text, by the tokenizer of an engine of that kind, has to end with `shown`; none if it is no use."""
        usable = self._may_have_ids and kind in ID_KINDS and self._prompt_ids and self._only_text() is not None
        return [*self._prompt_ids[-_CONTEXT:], *self._ids[: self._shown_ids]] if usable else ()

    def continuing(self, kind: str, text_of_ids: str, context_length: int | None) -> tuple[str, dict[str, Any], str]:
        """The path and the request that the next engine gets, and how it continues the answer.

        `text_of_ids` is what the engine's tokenizer makes of `shown_ids`.
        """
        self._is_continued = bool(self._shown or self._begun)
        if not self._shown:
            self._prompt_ids, self._ids, self._shown_ids = [], [], 0
            return self._path, self.first(kind), EXACT if self._is_continued else RESTARTED
        if (text := self._only_text()) is None:
            self._left, self._may_have_ids = dict(self._shown), False
            return self._path, dict(self._body), EXACT
        limit = self._limit(context_length)
        self._is_by_ids = limit is not None and bool(text_of_ids) and text_of_ids.endswith(text)
        if limit is not None and self._is_by_ids:
            return _COMPLETIONS, self._after_ids(limit), EXACT if _is_greedy(self._body) else APPROXIMATE
        self._may_have_ids = False  # The next engine's ids would be those of a part.
        return self._path, self._after(text, kind), APPROXIMATE

    def take(self, data: bytes) -> tuple[bytes, str]:
        """The event that the client gets, b"" for none, and its text; raises HeadraceError."""
        event = parsed(data)
        try:
            written, text = self._take(event, data)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise HopBrokenError("the engine sends an event that is none of a completion", hop=HOP) from None
        return written, text

    def _take(self, event: dict[str, Any], data: bytes) -> tuple[bytes, str]:
        texts, is_new = [], not event.get("choices")
        for choice in event.get("choices") or ():
            index = int(choice["index"])
            if self._is_by_ids:
                choice.pop("prompt_token_ids", None)
            if self._is_by_ids and "messages" in self._body:
                choice["delta"] = {"content": choice.pop("text")}
            new = list(self._unshown(index, choice))
            if self._may_have_ids:
                self._take_ids(event, choice, has_text=bool(new))
            texts += new
            is_new |= bool(new)
            if reason := choice.get("finish_reason"):  # Some servers have "" until the end.
                if any(left for (at, _), left in self._left.items() if at == index):
                    raise _differs()
                self.finish_reason = str(reason)
                self._ended.add(index)
                is_new = True
            elif self._may_have_ids and choice.get("delta") == {} and not self._body.get("return_token_ids"):
                return b"", ""  # vLLM sends it for its ids alone.
        if self._is_by_ids and event.get("usage"):
            prompt, completion = len(self._prompt_ids), len(self._ids)
            counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
            event["usage"] |= counts
        self.usage = event.get("usage") or self.usage
        self._head = self._head or {name: event[name] for name in _HEAD if name in event}
        self._events += bool(texts)
        if self._is_continued:
            if not is_new:
                return b"", ""
            data = orjson.dumps({**event, **self._head, "model": self._model})
        elif self._may_have_ids:
            data = orjson.dumps({**event, "model": self._model})
        elif "model" in event and event["model"] != self._model:
            data = renamed(data, event["model"], self._model)
        return data, "".join(texts)

    def _take_ids(self, event: dict[str, Any], choice: dict[str, Any], has_text: bool) -> None:
        """Keeps the ids of an event, and takes them out where the client has not asked for them."""
        ids = choice.get("token_ids") or []
        if not self._prompt_ids:
            self._prompt_ids = event.get("prompt_token_ids") or choice.get("prompt_token_ids") or []
        self._ids += ids
        if has_text and ids:
            self._shown_ids = len(self._ids)
        for holder, name in ((event, "prompt_token_ids"), (choice, "prompt_token_ids"), (choice, "token_ids")):
            if name in holder and not self._body.get("return_token_ids"):
                holder[name] = None  # As vLLM writes it.

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
        places = [place for _, place in self._shown]
        if any(map(self._body.get, _BEYOND)) or not set(places) <= {"content", "text"} or len(places) != 1:
            return None
        return self._shown[next(iter(self._shown))] if self._choices == 1 else None

    def _limit(self, context_length: int | None) -> int | None:
        """How many tokens the answer may have in all, None if it is not known."""
        stated = next((self._body[name] for name in _LIMITS if isinstance(self._body.get(name), int)), None)
        if stated is not None or "prompt" in self._body:
            return stated or _COMPLETION_TOKENS
        return None if context_length is None else context_length - len(self._prompt_ids)

    def _after_ids(self, limit: int) -> dict[str, Any]:
        """The request to go on behind the last id whose text was shown; those behind it come again."""
        del self._ids[self._shown_ids :]
        kept = {name: value for name, value in self._body.items() if not _OF_CHATS.fullmatch(name)}
        body = kept if "messages" in self._body else dict(self._body)
        for name in ("max_completion_tokens", "truncate_prompt_tokens"):
            body.pop(name, None)
        if isinstance(least := body.get("min_tokens"), int):
            body["min_tokens"] = max(0, least - len(self._ids))
        ids = [*self._prompt_ids, *self._ids]
        return body | {"prompt": ids, "max_tokens": max(1, limit - len(self._ids)), "return_token_ids": True}

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


def has_media(body: Mapping[str, Any]) -> bool:
    """Whether a message has a part that is no text."""
    with suppress(AttributeError, TypeError):
        for message in body.get("messages") or ():
            content = message.get("content")
            if isinstance(content, list) and any(part.get("type") not in _TEXT_PARTS for part in content):
                return True
    return bool(body.get("audio") or (body.get("modalities") or ["text"]) != ["text"])


def _is_greedy(body: Mapping[str, Any]) -> bool:
    """Whether each token follows from those before it alone."""
    return body.get("temperature") == 0 and not (body.get("presence_penalty") or body.get("frequency_penalty"))


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
