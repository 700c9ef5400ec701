"""vLLM's `/tokenize`, `/detokenize` and `/tokenizer_info`: a model's tokenizer for those who have none of their own.

A prompt longer than the context is tokenised too, so that its length is known.
Source of the shapes: vLLM's OpenAI-compatible server.
"""

from __future__ import annotations

from typing import Any

from headrace.deadline import Deadline
from headrace.errors import InvalidRequestError
from headrace_transformer.frontends.openai.text_requests import DetokenizeRequest, TokenizeRequest
from headrace_transformer.generation.preparation import rendered
from headrace_transformer.models.models import RelayedModel, TextModel
from headrace_transformer.processes.body_processes import BodyProcesses
from headrace_transformer.text.tokenizer import Messages, TextTokenizer

MAX_TEXT_BYTES = 1024 * 1024  # About 0.3 s of a tokenizer's thread.


def tokenizer_of(model: object) -> tuple[TextTokenizer, int | None]:
    """A model's tokenizer, and the tokens that its context holds; raises InvalidRequestError."""
    if isinstance(model, TextModel):
        return model.tokenizer, model.limits.context_length
    if isinstance(model, RelayedModel) and model.rows is not None:
        return model.rows.tokenizer, model.rows.context_length
    raise InvalidRequestError("the model takes tensors and has no tokenizer", param="model")


async def tokenize(
    request: TokenizeRequest,
    tokenizer: TextTokenizer,
    context_length: int | None,
    bodies: BodyProcesses,
    deadline: Deadline,
) -> dict[str, Any]:
    if request.prompt is not None:
        text, adds = request.prompt, request.add_special_tokens is not False
    else:
        if request.tools and not tokenizer.answer_syntax.takes_tools:
            raise InvalidRequestError("the chat template of the model has no place for tools", param="tools")
        text = await chat_text(
            request.conversation, request.template_options, tokenizer, bodies, deadline, request.tool_definitions
        )
        adds = request.add_special_tokens is True
    _check_length(text)
    ids = await tokenizer.ids(text, adds)
    strings = await tokenizer.strings(ids) if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": context_length, "tokens": ids, "token_strs": strings}


def detokenize(request: DetokenizeRequest, tokenizer: TextTokenizer) -> dict[str, Any]:
    return {"prompt": tokenizer.backend.decode(request.tokens[0], skip_special_tokens=False)}


async def chat_text(
    messages: Messages,
    options: dict[str, Any],
    tokenizer: TextTokenizer,
    bodies: BodyProcesses,
    deadline: Deadline,
    tools: str = "",
) -> str:
    """The prompt that the chat template makes of messages; raises InvalidRequestError for more than MAX_TEXT_BYTES."""
    if sum(sum(map(len, message)) for message in messages) > MAX_TEXT_BYTES:
        raise _too_long()
    text = await rendered(tokenizer, messages, MAX_TEXT_BYTES, options, bodies, deadline, tools)
    _check_length(text)
    return text


def _check_length(text: str) -> None:
    if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
        raise _too_long()


def _too_long() -> InvalidRequestError:
    return InvalidRequestError(f"the text is longer than {MAX_TEXT_BYTES} bytes")
