"""Requests that pass to engines as they are, with what is ours around them: keys, limits, deadlines, records, retries.

So do all requests for a model whose tokenizer is not here, and those for others at engines that have more than text:
images, audio, calls in a format that is not known here, or log probabilities of prompts.
"""

import re
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
from google.api.httpbody_pb2 import HttpBody

from headrace.clients import Client
from headrace.deadline import Deadline
from headrace.errors import HeadraceError, HopBrokenError, NotReadyError
from headrace.oip.prompt_scores import PROMPT_LOGPROBS
from headrace.payload.call import recorded
from headrace.payload.recording import Recording
from headrace.payload.tap import PayloadTap
from headrace.rpc.client.interceptors import ClientSpan, ClientSpans
from headrace.rpc.server.call_context import CallContext
from headrace_protos.headrace_pb2 import Usage
from headrace_transformer.frontends.http import EVENTS, JSON, Body, Events, one_line
from headrace_transformer.generation.pipeline import Pipeline, report_continuity
from headrace_transformer.generation.recording import MAX_RECORDED_CHARACTERS
from headrace_transformer.generation.token_quota import TokenQuota
from headrace_transformer.models.models import Model, PassedModel, TextModel
from headrace_transformer.predictors import CONTINUITY, RESTARTED, worse
from headrace_transformer.predictors.engines.engine import Engine
from headrace_transformer.predictors.engines.events import EventStream, parsed
from headrace_transformer.predictors.engines.passed_stream import (
    ID_KINDS,
    PassedAnswer,
    RepetitionError,
    has_media,
    renamed,
)
from headrace_transformer.predictors.engines.pools import EnginePool
from headrace_transformer.predictors.oip.client import PredictorClient
from headrace_transformer.predictors.resume.resuming import ENGINE_METHOD
from headrace_transformer.predictors.resume.retries import Backoff
from headrace_transformer.routing.router import Answering, Router

T = TypeVar("T")

_MODEL = re.compile(rb'"model"\s*:\s*"([^"]*)"')
_IN = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*([0-9]{1,9})')
_OUT = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*([0-9]{1,9})')

_COMPLETIONS = ("/completions", "/chat/completions")
_MAX_LOST = 4  # Engines in a row that one request may lose, without a new piece of its answer.
_PROMPTS = ("messages", "prompt", "input", "query")


@dataclass(frozen=True, eq=False)
class Passing:
    """Owned by the event loop; one for all front ends; `models` are those at engines."""

    router: Router
    predictor: PredictorClient
    tap: PayloadTap
    quota: TokenQuota
    pipeline: Pipeline
    models: Collection[str]
    keep_alive_s: float

    async def found(
        self, request: bytes, path: str, call: CallContext, resolve: Callable[[str, Client], str]
    ) -> AsyncGenerator[Body, None] | None:
        """The answer to a request that passes as it is; None for any other.

        `resolve` makes the model's name of the one in the request.
        """
        if not self.models:
            return None
        named = {name.decode(errors="replace") for name in _MODEL.findall(request)} or {""}
        if not any(not name or self.router.may_reach(name, self.models) for name in named):
            return None
        try:
            body = orjson.loads(request)
            name = resolve(body.get("model") or "", call.client)
            if not self.router.may_reach(name, self.models):
                return None
        except (orjson.JSONDecodeError, AttributeError, TypeError, HeadraceError):
            return None  # It is refused by whoever reads it.
        with self.pipeline.recording_refusals(call, name):
            answering = await self.router.wait_for(name, "", call)
        pool = self._pool_for(answering.model, body)
        return None if pool is None else self._answer(answering, pool, body, path, call)

    def _pool_for(self, model: Model, body: dict[str, Any]) -> EnginePool | None:
        """The engines that get the request as it is, None if none does."""
        if isinstance(model, PassedModel):
            return model.pool
        if not isinstance(model, TextModel) or model.pool is None:
            return None
        is_beyond = (
            has_media(body)
            or _scores_prompt(body, model)
            or (bool(body.get("tools")) and not self.pipeline.reads_tools(model))
        )
        return model.pool if is_beyond else None

    async def _answer(
        self, answering: Answering, pool: EnginePool, body: dict[str, Any], path: str, call: CallContext
    ) -> AsyncGenerator[Body, None]:
        prompt, parameters = _recorded(body)
        with recorded(self.tap, call, answering.name, prompt=prompt, parameters=parameters) as recording:
            recording.served_model = answering.served
            asked, n = body.get("max_tokens") or body.get("max_completion_tokens"), body.get("n")
            account = call.account
            async with call.beginning.scope():
                place = await pool.places.take(account.name, account.policy.weight)
            backoff = self.predictor.backoff(call.deadline)
            passed = _PassedCall(answering.name, pool, body, path, recording, backoff, call.first_token)
            limit = max(0, asked) * max(1, n if type(n) is int else 1) if type(asked) is int else 0
            with place, await self.quota.charged(call.client, 0, limit) as reserved:
                if body.get("stream"):
                    yield Events(self.keep_alive_s)
                    events_of = passed.events if path in _COMPLETIONS else passed.raw_events
                    async with aclosing(events_of()) as written:
                        async for events in written:
                            reserved.used = passed.tokens
                            yield HttpBody(content_type=EVENTS, data=events)
                else:
                    data = await passed.whole()
                    reserved.used = passed.tokens
                    yield HttpBody(content_type=JSON, data=data)
            self.router.answered(answering)


@dataclass(eq=False)
class _PassedCall:
    """One request, at as many engines as it takes."""

    model: str
    pool: EnginePool
    body: dict[str, Any]
    path: str
    record: Recording
    backoff: Backoff
    first_token: Deadline
    tokens: int = 0  # As the engine says at the end, until then those that were shown.
    _has_shown: bool = False
    _spans: ClientSpans = field(default_factory=ClientSpans)
    _lost: int = 0
    _lost_in_a_row: int = 0

    async def whole(self) -> bytes:
        """The body of the answer; raises HeadraceError."""
        while True:
            try:
                with closing(self._stream(await self._in_time(self._engine()), self.body)) as stream:
                    data = await self._in_time(stream.whole())
                value = parsed(data)
                break
            except (HopBrokenError, NotReadyError) as error:
                await self._after(error)
        how = RESTARTED if self._lost else ""
        report_continuity(how)
        self.record.continuity = how
        self.record.chunk(_text_of(value))
        self._end(_reason_of(value), value.get("usage"))
        await self.record.flushed()
        return orjson.dumps(value | {"model": self.model}) if value.get("model") else data

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of the answer; raises HeadraceError."""
        answer = PassedAnswer(self.path, self.body, self.model)
        while not answer.is_whole():
            try:
                engine = await self._in_time(self._engine())
                path, body, how = await self._in_time(self._request(engine, answer))
                with closing(self._stream(engine, body, path)) as stream:
                    while not answer.is_whole():
                        written = await self._next(stream, answer)
                        if written and how:
                            written = f": {CONTINUITY}: {how}\n\n".encode() + written
                        if written:
                            await self._reported(how)
                            how = ""
                            yield written
            except (HopBrokenError, NotReadyError) as error:
                await self._after(error)
        self._end(answer.finish_reason, answer.usage)
        yield b"data: [DONE]\n\n"

    async def _request(self, engine: Engine, answer: PassedAnswer) -> tuple[str, dict[str, Any], str]:
        """The path and the body for an engine, and how the answer continues there; "" for a new one."""
        if not self._lost:
            return self.path, answer.first(engine.kind), ""
        text = await engine.text_of(answer.shown_ids(engine.kind))
        return answer.continuing(engine.kind, text, engine.context_length)

    async def raw_events(self) -> AsyncGenerator[bytes, None]:
        """The events of an API that only the engine knows: none can go on after a failure."""
        while True:
            try:
                engine = await self._in_time(self._engine())
                with closing(self._stream(engine, self.body)) as stream:
                    while data := await self._in_time(stream.raw()):
                        self.record.chunk(data.decode(errors="replace"))
                        counts = [max(map(int, found), default=0) for found in (_IN.findall(data), _OUT.findall(data))]
                        self.tokens = max(self.tokens + data.count(b"data:"), sum(counts))
                        await self._reported("" if self._has_shown or not self._lost else RESTARTED)
                        yield renamed(data, engine.served, self.model)
                break
            except (HopBrokenError, NotReadyError) as error:
                if self._has_shown:
                    raise
                await self._after(error)
        self.record.end("OK")

    async def _in_time(self, reading: Coroutine[Any, Any, T]) -> T:
        """The result, before anything was shown within the deadline of the first token."""
        if self._has_shown:
            return await reading
        async with self.first_token.scope():
            return await reading

    async def _next(self, stream: EventStream, answer: PassedAnswer) -> bytes:
        """What comes next, as events for the client; b"" where it has all of it."""
        events = await self._in_time(stream.read())
        pieces: list[tuple[bytes, str]] = []
        try:
            for event in events:
                pieces.append(answer.take(event))
        except HeadraceError as error:
            stream.fail(error)
            if not pieces:
                raise
        if answer.is_whole():
            rest = await stream.rest()
            with suppress(HeadraceError):  # The answer is whole.
                pieces += [answer.take(event) for event in rest]
        written = b"".join(b"data: " + one_line(data) + b"\n\n" for data, _ in pieces if data)
        if written:
            self.tokens += sum(bool(text) for _, text in pieces)  # Nearly: an event is a token or more.
            self.record.chunk("".join(text for _, text in pieces))
        return written

    async def _reported(self, how: str) -> None:
        """Names the continuity of the next piece, before it goes to the client."""
        is_first, self._has_shown = not self._has_shown, True
        report_continuity(how)
        if how:
            self.record.continuity = worse(self.record.continuity, how)
            self.record.resumes += how != RESTARTED
        if how or is_first:
            await self.record.flushed()
        self._lost_in_a_row = 0

    async def _engine(self) -> Engine:
        """The engine for the next attempt, once one answers."""
        await self.pool.until_ready(self.backoff)
        return self.pool.choose(None)

    def _stream(self, engine: Engine, body: dict[str, Any], path: str = "") -> EventStream:
        span = ClientSpan()
        self._spans.begin(ENGINE_METHOD, None, span)
        self.record.answered_by(engine.name)
        return EventStream(engine, path or self.path, {**body, "model": engine.served}, span)

    async def _after(self, error: HeadraceError) -> None:
        """Waits until the next attempt is due; raises the error where there is none."""
        self._lost += 1
        self._lost_in_a_row += isinstance(error, HopBrokenError)
        if isinstance(error, RepetitionError) or self._lost_in_a_row > _MAX_LOST:
            raise error
        await self.backoff.pause(error, error.retry_after_ms)

    def _end(self, reason: str, usage: Any) -> None:
        stated = _usage(usage)
        if stated is not None:
            self.tokens = stated.prompt_tokens + stated.completion_tokens
        self.record.end("OK", finish_reason=reason, usage=stated)


def _scores_prompt(body: dict[str, Any], model: TextModel) -> bool:
    """Whether a request wants log probabilities of its prompt from an engine that has them."""
    with_echo = bool(body.get("echo")) and body.get("logprobs") is not None
    return (with_echo or body.get(PROMPT_LOGPROBS) is not None) and model.facts.get("engine") in ID_KINDS


def _recorded(body: dict[str, Any]) -> tuple[str, str]:
    """The prompt and the parameters for the record."""
    prompts = {name: body[name] for name in _PROMPTS if name in body}
    (prompt,) = prompts.values() if len(prompts) == 1 else (prompts,)
    text = prompt if isinstance(prompt, str) else orjson.dumps(prompt).decode()
    parameters = {name: value for name, value in body.items() if name not in prompts and name != "model"}
    return text[:MAX_RECORDED_CHARACTERS], orjson.dumps(parameters).decode()[:MAX_RECORDED_CHARACTERS]


def _text_of(value: dict[str, Any]) -> str:
    """The text of an answer that is whole, or its JSON where it has other things."""
    with suppress(KeyError, TypeError, AttributeError):
        (choice,) = value["choices"]
        message = choice.get("message") or choice
        text = message.get("content", message.get("text"))
        if isinstance(text, str) and not message.get("tool_calls"):
            return text
    if "choices" in value:
        return orjson.dumps(value["choices"]).decode()
    return ""


def _reason_of(value: dict[str, Any]) -> str:
    with suppress(KeyError, TypeError, AttributeError, IndexError):
        return str(value["choices"][0]["finish_reason"] or "")
    return ""


def _usage(stated: Any) -> Usage | None:
    """The usage that an engine states, None where it states none."""
    if not isinstance(stated, dict):
        return None
    names = (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens"))
    counts = [stated.get(one, stated.get(other)) for one, other in names]
    prompt, completion = (count if isinstance(count, int) and 0 <= count < 1 << 31 else 0 for count in counts)
    return Usage(prompt_tokens=prompt, completion_tokens=completion) if prompt or completion else None
