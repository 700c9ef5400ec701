"""What the predictors of a model are to generate for a request: prompt, parameters and form, read and checked."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.errors import ContextLengthError, InvalidRequestError
from headrace.grammars import PARAMETER, check_grammar
from headrace.oip.prompt_scores import PROMPT_LOGPROBS, check_asked
from headrace.rpc.limits.admission import caller_of_call
from headrace.sampling import ContextLimits, SamplingParameters
from headrace.structured_outputs import constraint_of, read_structured_outputs
from headrace.threads import FairThreads
from headrace_protos.steps_pb2 import Submission
from headrace_transformer.generation.chunks import Origin
from headrace_transformer.generation.requests import TextRequest
from headrace_transformer.models.models import TextModel
from headrace_transformer.predictors.discovery.descriptions import Dialect
from headrace_transformer.predictors.resume.progress import sampling_json
from headrace_transformer.processes.body_processes import BodyProcesses
from headrace_transformer.text.answer_grammars import calls_grammar, form_grammar, form_rule
from headrace_transformer.text.answer_parser import AnswerSyntax, SyntaxSettings
from headrace_transformer.text.tokenizer import Chat, Messages, TextTokenizer, check_token_count
from headrace_transformer.text.tools import ToolUse

_MAX_CUT = 1024 * 1024  # Tokens of a prompt before it is cut; longer ones are refused.
_THREADS, _PLACES = 2, 258  # Of checks of grammars.
_KEPT = 256
_PROMPT_END = 16  # Tokens that are enough for a mark of the reasoning.


class Prepared(NamedTuple):
    """A generation of one model; prompt and sampling are those of the submission. `dialect` as in ResumingGenerator."""

    submission: Submission
    origin: Origin
    sampling: SamplingParameters
    syntax: AnswerSyntax
    prompt_end: str  # Text, as far as it decides how the answer is parsed.
    dialect: Dialect | None = None


# vLLM's fields that change an answer: only its engines take them.
_OF_ENGINES = (
    "include_reasoning",
    "logprob_token_ids",
    "mm_processor_kwargs",
    "repetition_detection",
    "thinking_token_budget",
)


class Preparation:
    """Owned by the event loop; one for all requests. Raises InvalidRequestError, ContextLengthError."""

    def __init__(self, bodies: BodyProcesses, syntaxes: SyntaxSettings) -> None:
        self._bodies = bodies
        self._syntaxes = syntaxes
        self._grammars = GrammarChecks()

    async def prepared(self, request: TextRequest, model: TextModel) -> Prepared:
        """The request for the predictors of a model."""
        syntax, tokenizer = self.syntax(model), model.tokenizer
        sampling = model.defaults.changed(request.sampling)
        _check_model(request, model, sampling)
        if sampling.structured_outputs:
            await self._grammars.check(sampling.structured_outputs)
        prompt_ids = await self.ids(request, model)
        prompt_end = prompt_end_of(tokenizer, prompt_ids) if request.has_parts and syntax.reasoning else ""
        if request.bad_words:
            words = await tokenizer.bad_word_ids(request.bad_words)
            sampling = sampling.changed({"bad_token_ids": [*sampling.bad_token_ids, *words]})
        if request.has_parts and (request.tools is not None or sampling.structured_outputs):
            form = await self._formed(request, model, syntax, sampling.structured_outputs, prompt_end)
            sampling = sampling.changed(form)
        room = model.limits.room(len(prompt_ids))
        if request.cuts_max_tokens and sampling.max_tokens is not None:
            sampling = sampling.changed({"max_tokens": min(sampling.max_tokens, max(room, 1))})
        default_max_tokens = request.default_max_tokens or model.limits.default_tokens(len(prompt_ids))
        is_seeded = sampling.seed is not None
        sampling = sampling.resolved(room, default_max_tokens, request.default_seed)
        submission = Submission(
            model=model.name,
            request_id=request.call.request_id,
            prompt_ids=prompt_ids,
            sampling=sampling_json(sampling),
            client=request.call.account.name,
            weight=request.call.account.policy.weight,
            # The client has these tokens already: they have no pace.
            paced_after=request.resume.tokens if request.resume else 0,
        )
        submission.MergeFrom(request.asked)
        check_asked(submission, request.choices)
        if model.pool is not None and not (is_seeded or sampling.structured_outputs):
            sampling = sampling.model_copy(update={"seed": None})  # The engine draws, as it does for others.
        dialect = None if model.resumes else model.dialect
        return Prepared(submission, Origin(model, prompt_ids), sampling, syntax, prompt_end, dialect)

    def syntax(self, model: TextModel) -> AnswerSyntax:
        """How a model writes calls and reasoning."""
        return self._syntaxes.of(model.name, model.tokenizer.answer_syntax)

    async def _formed(
        self, request: TextRequest, model: TextModel, syntax: AnswerSyntax, form: str, prompt_end: str
    ) -> dict[str, Any]:
        """The sampling parameter with the form that the model's own syntax gives the answer: calls, free reasoning."""
        tools = request.tools
        if tools is not None and (tools.is_required or tools.is_strict) and not model.resumes:
            what, param = (
                ("force a call", "tool_choice") if tools.is_required else ("enforce strict functions", "tools")
            )
            raise InvalidRequestError(
                f"model {model.name!r}: its predictor cannot {what}, it is not Headrace's", param=param
            )
        while True:
            try:
                grammar = _grammar_of(form, tools, syntax, model.tokenizer, prompt_end)
                if grammar:
                    await self._grammars.check(read_structured_outputs(grammar))
                return {PARAMETER: grammar} if grammar else {}
            except InvalidRequestError as refusal:
                if tools is None:
                    raise
                if tools.is_required or tools == tools.loosened:
                    raise InvalidRequestError(f"tools: {refusal.message}", param="tools") from None
                tools = tools.loosened  # The form needs a grammar; the calls do not.

    async def ids(self, request: TextRequest, model: TextModel) -> list[int]:
        """The ids of a prompt; raises InvalidRequestError, ContextLengthError.

        The first choice of a request computes them, other choices wait; an InvalidRequestError is kept for all. The
        list is shared: it must not be changed.
        """
        shared = request.shared
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
        """The ids that are used: with `drops_messages` those of as many of the newest messages as leave room.

        These follow the system's first messages, and begin with one of the user, as templates expect.
        """
        limit, kept, limits = request.truncate_prompt_tokens, None, model.limits
        most = whole = limits.context_length
        given = request.sampling.get("max_tokens")
        messages, starts = request.messages, [0]
        head = next((i for i, (role, *_) in enumerate(messages) if role != "system"), len(messages))
        if request.drops_messages:
            most = kept_tokens(-1, limits, given or min(limits.default_tokens(0), whole // 2))
            starts += [index for index, (role, *_) in enumerate(messages) if role == "user" and index > head]
        elif limit is not None:
            most, kept = _MAX_CUT, kept_tokens(limit, limits, given)
        first, last = 0, len(starts) - 1
        found: list[int] | None = None
        while first <= last:
            middle = (first + last) // 2 if first else 0  # The whole prompt first: it nearly always fits.
            fewer = [*messages[:head], *messages[starts[middle] :]] if middle else messages
            is_fewest = middle == len(starts) - 1
            if is_fewest and given is None and request.drops_messages:
                most = whole  # They are not refused for the sake of a default.
            try:
                found, last = await self._whole(request, fewer, model, most), middle - 1
            except ContextLengthError:
                if found is None and is_fewest and request.drops_messages and most < whole:
                    raise _no_room(given, whole) from None
                if found is None and is_fewest:
                    raise
                first = middle + 1
        return (found or [])[-(kept or 0) :]

    async def _whole(self, request: TextRequest, messages: Messages, model: TextModel, most: int) -> list[int]:
        tokenizer = model.tokenizer
        if messages:
            _check_tools(request, model.name, self.syntax(model))
            tools = "" if request.tools is None else request.tools.definitions
            chat = Chat(messages, request.template_options, tools)
            text = await tokenizer.render(chat, most, self._bodies)
            # The template has written the special tokens already.
            return await tokenizer.encode(text, most, add_special_tokens=False)
        if request.prompt is not None:
            return await tokenizer.encode(request.prompt, most, request.add_special_tokens)
        ids = request.prompt_ids or ()
        check_token_count(len(ids), most)
        return list(ids)


def _check_model(request: TextRequest, model: TextModel, sampling: SamplingParameters) -> None:
    """Refuses what the model's predictor lacks."""
    for name in () if model.pool is not None else _OF_ENGINES:
        value = request.engine_fields.get(name)
        if not (value is None or value is True or value in ([], {})):
            raise InvalidRequestError(f"{name} is not supported by the predictor of model {model.name!r}", param=name)
    if sampling.structured_outputs and not model.resumes:
        raise InvalidRequestError(
            f"model {model.name!r}: its predictor supports no {PARAMETER}, it is not Headrace's", param=PARAMETER
        )
    if request.asked.HasField(PROMPT_LOGPROBS) and not model.scores_prompts:
        raise InvalidRequestError(f"model {model.name!r} has no log probabilities of prompts", param="logprobs")


def _check_tools(request: TextRequest, model: str, syntax: AnswerSyntax) -> None:
    """Refuses functions for a model that cannot be given them, or whose calls could not be read."""
    if request.tools is None:
        return
    if not syntax.takes_tools:
        raise InvalidRequestError(f"the chat template of model {model!r} has no place for tools", param="tools")
    if not syntax.tools:
        raise InvalidRequestError(
            f"model {model!r} writes tool calls in a format that is not known; TRANSFORMER_TOOL_FORMATS can name it",
            param="tools",
        )


def _grammar_of(
    form: str, tools: ToolUse | None, syntax: AnswerSyntax, tokenizer: TextTokenizer, prompt_end: str
) -> dict[str, Any]:
    """The structured output for an answer of calls, if they are required, else of the `form` ("" for none) or calls.

    Without a form text may be in place of calls of strict functions. All begin after the reasoning. Empty if the form
    is the whole answer: a grammar is always, being the caller's own.
    """
    constraint = constraint_of(form) if form else None
    if tools is not None and tools.is_required:
        constraint = None
    elif tools is not None and tools.is_strict and constraint is None:
        tools = tools.loosened
    elif constraint is None or form_rule(constraint) is None:
        return {}
    reasoning, is_open = syntax.reasoning_after(prompt_end)
    ids = tokenizer.decoder.grammar_ids(syntax.marks(with_tools=tools is not None))
    if tools is not None:
        grammar = calls_grammar(tools, syntax.tools, ids, reasoning, is_open, constraint)
    elif reasoning is None or constraint is None:
        return {}
    else:
        grammar = form_grammar(str(form_rule(constraint)), reasoning, is_open, ids)
    return {"grammar": grammar}


def prompt_end_of(tokenizer: TextTokenizer, prompt_ids: Sequence[int]) -> str:
    """The end of a prompt, as far as it decides how the answer is parsed."""
    return tokenizer.text_of(prompt_ids[-_PROMPT_END:])


def _no_room(max_tokens: Any, context_length: int) -> ContextLengthError:
    room = f"{max(0, context_length - max_tokens)} tokens of a prompt in the context of {context_length}"
    name = "max_output_tokens"
    return ContextLengthError(f"{name}={max_tokens} leaves room for {room}; the newest messages have more", param=name)


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


class GrammarChecks:
    """Owned by the event loop."""

    def __init__(self) -> None:
        self._threads = FairThreads(_THREADS, _PLACES, "grammars")
        self._results: OrderedDict[str, InvalidRequestError | None] = OrderedDict()

    async def check(self, text: str) -> None:
        """Raises InvalidRequestError for a grammar that cannot be compiled or met."""
        if text in self._results:
            self._results.move_to_end(text)
            refusal = self._results[text]
        else:
            refusal = await self._threads.run(caller_of_call(), _refusal, text)
            self._results[text] = refusal
            if len(self._results) > _KEPT:
                self._results.popitem(last=False)
        if refusal is not None:
            raise InvalidRequestError(refusal.message, param=refusal.param)


def _refusal(text: str) -> InvalidRequestError | None:
    try:
        check_grammar(text)
    except InvalidRequestError as refusal:
        return refusal
    return None
