"""What OpenAI's clients send, parsed and checked.

Fields that nobody knows are ignored, as OpenAI does; fields that are known and not supported here
are refused. Source: OpenAI's API reference, and vLLM's for the sampling parameters beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from millrace.errors import InvalidRequestError
from millrace.sampling import SamplingParameters
from services.transformer.calls import check_message_count

# Larger than any prompt, its JSON escapes included; parsing more would stop the event loop.
MAX_BODY_BYTES = 8 * 1024 * 1024

_SAMPLING = tuple(name for name in SamplingParameters.model_fields if name not in ("logprobs", "top_logprobs"))


class StreamOptions(BaseModel):
    include_usage: bool = False


class _Request(BaseModel):
    """What both kinds of completion share."""

    model_config = ConfigDict(extra="allow")

    # Unsupported fields, with the values of them that ask for nothing.
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "n": (1,),
        "logit_bias": ({},),
    }

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters given; null is as good as absent."""
        extra = self.model_extra or {}
        return {name: extra[name] for name in _SAMPLING if extra.get(name) is not None}

    def refuse_unsupported(self) -> None:
        for name, harmless in self.UNSUPPORTED.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
                raise InvalidRequestError(f"{name}={value!r} is not supported")


class CompletionRequest(_Request):
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_Request.UNSUPPORTED,
        "best_of": (1,),
        "echo": (False,),
        "logprobs": (),
        "suffix": ("",),
    }

    prompt: str


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    role: str = Field(min_length=1)
    content: str | list[TextPart] = ""
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None

    @field_validator("tool_calls", "tool_call_id")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        if value:
            raise ValueError("tools are not supported")
        return value

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletionRequest(_Request):
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_Request.UNSUPPORTED,
        "logprobs": (False,),
        "top_logprobs": (0,),
        "audio": (),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "web_search_options": (),
        "tools": ([],),
        "tool_choice": ("none",),
        "functions": ([],),
        "function_call": ("none",),
        "response_format": ({"type": "text"},),
    }

    messages: Sequence[Message] = Field(min_length=1)

    def sampling(self) -> dict[str, Any]:
        given = super().sampling()
        # The newer of two names for the same.
        limit = (self.model_extra or {}).get("max_completion_tokens")
        return given if limit is None else given | {"max_tokens": limit}


RequestT = TypeVar("RequestT", bound=_Request)


def parse(cls: type[RequestT], body: bytes) -> RequestT:
    """The request in a JSON body; raises InvalidRequestError."""
    if len(body) > MAX_BODY_BYTES:
        raise InvalidRequestError(f"the body has {len(body)} bytes, more than any prompt")
    try:
        values = orjson.loads(body)
        if isinstance(values, dict) and isinstance(messages := values.get("messages"), list):
            check_message_count(len(messages))
        request = cls.model_validate(values)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequestError(f"{where}: {first['msg']}" if where else first["msg"]) from None
    request.refuse_unsupported()
    return request
