"""The models that OpenAI's API serves, and their descriptions there.

`RequestReader` reads the JSON bodies of requests for them, in a process of their own where they are large.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from google.api.httpbody_pb2 import HttpBody

from headrace.clients import Client
from headrace.errors import InvalidRequestError, NotFoundError, NotReadyError
from headrace.oip.model_description import FINGERPRINT
from headrace.oip.row_outputs import EMBEDDING
from headrace.rpc.limits.admission import head_of_call
from headrace.rpc.server.call_context import CallContext
from headrace_transformer.frontends.openai.requests import (
    IGNORED_FIELDS,
    MAX_BODY_BYTES,
    OpenAIRequest,
    RequestT,
    parse,
    parse_large,
)
from headrace_transformer.generation.pipeline import Pipeline
from headrace_transformer.models.models import PassedModel, RelayedModel, TextModel
from headrace_transformer.processes.body_processes import SMALL_BYTES, BodyProcesses
from headrace_transformer.routing.router import Router

Kind = Literal["generation", "embedding", "classification"]


class OpenAIModels:
    """Owned by the event loop."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._started = int(time.time())

    def cards(self, client: Client) -> list[dict[str, Any]]:
        """All models that are loaded and that the client may use; one that loads is listed when it has."""
        cards = []
        for name in filter(client.may_use, self._router.names):
            try:
                cards.append(self.card(name))
            except (NotFoundError, NotReadyError):
                continue
        return cards

    def card(self, name: str) -> dict[str, Any]:
        """The description of a model; NotFoundError where OpenAI's API has no use for it."""
        model = self._router.find(name)
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
        card = {"id": name, "object": "model", "created": self._started, "owned_by": "headrace", "kind": kind}
        card["max_model_len"] = length  # As vLLM names it.
        if model.name != name:
            card["root"] = model.name  # As vLLM names what is behind another name.
        if isinstance(model, TextModel) and model.base:
            card["parent"] = model.base  # As vLLM names the base of an adapter.
        return card | ({FINGERPRINT: model.fingerprint} if model.fingerprint else {})

    def template_reader(self, name: str) -> Callable[[str], bool]:
        """Whether a model's chat template reads a variable; a model that is not loaded reads all."""
        try:
            model = self._router.find(name)
        except (NotFoundError, NotReadyError):
            return lambda variable: True
        return model.tokenizer.template_reads if isinstance(model, TextModel) else lambda variable: False

    def resolve(self, name: str, client: Client, *kinds: Kind) -> str:
        """The model that a request names, or the only one of these kinds where it names none; raises
        InvalidRequestError."""
        if name:
            return name
        loaded = [card["id"] for card in self.cards(client) if not kinds or card["kind"] in kinds]
        names = loaded or [name for name in self._router.names if client.may_use(name)]
        if len(names) != 1:
            raise InvalidRequestError(f"name a model; there are {', '.join(names) or 'none'}", param="model")
        return str(names[0])


def name_ignored(request: OpenAIRequest) -> None:
    """Names in the head of the answer the fields of a request that have no effect."""
    if ignored := request.ignored_fields():
        head_of_call().add((IGNORED_FIELDS, ", ".join(ignored)))


class RequestReader:
    """Owned by the event loop."""

    def __init__(self, pipeline: Pipeline, bodies: BodyProcesses, models: OpenAIModels) -> None:
        self._pipeline = pipeline
        self._bodies = bodies
        self._models = models

    async def read(self, cls: type[RequestT], request: HttpBody, call: CallContext, *kinds: Kind) -> RequestT:
        """The request in a body, with its model's name; one that is refused is on record."""
        with self._pipeline.recording_refusals(call):
            parsed = await self.parsed(cls, request, call)
            parsed.model = self._models.resolve(parsed.model, call.client, *kinds)
            if parsed.template_hints:
                parsed.name_unread_hints(self._models.template_reader(parsed.model))
        name_ignored(parsed)
        return parsed

    async def parsed(self, cls: type[RequestT], request: HttpBody, call: CallContext) -> RequestT:
        """The request in a body; see `parse`."""
        data = request.data
        if not SMALL_BYTES < len(data) <= MAX_BODY_BYTES:
            return parse(cls, data)
        parsed: tuple[RequestT, bytes] = await self._bodies.run(parse_large, (cls,), data, call.deadline)
        return parsed[0]
