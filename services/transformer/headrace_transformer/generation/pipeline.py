"""One generation, from text to text, in stages; every front end calls it.

The router resolves the name in the request to a model, admission admits the request, preparation renders and tokenises
the prompt, and the tokens of one or more predictors are opened: from then on they are detokenised as they come. What a
stage makes is not changed by later ones. If a model fails before its first token, one that the route falls back to is
admitted instead. Around it are telemetry, the payload log, and the delay of refusals under overload. `generate` is the
only loop over the tokens. Choices of one request share their prompt, see `SharedPrompt`.
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.errors import HeadraceError, HopBrokenError
from headrace.payload.call import begin
from headrace.payload.tap import PayloadTap
from headrace.rpc.limits.admission import head_of_call
from headrace.rpc.server.call_context import CallContext
from headrace_transformer.generation.admission import Admission, AdmittedGeneration
from headrace_transformer.generation.chunks import Assembler, TextChunk
from headrace_transformer.generation.preparation import Preparation, Prepared, prompt_end_of
from headrace_transformer.generation.recording import record_begun, record_chunk, recorded_generation
from headrace_transformer.generation.repeating import RecordedTokens, RepeatedTokens
from headrace_transformer.generation.requests import TextRequest
from headrace_transformer.generation.resume_ids import Signer
from headrace_transformer.generation.telemetry import GenerationTelemetry
from headrace_transformer.generation.token_quota import Reservation, TokenQuota
from headrace_transformer.models.models import TextModel
from headrace_transformer.predictors import CONTINUITY, EXACT, TokenChunk, worse
from headrace_transformer.predictors.resume.resuming import EngineModel, ResumingGenerator, TokenStream
from headrace_transformer.processes.body_processes import BodyProcesses
from headrace_transformer.routing.router import Answering, Router
from headrace_transformer.text.answer_parser import SyntaxSettings
from headrace_transformer.text.answer_parts import Content, Part
from headrace_transformer.text.detokenizer import Detokenizer
from headrace_transformer.text.tools import ToolUse


@dataclass(eq=False)
class Pipeline:
    """Owned by the event loop; one for all requests.

    `reports_cached_tokens`: whether every answer has the number of cached prompt tokens, not only those that share
    their cache with no other client.
    """

    router: Router
    generator: ResumingGenerator
    tap: PayloadTap
    bodies: BodyProcesses
    reports_cached_tokens: bool = False
    quota: TokenQuota = field(default_factory=TokenQuota)
    recorded: RecordedTokens | None = None
    syntaxes: SyntaxSettings = field(default_factory=SyntaxSettings)
    signer: Signer = field(default_factory=Signer)

    def __post_init__(self) -> None:
        self._admission = Admission()
        self._preparation = Preparation(self.bodies, self.syntaxes)
        self._telemetry = GenerationTelemetry(self.router.lists)

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextChunk, None]:
        """The chunks of one answer; raises HeadraceError; closing the generator (`aclosing`) cancels the request."""
        with (
            self._telemetry.observed(request) as observed,
            recorded_generation(request, self.tap) as recording,
            # The answer's place among those admitted, its client's tokens, its token stream; each attempt has its own.
            ExitStack() as lease,
        ):
            begun = await self._begun(request, lease)
            record_begun(recording, begun.answering.served, request.prompt_kind, begun.prepared)
            tokens = begun.first
            while True:
                chunk = begun.chunk(tokens, request)
                if begun.prepared.origin.model.pool is not None:
                    report_continuity(tokens.continuity)
                record_chunk(recording, chunk, begun.counts_prompt)
                if tokens is begun.first:
                    await recording.flushed()
                observed.chunk(chunk)
                yield chunk if begun.shows_cached or chunk.end is None else chunk.without_cached_tokens()
                if chunk.end is not None:
                    return  # Closing cancels what the predictor would still generate.
                tokens = await begun.tokens.read()

    @contextmanager
    def recording_refusals(self, call: CallContext, model: str = "") -> Iterator[None]:
        """If the block raises, records the error as the refusal of a request, and raises it again."""
        try:
            yield
        except Exception:
            with begin(self.tap, call, model):
                raise

    def parts_on_record(
        self, served: str, text: str, tools: ToolUse | None, seed: int, prompt_ids: Sequence[int]
    ) -> Sequence[Part]:
        """The parts of an answer that is on record; the text alone where its model is not loaded any more."""
        name, _, version = served.partition(":")
        try:
            model = self.router.catalogue.as_text(self.router.find(name, version))
        except HeadraceError:
            return [Content(text)]
        prompt_end = prompt_end_of(model.tokenizer, prompt_ids)
        return self._preparation.syntax(model).parts_of(text, prompt_end, tools, seed)

    def reads_tools(self, model: TextModel) -> bool:
        """Whether the model's calls of functions can be read."""
        syntax = self._preparation.syntax(model)
        return syntax.takes_tools and bool(syntax.tools)

    async def _begun(self, request: TextRequest, lease: ExitStack) -> "Begun":
        """Waits for the first tokens: of the model that the request names, or of one that its route falls back to."""
        call, resume, links = request.call, request.resume, self.generator.links
        # A model that has the weights which began the client's answer; any for a new one.
        serves = None if resume is None else lambda name: links.can_resume(name, resume.fingerprint)
        async with self._admission.holding_refusals(request), call.beginning.scope():
            answering = await self.router.resolve(request.model, request.version, call, serves)
            if request.choices > 1:  # All of them use one model.
                answering = answering._replace(others=(), wait_s=None)
            while True:
                try:
                    model = self.router.catalogue.as_text(answering.model)
                    admitted = lease.enter_context(self._admission.admitted(request, model))
                    prepared = await self._preparation.prepared(request, model)
                    begun = await self._opened(request, answering, admitted, prepared, lease)
                    self.router.answered(answering, begun.first.fingerprint)
                    return begun
                except HeadraceError as error:
                    lease.close()
                    answering = self.router.fall_back(answering, call, error)

    async def _opened(
        self,
        request: TextRequest,
        answering: Answering,
        admitted: AdmittedGeneration,
        prepared: Prepared,
        lease: ExitStack,
    ) -> "Begun":
        """The tokens of a prepared generation, those among them that the client has already, up to the first ones."""
        call, resume, model = request.call, request.resume, prepared.origin.model
        assembler = self._assembler(request, prepared)
        if model.pool is not None and resume is not None and resume.fingerprint:
            raise HopBrokenError("the model's weights have changed, and no predictor has the old ones", hop="engine")
        await self.quota.check(call.client)  # The choices run at once: nothing may wait until one counts the prompt.
        counts_prompt = model.name not in request.shared.charged
        prompt_tokens = len(prepared.origin.prompt_ids) if counts_prompt else 0
        most = prompt_tokens + (prepared.sampling.max_tokens or 0)
        reservation = lease.enter_context(self.quota.reserved(call.client, 0, most))
        request.shared.charged.add(model.name)
        known = None if self.recorded is None else await self.recorded.find(request, prepared)
        stream = self.generator.open(
            prepared.submission,
            prepared.sampling,
            call.deadline,
            call.first_token,
            elsewhere=prepared.dialect if model.pool is None else EngineModel(model.pool, request.engine_fields),
            start_wait_s=answering.wait_s,
            fingerprint="" if resume is None else resume.fingerprint,
            output_ids=() if known is None else known.token_ids,
        )
        lease.enter_context(closing(stream))
        tokens = stream if resume is None else RepeatedTokens(stream, resume, known)
        first = await tokens.read()
        reservation.used += prompt_tokens  # Without a first token the log counts none either.
        return Begun(
            answering=answering,
            prepared=prepared,
            admitted=admitted,
            reservation=reservation,
            tokens=tokens,
            first=first,
            assembler=assembler,
            counts_prompt=counts_prompt,
            shows_cached=self.reports_cached_tokens or bool(call.client.name or prepared.sampling.cache_salt),
        )

    def _assembler(self, request: TextRequest, prepared: Prepared) -> Assembler:
        origin, sampling, syntax = prepared.origin, prepared.sampling, prepared.syntax
        decoder, follows = origin.model.tokenizer.decoder, origin.prompt_ids
        parser = None
        if request.has_parts:
            parser = syntax.parser(prepared.prompt_end, request.tools, request.default_seed)
        marks = () if parser is None else syntax.marks(request.tools is not None)
        end_ids = [end for end, text in decoder.end_texts.items() if text not in marks]
        kept = decoder.special_ids(marks) if request.skip_special_tokens else decoder.special_texts
        if origin.model.limits.is_encoder_decoder:
            follows = ()
        includes_stop = request.include_stop_str_in_output
        detokenizer = Detokenizer(decoder, follows, request.stop, sampling.min_tokens, kept, includes_stop)
        return Assembler(detokenizer, origin, frozenset(sampling.stop_token_ids), parser, includes_stop, end_ids)


def report_continuity(continuity: str) -> None:
    """Names it in the head of the call's answer, until that is sent; the worst of several choices'."""
    head = head_of_call()
    head.add((CONTINUITY, worse(head.value(CONTINUITY), continuity or EXACT)))


class Begun(NamedTuple):
    """An answer whose first tokens have arrived."""

    answering: Answering
    prepared: Prepared
    admitted: AdmittedGeneration
    reservation: Reservation
    tokens: TokenStream | RepeatedTokens
    first: TokenChunk
    assembler: Assembler
    counts_prompt: bool
    shows_cached: bool

    def chunk(self, tokens: TokenChunk, request: TextRequest) -> TextChunk:
        """The next chunk, counted."""
        self.reservation.used += len(tokens.token_ids)
        chunk = self.assembler.take(tokens, request.call.elapsed_s)
        self.admitted.chunk(chunk)
        return chunk.without_output() if request.prompt_only else chunk
