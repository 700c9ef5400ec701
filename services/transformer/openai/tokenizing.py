"""vLLM's `/tokenize`, `/detokenize` and `/tokenizer_info`: a model's tokenizer for those who have none of their own.

A prompt longer than the context is tokenised too, to tell its length.
Source of the shapes: vLLM's OpenAI-compatible server.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, field_validator

from millrace.errors import InvalidRequestError
from services.transformer.body_processes import BodyProcesses
from services.transformer.models import RelayedModel, TextModel
from services.transformer.openai.generation_requests import Message, check_template_options
from services.transformer.openai.requests import OpenAIRequest, Prompt, read_prompts
from services.transformer.tokenizer import TextTokenizer

MAX_TEXT_BYTES = 1024 * 1024  # About 0.3 s of a tokenizer's thread.
_MAX_IDS = 128 * 1024  # Decoded in about 10 ms.


class TokenizeRequest(OpenAIRequest):
    """A prompt, or messages to be rendered by the chat template, whose token ids are wanted."""

    UNSUPPORTED: ClassVar = {
        "chat_template": (),
        "continue_final_message": (False,),
        "documents": ([],),
        "mm_processor_kwargs": (),
        "tools": ([],),
    }

    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None  # By default for prompts: chat templates write their own.
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

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


def tokenizer_of(model: object) -> tuple[TextTokenizer, int | None]:
    """A model's tokenizer, and the tokens that its context holds; raises InvalidRequestError."""
    if isinstance(model, TextModel):
        return model.tokenizer, model.limits.context_length
    if isinstance(model, RelayedModel) and model.tokenizer is not None:
        return model.tokenizer, model.context_length
    raise InvalidRequestError("the model takes tensors and has no tokenizer", param="model")


async def tokenize(
    request: TokenizeRequest,
    tokenizer: TextTokenizer,
    context_length: int | None,
    bodies: BodyProcesses,
    timeout_s: float | None,
) -> dict[str, Any]:
    """The answer of `/tokenize`."""
    if request.prompt is not None:
        text, adds = request.prompt, request.add_special_tokens is not False
    else:
        messages = [(message.role, message.content) for message in request.messages or ()]
        if sum(len(content) for _, content in messages) > MAX_TEXT_BYTES:
            raise _too_long()
        options = {"add_generation_prompt": request.add_generation_prompt, **request.chat_template_kwargs}
        text = await tokenizer.render(messages, MAX_TEXT_BYTES, options, bodies, timeout_s)
        adds = request.add_special_tokens is True
    if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
        raise _too_long()
    ids = await tokenizer.ids(text, adds)
    strings = await tokenizer.strings(ids) if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": context_length, "tokens": ids, "token_strs": strings}


def detokenize(request: DetokenizeRequest, tokenizer: TextTokenizer) -> dict[str, Any]:
    """The answer of `/detokenize`."""
    return {"prompt": tokenizer.backend.decode(request.tokens[0], skip_special_tokens=False)}


def _too_long() -> InvalidRequestError:
    return InvalidRequestError(f"the text is longer than {MAX_TEXT_BYTES} bytes")
