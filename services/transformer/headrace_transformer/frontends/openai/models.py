"""What OpenAI's API and those beside it have in common: their models, and how they read requests for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.clients import Client
from headrace.errors import InvalidRequestError, NotFoundError, NotReadyError
from headrace.oip.model_description import EMBEDDING, FINGERPRINT
from headrace.rpc.limits.admission import head_of_call
from headrace.rpc.server.call_context import CallContext
from headrace_transformer.frontends.http import Bodies
from headrace_transformer.frontends.openai.requests import (
    IGNORED_FIELDS,
    MAX_BODY_BYTES,
    OpenAIRequest,
    RequestT,
    parse,
    parse_large,
)
from headrace_transformer.frontends.passing import Passing
from headrace_transformer.generation.pipeline import Pipeline
from headrace_transformer.generation.resume_ids import AnswerIdentity, identity_of
from headrace_transformer.models.models import PassedModel, RelayedModel, TextModel
from headrace_transformer.processes.body_processes import SMALL_BYTES, BodyProcesses
from headrace_transformer.routing.router import Router
from headrace_transformer.text.tokenizer import Chat, TextTokenizer

MAX_TEXT_BYTES = 1024 * 1024  # Of a text that is only tokenised: about 0.3 s of a tokenizer's thread.
# A body with more is parsed in a process: its nodes of a JSON schema take longer than its bytes, to 25 ms for 64 KiB.
_FEW_OBJECTS = 128

Kind = Literal["generation", "embedding", "classification"]


@dataclass(eq=False)
class FrontEnd:
    """Owned by the event loop; one for all these APIs.

    After `keep_alive_s` of silence a stream of events gets a comment; 0: never.
    """

    pipeline: Pipeline
    router: Router
    bodies: BodyProcesses
    passing: Passing
    keep_alive_s: float = 15.0
    started: int = field(default_factory=lambda: int(time.time()))

    def cards(self, client: Client) -> list[dict[str, Any]]:
        """All models that are loaded and that the client may use; one that loads is listed when it has."""
        cards = []
        for name in filter(client.may_use, self.router.names):
            try:
                cards.append(self.card(name))
            except (NotFoundError, NotReadyError):
                continue
        return cards

    def card(self, name: str) -> dict[str, Any]:
        """The description of a model; NotFoundError where OpenAI's API has no use for it."""
        model = self.router.find(name)
        kind: Kind
        length: int | None
        if isinstance(model, TextModel):
            kind, length = "generation", model.limits.context_length
        elif isinstance(model, RelayedModel) and model.rows is not None:
            kind = "embedding" if model.rows.output == EMBEDDING else "classification"
            length = model.rows.context_length
        elif isinstance(model, PassedModel):
            kind, length = "generation", model.pool.context_length
        else:
            raise NotFoundError(f"model {name!r} takes tensors; OpenAI's API does not serve it")
        card = {"id": name, "object": "model", "created": self.started, "owned_by": "headrace", "kind": kind}
        card["max_model_len"] = length  # As vLLM names it.
        if model.name != name:
            card["root"] = model.name  # As vLLM names what is behind another name.
        if isinstance(model, TextModel) and model.base:
            card["parent"] = model.base  # As vLLM names the base of an adapter.
        return card | ({FINGERPRINT: model.fingerprint} if model.fingerprint else {})

    def template_reader(self, name: str) -> Callable[[str], bool]:
        """Whether a model's chat template reads a variable; a model that is not loaded reads all."""
        try:
            model = self.router.find(name)
        except (NotFoundError, NotReadyError):
            return lambda variable: True
        return model.tokenizer.template_reads if isinstance(model, TextModel) else lambda variable: False

    def resolve(self, name: str, client: Client, *kinds: Kind) -> str:
        """The model that a request names, or the only one of these kinds where it names none; raises
        InvalidRequestError."""
        if name:
            return name
        loaded = [card["id"] for card in self.cards(client) if not kinds or card["kind"] in kinds]
        names = loaded or [name for name in self.router.names if client.may_use(name)]
        if len(names) != 1:
            raise InvalidRequestError(f"name a model; there are {', '.join(names) or 'none'}", param="model")
        return str(names[0])

    async def tokenizer(self, name: str, call: CallContext) -> tuple[TextTokenizer, int | None]:
        """The tokenizer of a model, of the only one that generates where none is named, and the model's context.

        Raises InvalidRequestError.
        """
        name = self.resolve(name, call.client, "generation")
        model = (await self.router.wait_for(name, "", call)).model
        if isinstance(model, TextModel):
            return model.tokenizer, model.limits.context_length
        if isinstance(model, RelayedModel) and model.rows is not None:
            return model.rows.tokenizer, model.rows.context_length
        raise InvalidRequestError("the model takes tensors and has no tokenizer", param="model")

    async def chat_text(self, tokenizer: TextTokenizer, request: OpenAIRequest, call: CallContext) -> str:
        """The prompt that the chat template makes of a request; InvalidRequestError for one above MAX_TEXT_BYTES."""
        tools = "" if request.tool_use is None else request.tool_use.definitions
        chat = Chat(request.conversation, request.template_options, tools)
        if chat.tools and not tokenizer.answer_syntax.takes_tools:
            raise InvalidRequestError("the chat template of the model has no place for tools", param="tools")
        check_text("".join(part for message in chat.messages for part in message))
        async with call.deadline.scope():
            text = await tokenizer.render(chat, MAX_TEXT_BYTES, self.bodies)
        check_text(text)
        return text

    async def passed(self, body: bytes, path: str, call: CallContext) -> Bodies | None:
        """The answer to a request that an engine gets as it is, None for any other."""
        return await self.passing.found(body, path, call, self.resolve)

    async def read(self, cls: type[RequestT], body: bytes, call: CallContext, *kinds: Kind) -> RequestT:
        """The request in a body, with its model's name; one that is refused is on record."""
        with self.pipeline.recording_refusals(call):
            parsed = await self.parsed(cls, body, call)
            parsed.model = self.resolve(parsed.model, call.client, *kinds)
            if parsed.template_hints:
                parsed.name_unread_hints(self.template_reader(parsed.model))
        name_ignored(parsed)
        return parsed

    async def parsed(self, cls: type[RequestT], body: bytes, call: CallContext) -> RequestT:
        """The request in a body, in a process of bodies where it takes long; see `parse`."""
        if len(body) > MAX_BODY_BYTES or (len(body) <= SMALL_BYTES and body.count(b"{") <= _FEW_OBJECTS):
            return parse(cls, body)
        parsed: tuple[RequestT, bytes] = await self.bodies.run(parse_large, (cls,), body, call.deadline)
        return parsed[0]

    async def identity(
        self, body: bytes, model: str, call: CallContext, last_id: str = "", has_ids: bool = False
    ) -> AnswerIdentity:
        """The identity of the answer to a request; see `identity_of`."""
        with self.pipeline.recording_refusals(call, model):
            return await identity_of(call, body, last_id, signer=self.pipeline.signer, has_ids=has_ids)


def check_text(text: str) -> None:
    """Refuses a text that would take a tokenizer's thread for too long."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
        raise InvalidRequestError(f"the text is longer than {MAX_TEXT_BYTES} bytes")


def name_ignored(request: OpenAIRequest) -> None:
    """Names in the head of the answer the fields of a request that have no effect."""
    if ignored := request.ignored_fields():
        head_of_call().add((IGNORED_FIELDS, ", ".join(ignored)))
