"""One generation, from text to text: what every front end calls.

Refuses what can be refused, renders the chat, tokenises, generates at as many predictors as it takes, detokenises,
and records all of it through the tap, which never delays a chunk. What is the same for several choices of a request
is made once, see `SharedPrompt`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from millrace.errors import InvalidRequestError, MillraceError, OverloadedError
from millrace.oip.prompt_logprobs import PromptLogprobs, check_size
from millrace.payload.call import Origin, begin, end_cancelled
from millrace.payload.tap import PayloadTap, Recording
from millrace.sampling import DEFAULT_MAX_TOKENS
from millrace_protos.millrace_pb2 import Usage
from services.transformer.calls import check_stop
from services.transformer.generation.load_estimate import LoadEstimate, RefusalPace
from services.transformer.generation.recorded_prompt import recorded_texts
from services.transformer.generation.telemetry import GenerationCourse, GenerationTelemetry
from services.transformer.models.catalogue import Catalogue
from services.transformer.models.models import TextModel
from services.transformer.predictors.client import Generation, PredictorClient, TokenChunk
from services.transformer.predictors.first_token import FirstToken
from services.transformer.predictors.resuming import ResumingGenerator
from services.transformer.processes.body_processes import BodyProcesses
from services.transformer.text.detokenizer import Detokenizer
from services.transformer.text.tokenizer import TextTokenizer, check_token_count


class SharedPrompt:
    """What is made once for all choices of a request: its prompt's ids, and what records keep of it.

    Owned by the event loop; it belongs to the requests that differ in their seeds alone.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.ids: list[int] | None = None
        self.refusal: MillraceError | None = None
        self.recorded: tuple[str, dict[str, Any]] | None = None  # The prompt, and the parameters but for the seed.


@dataclass(frozen=True)
class TextRequest:
    """What a front end asks for: one of `prompt`, `prompt_ids` and `messages`, and the sampling parameters given.

    `template_options` are variables of the chat template. Where `sampling` has no max_tokens,
    `default_max_tokens` or what the context has left counts. `timeout_s` is what the caller's deadline
    had left when the request arrived; None is no deadline. The first-token deadline is in the origin's metadata.
    `prompt_logprobs` asks for the prompt's own log probabilities, and so many of the likeliest tokens at each;
    `choices` is how many such requests one answer is made of. With `prompt_only` the answer has no token of its own.
    `ignored_fields` are names, for the record.
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
    shared: SharedPrompt = field(default_factory=SharedPrompt, repr=False, compare=False)
    ignored_fields: Sequence[str] = ()
    prompt_logprobs: int | None = None
    choices: int = 1
    prompt_only: bool = False


@dataclass(frozen=True)
class ScoredPrompt:
    """A prompt's ids, and the log probabilities of all but the first."""

    ids: Sequence[int]
    logprobs: PromptLogprobs


@dataclass(frozen=True)
class TextChunk:
    """New text and the token ids behind it; the last one has `finish_reason` and `usage`.

    `logprobs` has one for each id where asked for, and so has `top_logprobs`: the likeliest tokens
    there with their log probabilities, best first. `prompt_tokens` is the same in every chunk. `prompt` is in the
    first chunk where asked for.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    finish_reason: str | None = None
    usage: Usage | None = None
    elapsed_s: float = 0.0  # Since the request arrived.
    prompt_tokens: int = 0
    stop_reason: str | int | None = None  # The stop string or the id of `stop_token_ids` that ended the answer.
    prompt: ScoredPrompt | None = None


def joined(chunks: Sequence[TextChunk]) -> TextChunk:
    """A whole answer as one chunk."""
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
        logprobs=[logprob for chunk in chunks for logprob in chunk.logprobs],
        top_logprobs=[top for chunk in chunks for top in chunk.top_logprobs],
        prompt=chunks[0].prompt,
    )


class Pipeline:
    """Owned by the event loop; one for all requests.

    `tells_cached`: whether callers without a `cache_salt` see how much of their prompt was cached.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        predictor: PredictorClient,
        generator: ResumingGenerator,
        tap: PayloadTap,
        bodies: BodyProcesses,
        tells_cached: bool = False,
    ) -> None:
        self._bodies = bodies
        self._tells_cached = tells_cached
        self._catalogue = catalogue
        self._predictor = predictor
        self._generator = generator
        self._tap = tap
        self._telemetry = GenerationTelemetry()
        self._loads: dict[str, LoadEstimate] = {}  # By model, of those that are served.
        self._refusals = RefusalPace()

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextChunk, None]:
        """The chunks of one answer; raises MillraceError; closing the generator cancels the request."""
        origin, timeout_s = request.origin, request.timeout_s
        with self.recording_refusals(origin, request.model):
            _check(request)
        prompt, parameters = recorded_texts(request)
        with (
            self._telemetry.generation(origin, bool(request.messages), timeout_s) as course,
            begin(self._tap, origin, request.model, prompt=prompt, parameters=parameters) as recording,
        ):
            try:
                first_token = FirstToken(origin)
                made = self._admitted(request, first_token, recording, course)
                async with aclosing(made), aclosing(first_token.bound(made)) as chunks:
                    async for chunk in chunks:
                        course.chunk(len(chunk.token_ids), chunk.elapsed_s, chunk.prompt_tokens, chunk.finish_reason)
                        recording.chunk(chunk.text, chunk.token_ids, chunk.logprobs)
                        if chunk.finish_reason is not None:
                            recording.end("OK", finish_reason=chunk.finish_reason, usage=chunk.usage)
                        # What a client has seen begin is on record, even if this process dies now.
                        await recording.begun()
                        yield self._told(chunk, request)
            except OverloadedError:
                await self._hold_back(request)
                raise
            except (asyncio.CancelledError, GeneratorExit):
                end_cancelled(recording, origin.arrived, timeout_s)
                raise

    def _told(self, chunk: TextChunk, request: TextRequest) -> TextChunk:
        """The chunk as its caller may see it: cached tokens would reveal which prompts others have sent."""
        if chunk.usage is None or self._tells_cached or request.sampling.get("cache_salt"):
            return chunk
        usage = Usage(prompt_tokens=chunk.usage.prompt_tokens, completion_tokens=chunk.usage.completion_tokens)
        return replace(chunk, usage=usage)

    @contextmanager
    def recording_refusals(self, origin: Origin, model: str = "") -> Iterator[None]:
        """Records what a front end refuses before it has made a TextRequest of it."""
        try:
            yield
        except Exception:
            with begin(self._tap, origin, model):
                raise

    async def _admitted(
        self, request: TextRequest, first_token: FirstToken, recording: Recording, course: GenerationCourse
    ) -> AsyncGenerator[TextChunk, None]:
        """The chunks, unless the last one would come too late as things are; then OverloadedError, at once."""
        arrived = request.origin.arrived
        model = await self._catalogue.get(request.model, request.version, request.origin, request.timeout_s)
        course.found(model.name)
        load = self._loads.setdefault(model.name, LoadEstimate())
        _check_load(load, request, model)
        load.began()
        length: int | None = None
        produced, elapsed_s = 0, -1.0
        try:
            async with aclosing(self._generate(request, model, first_token, recording, course)) as chunks:
                async for chunk in chunks:
                    if elapsed_s < 0:
                        load.first_token(chunk.elapsed_s)
                    else:
                        gap_s = chunk.elapsed_s - elapsed_s
                        load.more_tokens(len(chunk.token_ids), gap_s, arrived + chunk.elapsed_s)
                    produced, elapsed_s = produced + len(chunk.token_ids), chunk.elapsed_s
                    if chunk.finish_reason is not None:
                        length = produced
                    yield chunk
        finally:
            if elapsed_s >= 0:
                load.answer_ended()
            load.ended(length)

    async def _hold_back(self, request: TextRequest) -> None:
        now = time.monotonic()
        left_s = inf if request.timeout_s is None else request.origin.arrived + request.timeout_s - now
        hold_s = self._refusals.hold_s(left_s, now)
        if hold_s > 0:
            await asyncio.sleep(hold_s)

    async def _generate(
        self,
        request: TextRequest,
        model: TextModel,
        first_token: FirstToken,
        recording: Recording,
        course: GenerationCourse,
    ) -> AsyncGenerator[TextChunk, None]:
        arrived = request.origin.arrived
        sampling = model.defaults.changed(request.sampling)
        if request.prompt_logprobs is not None and not model.scores_prompts:
            raise InvalidRequestError(f"model {model.name!r} gives no log probabilities of prompts", param="logprobs")
        prompt_ids = await self._shared_ids(request, model)
        if request.prompt_logprobs is not None:
            check_size(len(prompt_ids), request.prompt_logprobs, request.choices)
        sampling = sampling.resolved(model.limits.room(len(prompt_ids)), request.default_max_tokens)

        follows = [] if model.limits.is_encoder_decoder else prompt_ids
        detokenizer = Detokenizer(model.tokenizer.decoder, follows, request.stop, sampling.min_tokens)
        assembler = _Assembler(detokenizer, len(prompt_ids), sampling.stop_token_ids)
        asked = Generation(
            model.name,
            request.origin.request_id,
            prompt_ids,
            sampling,
            model.dialect,
            model.resumes,
            request.prompt_logprobs,
        )

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
                chunk = assembler.take(token_chunk, time.monotonic() - arrived)
                if token_chunk.prompt is not None:
                    chunk = replace(chunk, prompt=ScoredPrompt(prompt_ids, token_chunk.prompt))
                yield _without_output(chunk) if request.prompt_only else chunk
                if detokenizer.stopped:
                    return  # Which cancels what the predictor would still make.

    async def _shared_ids(self, request: TextRequest, model: TextModel) -> list[int]:
        """The prompt's ids, which the first choice makes and the others wait for."""
        shared = request.shared
        if shared.ids is None:
            async with shared.lock:
                if shared.refusal is not None:
                    raise shared.refusal
                if shared.ids is None:
                    try:
                        shared.ids = await self._prompt_ids(request, model.tokenizer, model.limits.context_length)
                    except InvalidRequestError as refusal:
                        shared.refusal = refusal
                        raise
        return shared.ids

    async def _prompt_ids(self, request: TextRequest, tokenizer: TextTokenizer, context_length: int) -> list[int]:
        if request.prompt is not None:
            return await tokenizer.encode(request.prompt, context_length)
        if request.prompt_ids is not None:
            check_token_count(len(request.prompt_ids), context_length)
            return list(request.prompt_ids)
        left_s = request.origin.left_s(request.timeout_s)
        text = await tokenizer.render(request.messages, context_length, request.template_options, self._bodies, left_s)
        # The template has written the special tokens already.
        return await tokenizer.encode(text, context_length, add_special_tokens=False)


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
        stop_reason: str | int | None = chunk.token_ids[-1] if self._ends_with_stop_token(chunk) else None
        if reason is not None and not self._detokenizer.stopped:
            text += self._detokenizer.flush()
        if self._detokenizer.stopped:
            reason, stop_reason = "stop", self._detokenizer.stop_string
            cached = chunk.cached_tokens or 0
            usage = Usage(prompt_tokens=self._prompt_tokens, cached_tokens=cached, completion_tokens=self._produced)
        logprobs, top_logprobs = chunk.logprobs[:used], chunk.top_logprobs[:used]
        token_ids, prompt_tokens = chunk.token_ids[:used], self._prompt_tokens
        return TextChunk(text, token_ids, logprobs, top_logprobs, reason, usage, elapsed_s, prompt_tokens, stop_reason)

    def _ends_with_stop_token(self, chunk: TokenChunk) -> bool:
        return chunk.finish_reason == "stop" and not self._stop_token_ids.isdisjoint(chunk.token_ids[-1:])


def _without_output(chunk: TextChunk) -> TextChunk:
    """The chunk of an answer that was to have no token: a predictor makes one at least."""
    if (usage := chunk.usage) is not None:
        usage = Usage(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)
    reason = None if chunk.finish_reason is None else "length"
    return TextChunk("", [], [], [], reason, usage, chunk.elapsed_s, chunk.prompt_tokens, prompt=chunk.prompt)


def _check_load(load: LoadEstimate, request: TextRequest, model: TextModel) -> None:
    if request.timeout_s is None:
        return
    now, given = time.monotonic(), request.sampling.get("max_tokens")
    max_tokens = given if isinstance(given, int) else request.default_max_tokens or model.limits.context_length
    retry_after_s = load.retry_after_s(request.origin.arrived + request.timeout_s - now, max_tokens, now)
    if retry_after_s is not None:
        message = "as many are served as can be in the request's time"
        raise OverloadedError(message, retry_after_ms=int(1000 * retry_after_s))


def _check(request: TextRequest) -> None:
    """Refuses what neither the model nor any work is needed for; raises InvalidRequestError."""
    check_stop(request.stop)
    if (request.prompt is not None) + (request.prompt_ids is not None) + bool(request.messages) != 1:
        raise InvalidRequestError("give either a prompt or messages")
    if request.prompt == "":
        raise InvalidRequestError("the prompt is empty")
