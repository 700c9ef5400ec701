"""What OpenAI's clients send, parsed and checked: the body of a request and its prompts.

Unknown fields are ignored, as OpenAI does, and named in the answer's header `x-ignored-fields`;
fields that are known and not supported here are refused, unless their value asks for nothing. Null is as
good as absent. All raises InvalidRequestError. Source: OpenAI's API reference, and vLLM's for the fields beyond it.
"""

import re
from array import array
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, ValidationInfo, field_validator

from headrace.errors import InvalidRequestError
from headrace.rpc.server.call_context import CallContext
from headrace.sampling import SamplingParameters
from headrace_transformer.frontends.openai.errors import UnsupportedFieldError, fault_of
from headrace_transformer.frontends.openai.nulls import without_nulls
from headrace_transformer.frontends.openai.tools import TemplateMessage
from headrace_transformer.generation.requests import TextRequest, check_bad_words, check_message_count, check_stop
from headrace_transformer.text.answer_grammars import ignored_keywords
from headrace_transformer.text.tools import ToolUse

# Larger than any prompt, its JSON escapes included; parsing more would stop the event loop.
MAX_BODY_BYTES = 8 * 1024 * 1024
_MAX_IDS = 1024 * 1024  # Of one prompt: more than any context.
# Of the fields that no class declares: how many, the characters of a name or a text, and the items of a list.
_MAX_EXTRA, _MAX_NAME, _MAX_ITEMS = 256, 4096, 1024

IGNORED_FIELDS = "x-ignored-fields"
_MAX_IGNORED, _MAX_FIELD_NAME = 16, 64  # What is named of them: a header is short.
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]")

_EFFORT = "reasoning_effort"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

Prompt = str | list[int]
# The parameters of APIs whose answers have no log probabilities, and whose maximum of tokens has a field of its own.
SCORELESS = tuple(
    name for name in SamplingParameters.model_fields if name not in ("max_tokens", "logprobs", "top_logprobs")
)


class OpenAIRequest(BaseModel):
    """A request's body; unknown fields are kept, for some of them are refused. Without a model there is only one."""

    model_config = ConfigDict(extra="allow", strict=True)

    # Unsupported fields, with the values of them that ask for nothing.
    UNSUPPORTED: ClassVar[Mapping[str, Sequence[Any]]] = {}
    # Fields that are read though the class does not declare them.
    READ: ClassVar[frozenset[str]] = frozenset()

    model: str = ""
    # The names, or paths, of what is ignored beside undeclared fields.
    _ignored: list[str] = PrivateAttr(default_factory=list)
    _structured_outputs: str = PrivateAttr("")
    _tool_use: ToolUse | None = PrivateAttr(None)
    _conversation: list[TemplateMessage] = PrivateAttr(default_factory=list)

    @field_validator("*", mode="before")
    @classmethod
    def _read_whole_number(cls, value: Any, info: ValidationInfo) -> Any:
        """A number without a fraction is a whole one, as JavaScript and Lua write them."""
        if not isinstance(value, float) or not value.is_integer():
            return value
        return int(value) if cls.model_fields[info.field_name or ""].annotation in (int, int | None) else value

    @property
    def extra(self) -> dict[str, Any]:
        """The fields that the class does not declare."""
        return self.model_extra or {}

    @property
    def unknown_fields(self) -> dict[str, Any]:
        """The fields that are neither read nor refused."""
        known = self.READ.union(self.UNSUPPORTED)
        return {name: value for name, value in self.extra.items() if name not in known}

    def ignored_fields(self) -> list[str]:
        """The names of fields that have no effect, fit for a header: what is longer or more is cut."""
        names = list(self.unknown_fields)
        names += dict.fromkeys(self._ignored)
        for name in self.__class__.model_fields:
            nested = getattr(self, name)
            if isinstance(nested, BaseModel) and nested.model_extra:
                names += [f"{name}.{inner}" for inner in nested.model_extra]
        return [_NOT_IN_A_NAME.sub("?", name[:_MAX_FIELD_NAME]) for name in names[:_MAX_IGNORED]]

    @property
    def template_hints(self) -> Mapping[str, Any]:
        """Variables of the chat template, by fields of the API for which a template may have no use.

        The variables are an object; a field whose variables the model's template does not read is ignored.
        """
        return {}

    @property
    def template_options(self) -> dict[str, Any]:
        """Variables of the chat template."""
        return {name: value for given in self.template_hints.values() for name, value in given.items()}

    @property
    def conversation(self) -> list[TemplateMessage]:
        """The messages as a chat template takes them."""
        return self._conversation

    def name_unread_hints(self, reads: Callable[[str], bool]) -> None:
        """Adds to the ignored fields those whose variables the chat template does not read."""
        self._ignored += [name for name, given in self.template_hints.items() if not any(map(reads, given))]

    @property
    def tool_use(self) -> ToolUse | None:
        """The functions that the model may call, None for none."""
        return self._tool_use

    def read_tool_use(self, name: str, read: Callable[[], ToolUse | None]) -> None:
        """Keeps the `tool_use`; the field `name` has what may be called."""
        try:
            self._tool_use = read()
        except ValueError as error:
            raise InvalidRequestError(f"{name}: {error}", param=name) from None

    def note_keywords(self) -> None:
        """Adds to the ignored fields the keywords in the schemas of functions that a grammar cannot enforce."""
        tools = self._tool_use
        if tools is None:
            return
        if not (tools.is_required or self._structured_outputs):
            tools = tools.loosened
        try:
            self._ignored += [f"tools.{name}" for name in ignored_keywords(tools)]
        except ValueError as error:
            raise InvalidRequestError(f"tools: {error}", param="tools") from None

    def check(self) -> None:
        """Refuses what the fields' types do not."""
        for name, harmless in self.UNSUPPORTED.items():
            value = self.extra.get(name)
            if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
                raise UnsupportedFieldError(name, value)

    def trim(self) -> None:
        """Checks, and leaves out, what would make a large request more than its texts to take over.

        For a process of bodies: what it returns is unpickled on the way to the event loop. The ids of a prompt become
        an array: they are one object then.
        """
        nested = {name: getattr(self, name) for name in self.__class__.model_fields}
        for name, value in nested.items():
            if isinstance(value, list):
                setattr(self, name, [array("i", item) if isinstance(item, list) else item for item in value])
        for model in (self, *(value for value in nested.values() if isinstance(value, BaseModel))):
            kept = islice((model.model_extra or {}).items(), _MAX_EXTRA)
            extra = {name[:_MAX_NAME]: value if name in self.READ or _is_small(value) else None for name, value in kept}
            model.__pydantic_extra__ = None if model.model_extra is None else extra


RequestT = TypeVar("RequestT", bound=OpenAIRequest)


def parse(cls: type[RequestT], body: bytes) -> RequestT:
    """The request in a JSON body."""
    if len(body) > MAX_BODY_BYTES:
        raise InvalidRequestError(f"the body has {len(body)} bytes, more than any prompt")
    try:
        values = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidRequestError("the body must be a JSON object")
    values = without_nulls(values, cls)
    if isinstance(messages := values.get("messages"), list):
        check_message_count(len(messages))
    try:
        request = cls.model_validate(values)
    except ValidationError as error:
        where, message = fault_of(error)
        raise InvalidRequestError(f"{where}: {message}" if where else message, param=where or None) from None
    request.check()
    return request


def parse_large(body: bytes, cls: type[RequestT]) -> tuple[RequestT, bytes]:
    """`parse` for a process of bodies."""
    request = parse(cls, body)
    request.trim()
    return request, b""


def _is_small(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= _MAX_ITEMS and all(isinstance(item, (int, float)) for item in value)
    return not isinstance(value, dict) and (not isinstance(value, str) or len(value) <= _MAX_NAME)


def read_prompts(value: Any, limit: int) -> list[Prompt]:
    """A text, texts, token ids or lists of them, as a list; at most `limit` prompts; raises ValueError.

    Whether ids are in the vocabulary, the predictor knows.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, token ids, or a list of lists of them")
    if not value:
        raise ValueError("is empty")
    if type(value[0]) is int:
        return [_checked_ids(value)]
    if len(value) > limit:
        raise ValueError(f"has {len(value)} items, at most {limit} are allowed")
    if all(isinstance(item, str) for item in value):
        return list(value)
    if all(isinstance(item, list) for item in value):
        return [_checked_ids(item) for item in value]
    raise ValueError("must be a string, a list of strings, token ids, or a list of lists of them")


def text_of(content: Any, kinds: Container[str] = ("text",), part: str = "part") -> Any:
    """The texts of a list of parts, joined by newlines; any other content as it is; raises ValueError.

    `kinds` are the types of text parts; `part` is what an API calls one, for errors.
    """
    return "\n".join(_text_of_part(one, kinds, part) for one in content) if isinstance(content, list) else content


def _text_of_part(value: Any, kinds: Container[str], part: str) -> str:
    if not isinstance(value, dict) or "type" not in value:
        raise ValueError(f"a {part} of the content must be an object with a type")
    if value["type"] not in kinds:
        raise ValueError(f"{part}s of type {str(value['type'])[:64]!r} are not supported, only text is")
    text = value.get("refusal" if value["type"] == "refusal" else "text")
    if not isinstance(text, str):
        raise ValueError(f"a text {part} must have a text")
    return text


def effort_variables(effort: str | None, name: str) -> dict[str, Any]:
    """What a chat template gets for an effort of reasoning, by the `name` of the field."""
    if effort is None:
        return {}
    return {name: {"enable_thinking": False} if effort == "none" else {"enable_thinking": True, _EFFORT: effort}}


def _checked_ids(ids: list[Any]) -> list[int]:
    if len(ids) > _MAX_IDS:
        raise ValueError(f"has {len(ids)} token ids, more than any context")
    if set(map(type, ids)) - {int}:
        raise ValueError("token ids must be whole numbers")
    if ids and not (min(ids) >= 0 and max(ids) < 2**31):
        raise ValueError("token ids must be from 0 to 2147483647")
    return ids


class SampledRequest(OpenAIRequest):
    """`SAMPLING` are the names of the sampling parameters that are read from the request's undeclared fields."""

    SAMPLING: ClassVar[Sequence[str]] = ()

    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _read_texts(cls, value: Any) -> Any:
        if isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) else value

    def trim(self) -> None:
        SamplingParameters().changed(self.sampling())
        check_stop(self.stop)
        check_bad_words(self.bad_words)
        super().trim()

    def text_request(self, call: CallContext, **own: Any) -> TextRequest:
        """One of its generations; `own` is what not all kinds of request have."""
        return TextRequest(
            call=call,
            model=self.model,
            sampling=self.sampling(),
            stop=self.stop,
            bad_words=self.bad_words,
            ignored_fields=self.ignored_fields(),
            engine_fields=self.unknown_fields,
            **own,
        )

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters given."""
        given = {name: self.extra[name] for name in self.SAMPLING if self.extra.get(name) is not None}
        return given | ({"structured_outputs": self._structured_outputs} if self._structured_outputs else {})
