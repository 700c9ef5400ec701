"""Requests for what takes texts and generates nothing: embeddings, and vLLM's `/tokenize` and `/detokenize`.

Apart from what serves them: the processes that parse large bodies import this, and no tokenizer with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from millrace.errors import InvalidRequestError
from services.transformer.frontends.openai.generation_requests import Message, check_template_options
from services.transformer.frontends.openai.requests import OpenAIRequest, Prompt, read_prompts, trimmed_prompts
from services.transformer.frontends.openai.tools import read_tools
from services.transformer.text.tools import ToolFunction, ToolUse

MAX_INPUTS = 2048  # OpenAI's limit.
_MAX_IDS = 128 * 1024  # Decoded in about 10 ms.


class EmbeddingsRequest(OpenAIRequest):
    """A request for the vectors of its inputs."""

    UNSUPPORTED: ClassVar[Mapping[str, Sequence[Any]]] = {"dimensions": (), "truncate_prompt_tokens": ()}

    input: list[Prompt]
    encoding_format: Literal["float", "base64"] = "float"

    @field_validator("input", mode="before")
    @classmethod
    def _read_input(cls, value: Any) -> Any:
        return read_prompts(value, MAX_INPUTS)

    def trim(self) -> None:
        super().trim()
        self.input = trimmed_prompts(self.input)


class TokenizeRequest(OpenAIRequest):
    """A prompt, or messages to be rendered by the chat template, whose token ids are wanted."""

    UNSUPPORTED: ClassVar = {
        "chat_template": (),
        "continue_final_message": (False,),
        "documents": ([],),
        "mm_processor_kwargs": (),
    }

    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None  # By default for prompts: chat templates write their own.
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: tuple[ToolFunction, ...] = ()

    @field_validator("tools", mode="before")
    @classmethod
    def _read_tools(cls, value: Any) -> Any:
        return read_tools(value)

    @property
    def tool_definitions(self) -> str:
        """The tools as a JSON list, "" for none."""
        return ToolUse(self.tools).definitions if self.tools else ""

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either a prompt or messages")
        check_template_options(self.chat_template_kwargs)


class DetokenizeRequest(OpenAIRequest):
    """Token ids whose text is wanted."""

    tokens: list[Prompt]

    @field_validator("tokens", mode="before")
    @classmethod
    def _read_tokens(cls, value: Any) -> Any:
        if not isinstance(value, list) or len(value) > _MAX_IDS:
            raise ValueError(f"must be a list of {_MAX_IDS} token ids at most")
        return read_prompts(value, 1) if value else [[]]

    def check(self) -> None:
        super().check()
        if not isinstance(self.tokens[0], list):
            raise InvalidRequestError("tokens must be token ids", param="tokens")
