"""One generation, from text to text; every front end calls it.

`Pipeline.generate` finds the model, admits the request, renders and tokenises the prompt, reads the tokens of one or
more predictors, and detokenises. Around it are telemetry, the payload log, the delay of refusals under overload, and
the first-token deadline. `generate` is the only loop over the tokens. Choices of one request share their prompt, see
`SharedPrompt`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import NamedTuple

from headrace.errors import HeadraceError, InvalidRequestError
from headrace.grammars import PARAMETER
from headrace.oip.prompt_logprobs import check_size
from headrace.payload.call import begin
from headrace.payload.tap import PayloadTap
from headrace.rpc.server.call_context import CallContext
from headrace.sampling import SamplingParameters
from headrace_protos.steps_pb2 import Submission
from headrace_transformer.generation.admission import Admission, AdmittedGeneration
from headrace_transformer.generation.chunks import Assembler, Origin, TextChunk
from headrace_transformer.generation.grammars import GrammarChecks
from headrace_transformer.generation.prompts import Prompts
from headrace_transformer.generation.recorded_tokens import RecordedTokens
from headrace_transformer.generation.recording import recorded_generation
from headrace_transformer.generation.repeating import RepeatedTokens
from headrace_transformer.generation.requests import PreparedGeneration, TextRequest
from headrace_transformer.generation.resume_ids import ResumePoint
from headrace_transformer.generation.shares import account_of
from headrace_transformer.generation.telemetry import GenerationTelemetry
from headrace_transformer.generation.token_quota import Reservation, TokenQuota
from headrace_transformer.generation.tool_use import formed, parser_of
from headrace_transformer.models.models import TextModel
from headrace_transformer.predictors.first_token import FirstToken
from headrace_transformer.predictors.resuming import ResumingGenerator, TokenStream
from headrace_transformer.predictors.submission import sampling_json
from headrace_transformer.predictors.tokens import TokenChunk
from headrace_transformer.processes.body_processes import BodyProcesses
from headrace_transformer.routing.router import Router
from headrace_transformer.signing import Signer
from headrace_transformer.text.answer_parser import AnswerParser
from headrace_transformer.text.answer_syntax import AnswerSyntax, SyntaxSettings
from headrace_transformer.text.detokenizer import Detokenizer


class Pipeline:
    """Owned by the event loop; one for all requests.

    `reports_cached_tokens`: whether every answer has the number of cached prompt tokens, not only those that share
    their cache with no other client.
    """

    def __init__(
        self,
        router: Router,
        generator: ResumingGenerator,
        tap: PayloadTap,
        bodies: BodyProcesses,
        reports_cached_tokens: bool = False,
        quota: TokenQuota | None = None,
        recorded: RecordedTokens | None = None,
        syntaxes: SyntaxSettings | None = None,
        signer: Signer | None = None,
    ) -> None:
        self.signer = signer or Signer()
        self._router = router
        self._generator = generator
        self._tap = tap
        self._reports_cached_tokens = reports_cached_tokens
        self._admission = Admission()
        self._quota = quota or TokenQuota()
        self._recorded = recorded
        self._syntaxes = syntaxes or SyntaxSettings()
        self._grammars = GrammarChecks()
        self._prompts = Prompts(bodies, self.syntax)
        self._telemetry = GenerationTelemetry(router.lists)

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextChunk, None]:
        """The chunks of one answer; raises HeadraceError; closing the generator (`aclosing`) cancels the request."""
        with self.recording_refusals(request.call, request.model):
            request.check()
            first_token = FirstToken(request.call)
        has_own_cache = bool(request.call.client.name or request.sampling.get("cache_salt"))
        shows_cached = self._reports_cached_tokens or has_own_cache
        with self._telemetry.observed(request) as observed, recorded_generation(request, self._tap) as recorded:
            async with self._admission.holding_refusals(request):
                with ExitStack() as held:
                    begun = await self._begun(request, first_token, held)
                    if served := self._router.answering(request.model, request.call):
                        recorded.served_by(served)
                        observed.served_by(served)
                    recorded.begun(request.prompt_kind, begun.generation)
                    token_chunk = begun.first
                    while True:
                        begun.reservation.generated += len(token_chunk.token_ids)
                        chunk = begun.assembler.take(token_chunk, request.call.elapsed_s)
                        begun.admitted.chunk(chunk)
                        if request.prompt_only:
                            chunk = chunk.without_output()
                        recorded.chunk(chunk, begun.counts_prompt)
                        if token_chunk is begun.first:
                            await recorded.flushed()
                        observed.chunk(chunk)
                        yield chunk if shows_cached else chunk.without_cached_tokens()
                        if chunk.end is not None:
                            return  # Closing cancels what the predictor would still generate.
                        token_chunk = await begun.tokens.read()

    def route_to_weights(self, model: str, resume: ResumePoint | None, call: CallContext) -> None:
        """Routes a call to the model that began its answer, if there is one; before anything of the model is used."""
        if resume is not None:
            links, fingerprint = self._generator.links, resume.fingerprint
            self._router.keep_to(model, call, lambda name: links.can_resume(name, fingerprint))

    @contextmanager
    def recording_refusals(self, call: CallContext, model: str = "") -> Iterator[None]:
        """If the block raises, records the error as the refusal of a request, and raises it again."""
        try:
            yield
        except Exception:
            with begin(self._tap, call, model):
                raise

    async def _begun(self, request: TextRequest, first_token: FirstToken, held: ExitStack) -> Begun:
        """Waits for the first tokens: of the model that the request names, or of one that its route falls back to.

        `held` has the resources of the answer until its end.
        """
        async with first_token.in_time():
            model = await self._router.get(request.model, request.version, request.call)
        if request.choices > 1:  # All choices use one model.
            self._router.keep(request.model, request.call)
        while True:
            try:
                return await self._attempt(request, model, first_token, held)
            except HeadraceError as error:
                held.close()
                other = self._router.fall_back(request.model, request.call, model, error)
                if other is None:
                    raise
                model = self._router.as_text(other)

    async def _attempt(self, request: TextRequest, model: TextModel, first_token: FirstToken, held: ExitStack) -> Begun:
        """Waits for the first tokens of one model."""
        call = request.call
        admitted = held.enter_context(self._admission.admitted(request, model))
        async with first_token.in_time():
            generation = await self._prepared(request, model)
            await self._quota.check_month(call.client)
        prompt_tokens = 0 if model.name in request.shared.charged else len(generation.prompt_ids)
        reservation = held.enter_context(
            self._quota.reserved(call.client, prompt_tokens, generation.sampling.max_tokens or 0)
        )
        request.shared.charged.add(model.name)
        async with first_token.in_time():
            tokens = await self._opened(request, generation, first_token, held)
            first = await tokens.read()
        # Once is enough: one set of weights generates the whole answer.
        self._router.answered_by(model.name, first.fingerprint)
        assembler = self._assembler(request, model, generation)
        return Begun(generation, admitted, reservation, prompt_tokens > 0, tokens, assembler, first)

    async def _opened(
        self, request: TextRequest, generation: PreparedGeneration, first_token: FirstToken, held: ExitStack
    ) -> TokenStream | RepeatedTokens:
        """The tokens of a generation, those among them that the client has already."""
        call, resume = request.call, request.resume
        known = None if self._recorded is None else await self._recorded.find(request, generation)
        tokens = self._generator.open(
            generation.submission,
            generation.sampling,
            call.deadline,
            first_token,
            dialect=generation.dialect,
            start_wait_s=self._router.wait_s(request.model, call),
            fingerprint="" if resume is None else resume.fingerprint,
            output_ids=() if known is None else known.token_ids,
        )
        held.enter_context(closing(tokens))
        return tokens if resume is None else RepeatedTokens(tokens, resume, known)

    async def _prepared(self, request: TextRequest, model: TextModel) -> PreparedGeneration:
        """The generation to request from the predictors; raises InvalidRequestError, ContextLengthError."""
        sampling = model.defaults.changed(request.sampling)
        if request.bad_words:
            words = await model.tokenizer.bad_word_ids(request.bad_words)
            sampling = sampling.changed({"bad_token_ids": [*sampling.bad_token_ids, *words]})
        if sampling.structured_outputs:
            if not model.resumes:
                raise InvalidRequestError(
                    f"model {model.name!r}: its predictor supports no {PARAMETER}, it is not Headrace's",
                    param=PARAMETER,
                )
            await self._grammars.check(sampling.structured_outputs, request.call.deadline)
        if request.prompt_logprobs is not None and not model.scores_prompts:
            raise InvalidRequestError(f"model {model.name!r} has no log probabilities of prompts", param="logprobs")
        prompt_ids = await self._prompts.ids(request, model)
        if request.prompt_logprobs is not None:
            check_size(len(prompt_ids), request.prompt_logprobs, request.choices)
        if request.has_parts and (request.tools is not None or sampling.structured_outputs):
            sampling = await self._formed(request, model, sampling, prompt_ids)
        room = model.limits.room(len(prompt_ids))
        if request.cuts_max_tokens and sampling.max_tokens is not None:
            sampling = sampling.changed({"max_tokens": min(sampling.max_tokens, max(room, 1))})
        account = account_of(request.call)
        sampling = sampling.resolved(
            room, request.default_max_tokens or model.limits.default_tokens(len(prompt_ids)), request.default_seed
        )
        submission = Submission(
            model=model.name,
            request_id=request.call.request_id,
            prompt_ids=prompt_ids,
            sampling=sampling_json(sampling),
            prompt_logprobs=request.prompt_logprobs,
            client=account.name,
            weight=account.policy.weight,
            # The client has these tokens already: they have no pace.
            paced_after=request.resume.tokens if request.resume else 0,
        )
        return PreparedGeneration(submission, prompt_ids, sampling, None if model.resumes else model.dialect)

    async def _formed(
        self, request: TextRequest, model: TextModel, sampling: SamplingParameters, prompt_ids: Sequence[int]
    ) -> SamplingParameters:
        """The parameters with the form that the model's own syntax gives the answer: calls, free reasoning."""
        syntax, tools, form = self.syntax(model), request.tools, sampling.structured_outputs
        if tools is not None and (tools.is_required or tools.is_strict) and not model.resumes:
            what, param = (
                ("force a call", "tool_choice") if tools.is_required else ("enforce strict functions", "tools")
            )
            raise InvalidRequestError(
                f"model {model.name!r}: its predictor cannot {what}, it is not Headrace's", param=param
            )
        try:
            changed = formed(form, tools, syntax, model.tokenizer, prompt_ids)
            if not changed:
                return sampling
            found = sampling.changed(changed)
            await self._grammars.check(found.structured_outputs, request.call.deadline)
            return found
        except InvalidRequestError as refusal:
            if tools is None:
                raise
            if not tools.is_required and tools != tools.loosened:  # The form needs a grammar; the calls do not.
                return await self._formed(replace(request, tools=tools.loosened), model, sampling, prompt_ids)
            raise InvalidRequestError(f"tools: {refusal.message}", param="tools") from None

    def syntax(self, model: TextModel) -> AnswerSyntax:
        """How a model writes calls and reasoning."""
        return self._syntaxes.of(model.name, model.tokenizer.answer_syntax)

    def _assembler(self, request: TextRequest, model: TextModel, generation: PreparedGeneration) -> Assembler:
        follows = [] if model.limits.is_encoder_decoder else generation.prompt_ids
        sampling, decoder = generation.sampling, model.tokenizer.decoder
        parser: AnswerParser | None = None
        kept: Mapping[int, str] | None = None
        if request.has_parts:
            syntax = self.syntax(model)
            parser = parser_of(request, syntax, model.tokenizer, generation.prompt_ids)
            kept = decoder.special_ids(syntax.marks(request.tools is not None)) if parser is not None else None
        end_ids: Container[int] = ()
        if not request.skip_special_tokens:
            end_ids = decoder.special_texts.keys() - (kept or {}).keys()
            kept = decoder.special_texts
        includes_stop = request.include_stop_str_in_output
        detokenizer = Detokenizer(decoder, follows, request.stop, sampling.min_tokens, kept, includes_stop)
        return Assembler(
            detokenizer, Origin(model, generation.prompt_ids), sampling.stop_token_ids, parser, includes_stop, end_ids
        )


class Begun(NamedTuple):
    """An answer whose first tokens have arrived."""

    generation: PreparedGeneration
    admitted: AdmittedGeneration
    reservation: Reservation
    counts_prompt: bool
    tokens: TokenStream | RepeatedTokens
    assembler: Assembler
    first: TokenChunk
