"""One generation, from text to text: what every front end calls.

Refuses what can be refused, renders the chat, tokenises, generates at as many predictors as it takes, detokenises,
and records all of it through the tap, which never delays a chunk.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from millrace.errors import InvalidRequestError
from millrace.payload_tap import PayloadTap, Recording
from millrace.protos.millrace_pb2 import Usage
from millrace.recorded_call import Origin, begin, deadline_passed
from millrace.sampling import DEFAULT_MAX_TOKENS
from services.transformer.catalogue import Catalogue
from services.transformer.detokenizer import Detokenizer
from services.transformer.first_token import FirstToken
from services.transformer.generation_telemetry import GenerationCourse, GenerationTelemetry
from services.transformer.models import TextModel
from services.transformer.predictor_client import Generation, PredictorClient, TokenChunk
from services.transformer.resuming import ResumingGenerator
from services.transformer.tokenizer import check_token_count

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_RECORDED_CHARACTERS = 1024 * 1024
_MAX_RECORDED_IDS = 128 * 1024


@dataclass(frozen=True)
class TextRequest:
    """What a front end asks for: one of `prompt`, `prompt_ids` and `messages`, and the sampling parameters given.

    `template_options` are variables of the chat template. Where `sampling` has no max_tokens,
    `default_max_tokens` or what the context has left counts. `timeout_s` is what the caller's deadline
    had left when the request arrived; None is no deadline. The first-token deadline is in the origin's metadata.
    """

    origin: Origin
    model: str
    prompt: str | None = None
    prompt_ids: Sequence[int] | None = None
    messages: Sequence[tuple[str, str]] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    default_max_tokens: int = DEFAULT_MAX_TOKENS
    stop: Sequence[str] = ()
    version: str = ""
    timeout_s: float | None = None


@dataclass(frozen=True)
class TextChunk:
    """New text and the token ids behind it; the last one has `finish_reason` and `usage`.

    `logprobs` has one for each id where asked for, and so has `top_logprobs`: the likeliest tokens
    there with their log probabilities, best first. `prompt_tokens` is the same in every chunk.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    finish_reason: str | None = None
    usage: Usage | None = None
    elapsed_s: float = 0.0  # Since the request arrived.
    prompt_tokens: int = 0


def joined(chunks: Sequence[TextChunk]) -> TextChunk:
    """A whole answer as one chunk."""
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
        logprobs=[logprob for chunk in chunks for logprob in chunk.logprobs],
        top_logprobs=[top for chunk in chunks for top in chunk.top_logprobs],
    )


class Pipeline:
    """Owned by the event loop; one for all requests."""

    def __init__(
        self, catalogue: Catalogue, predictor: PredictorClient, generator: ResumingGenerator, tap: PayloadTap
    ) -> None:
        self._catalogue = catalogue
        self._predictor = predictor
        self._generator = generator
        self._tap = tap
        self._telemetry = GenerationTelemetry()

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextChunk, None]:
        """The chunks of one answer; raises MillraceError; closing the generator cancels the request."""
        origin, timeout_s = request.origin, request.timeout_s
        prompt, parameters = _recorded_prompt(request), _recorded_parameters(request)
        with (
            self._telemetry.generation(origin, bool(request.messages), timeout_s) as course,
            begin(self._tap, origin, request.model, prompt=prompt, parameters=parameters) as recording,
        ):
            try:
                first_token = FirstToken(origin)
                made = self._generate(request, first_token, recording, course)
                async with aclosing(made), aclosing(first_token.bound(made)) as chunks:
                    async for chunk in chunks:
                        course.chunk(len(chunk.token_ids), chunk.elapsed_s, chunk.prompt_tokens, chunk.finish_reason)
                        recording.chunk(chunk.text, chunk.token_ids, chunk.logprobs)
                        if chunk.finish_reason is not None:
                            recording.end("OK", finish_reason=chunk.finish_reason, usage=chunk.usage)
                        # What a client has seen begin is on record, even if this process dies now.
                        await recording.begun()
                        yield chunk
            except (asyncio.CancelledError, GeneratorExit):
                if deadline_passed(origin.arrived, timeout_s):
                    recording.end("DEADLINE_EXCEEDED", "the deadline passed")
                raise

    @contextmanager
    def recording_refusals(self, origin: Origin, model: str = "") -> Iterator[None]:
        """Records what a front end refuses before it has made a TextRequest of it."""
        try:
            yield
        except Exception:
            with begin(self._tap, origin, model):
                raise

    async def _generate(
        self, request: TextRequest, first_token: FirstToken, recording: Recording, course: GenerationCourse
    ) -> AsyncGenerator[TextChunk, None]:
        arrived = request.origin.arrived
        model = await self._catalogue.get(request.model, request.version, request.origin, request.timeout_s)
        course.found(model.name)
        sampling = model.defaults.changed(request.sampling)
        _check_stop(request.stop)
        prompt_ids = await self._prompt_ids(request, model, model.limits.context_length)
        sampling = sampling.resolved(model.limits.room(len(prompt_ids)), request.default_max_tokens)

        follows = [] if model.limits.is_encoder_decoder else prompt_ids
        detokenizer = Detokenizer(model.tokenizer.backend, follows, request.stop, sampling.min_tokens)
        assembler = _Assembler(detokenizer, len(prompt_ids), sampling.stop_token_ids)
        asked = Generation(*(model.name, request.origin.request_id, prompt_ids, sampling, model.dialect, model.resumes))

        def resumed() -> None:
            recording.resumes += 1
            course.resumed()

        patience = self._predictor.patience(request.timeout_s, arrived)
        tokens = self._generator.generate(asked, patience, first_token, resumed)
        async with aclosing(tokens):
            async for token_chunk in tokens:
                if token_chunk.fingerprint != recording.fingerprint:
                    recording.fingerprint = token_chunk.fingerprint
                    self._catalogue.answered_by(model.name, token_chunk.fingerprint)
                yield assembler.take(token_chunk, time.monotonic() - arrived)
                if detokenizer.stopped:
                    return  # Which cancels what the predictor would still make.

    async def _prompt_ids(self, request: TextRequest, model: TextModel, context_length: int) -> list[int]:
        if (request.prompt is not None) + (request.prompt_ids is not None) + bool(request.messages) != 1:
            raise InvalidRequestError("give either a prompt or messages")
        if request.prompt is not None:
            if not request.prompt:
                raise InvalidRequestError("the prompt is empty")
            return await model.tokenizer.encode(request.prompt, context_length)
        if request.prompt_ids is not None:
            check_token_count(len(request.prompt_ids), context_length)
            return list(request.prompt_ids)
        text = model.tokenizer.render_chat(request.messages, context_length, request.template_options)
        # The template has written the special tokens already.
        return await model.tokenizer.encode(text, context_length, add_special_tokens=False)


class _Assembler:
    """Turns a predictor's chunks into text chunks; a stop string ends the answer before the predictor does.

    The stop token that ends an answer is among its ids, and its text is not in the answer's.
    """

    def __init__(self, detokenizer: Detokenizer, prompt_tokens: int, stop_token_ids: Iterable[int]) -> None:
        self._detokenizer = detokenizer
        self._prompt_tokens = prompt_tokens
        self._stop_token_ids = frozenset(stop_token_ids)
        self._produced = 0

    def take(self, chunk: TokenChunk, elapsed_s: float) -> TextChunk:
        text, used = "", 0
        written = len(chunk.token_ids) - self._ends_with_stop_token(chunk)
        for token_id in chunk.token_ids:
            if used < written:
                text += self._detokenizer.push(token_id)
            used += 1
            if self._detokenizer.stopped:
                break
        self._produced += used
        reason, usage = chunk.finish_reason, chunk.usage
        if reason is not None and not self._detokenizer.stopped:
            text += self._detokenizer.flush()
        if self._detokenizer.stopped:
            reason = "stop"
            cached = usage.cached_tokens if usage else 0
            usage = Usage(prompt_tokens=self._prompt_tokens, cached_tokens=cached, completion_tokens=self._produced)
        logprobs, top_logprobs = chunk.logprobs[:used], chunk.top_logprobs[:used]
        token_ids = chunk.token_ids[:used]
        return TextChunk(text, token_ids, logprobs, top_logprobs, reason, usage, elapsed_s, self._prompt_tokens)

    def _ends_with_stop_token(self, chunk: TokenChunk) -> bool:
        return chunk.finish_reason == "stop" and not self._stop_token_ids.isdisjoint(chunk.token_ids[-1:])


def _check_stop(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"{len(stop)} stop strings, at most {MAX_STOP_STRINGS} are allowed", param="stop")
    for text in stop:
        if not text or len(text) > MAX_STOP_LENGTH:
            raise InvalidRequestError(f"a stop string must have 1 to {MAX_STOP_LENGTH} characters", param="stop")


def _recorded_prompt(request: TextRequest) -> str:
    """The prompt, or its ids or the messages as JSON; the end of what is far beyond any context is cut off."""
    if request.prompt is not None:
        return _cut(request.prompt)
    if request.prompt_ids is not None:
        return recorded_list([request.prompt_ids])[1:-1]
    texts = iter(_cut_together([text for message in request.messages for text in message]))
    messages = [{"role": role, "content": content} for role, content in zip(texts, texts, strict=True)]
    return json.dumps(messages, ensure_ascii=False)


def recorded_list(prompts: Sequence[str | Sequence[int]]) -> str:
    """Several prompts as a JSON list, which it stays where prompts are cut off: rules read it."""
    texts = iter(_cut_together([prompt for prompt in prompts if isinstance(prompt, str)]))
    left = _MAX_RECORDED_IDS
    kept: list[str | list[int]] = []
    for prompt in prompts:
        kept.append(next(texts) if isinstance(prompt, str) else list(prompt[:left]))
        left -= 0 if isinstance(prompt, str) else len(kept[-1])
    return json.dumps(kept, ensure_ascii=False)


def _cut_together(texts: Sequence[str]) -> list[str]:
    """The texts, cut where all of them together become too long."""
    cut, left = [], MAX_RECORDED_CHARACTERS
    for text in texts:
        cut.append(_cut(text, left))
        left = max(0, left - len(text))
    return cut


def _cut(text: str, limit: int = MAX_RECORDED_CHARACTERS) -> str:
    beyond = len(text) - limit
    return text if beyond <= 0 else f"{text[:limit]}… ({beyond} characters more)"


def _recorded_parameters(request: TextRequest) -> str:
    given = dict(request.sampling) | ({"stop": list(request.stop)} if request.stop else {})
    given.pop("cache_salt", None)  # Who knows it can tell what its owner's prompts share with others.
    if request.template_options:
        given["chat_template_kwargs"] = dict(request.template_options)
    return _cut(json.dumps(given, ensure_ascii=False, default=str)) if given else ""
