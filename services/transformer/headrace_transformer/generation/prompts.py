"""The ids of a request's prompt: rendered, tokenised, and cut where the request asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from headrace.deadline import Deadline
from headrace.errors import ContextLengthError, InvalidRequestError
from headrace.sampling import ContextLimits
from headrace_transformer.generation.requests import TextRequest
from headrace_transformer.generation.tool_use import check_tools
from headrace_transformer.models.models import TextModel
from headrace_transformer.processes.body_processes import BodyProcesses
from headrace_transformer.text.answer_syntax import AnswerSyntax
from headrace_transformer.text.tokenizer import Messages, TextTokenizer, check_token_count

_MAX_CUT = 1024 * 1024  # Tokens of a prompt before it is cut; longer ones are refused.


class Prompts:
    """Reads prompts; `syntax` is how a model writes calls and reasoning."""

    def __init__(self, bodies: BodyProcesses, syntax: Callable[[TextModel], AnswerSyntax]) -> None:
        self._bodies = bodies
        self._syntax = syntax

    async def ids(self, request: TextRequest, model: TextModel) -> list[int]:
        """The ids of a prompt; raises InvalidRequestError, ContextLengthError.

        The first choice of a request computes them, other choices wait; an InvalidRequestError is kept for all. The
        list is shared: it must not be changed.
        """
        shared, ids = request.shared, request.shared.ids.get(model.name)
        if ids is None:
            async with shared.lock:
                ids = shared.ids.get(model.name)
                if ids is None:
                    try:
                        ids = await self._cut(request, model)
                    except InvalidRequestError as refusal:
                        ids = refusal
                    shared.ids[model.name] = ids
        if isinstance(ids, InvalidRequestError):
            raise ids
        return ids

    async def _cut(self, request: TextRequest, model: TextModel) -> list[int]:
        if request.drops_messages:
            return await self._newest(request, model)
        if request.truncate_prompt_tokens is None:
            return await self._whole(request, model, model.limits.context_length)
        kept = kept_tokens(request.truncate_prompt_tokens, model.limits, request.sampling.get("max_tokens"))
        return (await self._whole(request, model, _MAX_CUT))[-kept:]

    async def _newest(self, request: TextRequest, model: TextModel) -> list[int]:
        """The ids of as many of the newest messages as leave room for the answer, after the system's first ones.

        They begin with a message of the user, by whom templates expect that a conversation begins.
        """
        messages = request.messages
        head = next((i for i, (role, *_) in enumerate(messages) if role != "system"), len(messages))
        users = [index for index, (role, *_) in enumerate(messages) if role == "user" and index > head]
        most = kept_tokens(-1, model.limits, request.sampling.get("max_tokens"))
        try:
            return await self._whole(request, model, most)
        except ContextLengthError as refusal:
            found: list[int] | ContextLengthError = refusal
        first, last = 0, len(users) - 1
        while first <= last:
            middle = (first + last) // 2
            kept = [*messages[:head], *messages[users[middle] :]]
            try:
                found, last = await self._whole(replace(request, messages=kept), model, most), middle - 1
            except ContextLengthError:
                first = middle + 1
        if isinstance(found, ContextLengthError):
            raise found
        return found

    async def _whole(self, request: TextRequest, model: TextModel, context_length: int) -> list[int]:
        tokenizer = model.tokenizer
        if request.prompt is not None:
            return await tokenizer.encode(request.prompt, context_length, request.add_special_tokens)
        if request.prompt_ids is not None:
            check_token_count(len(request.prompt_ids), context_length)
            return list(request.prompt_ids)
        options, deadline = request.template_options, request.call.deadline
        check_tools(request, model.name, self._syntax(model))
        tools = "" if request.tools is None else request.tools.definitions
        text = await rendered(tokenizer, request.messages, context_length, options, self._bodies, deadline, tools)
        # The template has written the special tokens already.
        return await tokenizer.encode(text, context_length, add_special_tokens=False)


async def rendered(
    tokenizer: TextTokenizer,
    messages: Messages,
    max_tokens: int,
    options: Mapping[str, Any],
    bodies: BodyProcesses,
    deadline: Deadline,
    tools: str,
) -> str:
    """The prompt that the chat template makes of messages.

    Where it refuses them, it gets the texts of all system messages as one before the others: many templates know a
    system message only there, and agents send further ones later.
    """
    try:
        return await tokenizer.render(messages, max_tokens, options, bodies, deadline, tools)
    except ContextLengthError:
        raise
    except InvalidRequestError:
        others = [message for message in messages if message[0] != "system"]
        system = "\n\n".join(message[1] for message in messages if message[0] == "system")
        if list(messages[1:]) == others or not system:
            raise
        return await tokenizer.render([("system", system), *others], max_tokens, options, bodies, deadline, tools)


def kept_tokens(limit: int, limits: ContextLimits, max_tokens: Any) -> int:
    """How many of a prompt's last tokens `truncate_prompt_tokens` keeps.

    -1 stands for as many as leave room for `max_tokens`, or for one, if none is given. Raises InvalidRequestError for a
    limit beyond the context.
    """
    context_length = limits.context_length
    if limit > context_length:
        raise InvalidRequestError(
            f"truncate_prompt_tokens={limit} is more than the context, which is {context_length}",
            param="truncate_prompt_tokens",
        )
    if limit != -1:
        return limit
    if limits.is_encoder_decoder:
        return context_length
    reserved = max_tokens if isinstance(max_tokens, int) else 1
    return max(1, context_length - max(1, reserved))
