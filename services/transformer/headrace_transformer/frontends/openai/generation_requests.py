"""Requests for completions and chat completions."""

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from headrace.errors import InvalidRequestError
from headrace.rpc.server.call_context import CallContext
from headrace.sampling import MAX_TOP_LOGPROBS, SamplingParameters
from headrace_protos.steps_pb2 import Submission
from headrace_transformer.frontends.openai.chat_prompts import ChatPromptRequest, Message
from headrace_transformer.frontends.openai.errors import UnsupportedFieldError
from headrace_transformer.frontends.openai.requests import (
    Effort,
    Prompt,
    SampledRequest,
    effort_variables,
    read_prompts,
)
from headrace_transformer.frontends.openai.structured_outputs import FIELDS, structured_outputs_of
from headrace_transformer.frontends.openai.tools import Choice, ToolChoice, as_function, read_tool_choice, read_tools
from headrace_transformer.generation.requests import TextRequest
from headrace_transformer.text.tools import ToolFunction

MAX_N = 16
MAX_CHOICES = 64  # Prompts times n: each is a sequence of its own at the predictor.
_MAX_SEED = 64  # Characters.
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions, and vLLM's.

_DECLARED = ("logprobs", "top_logprobs", "structured_outputs")
_SAMPLING = tuple(name for name in SamplingParameters.model_fields if name not in _DECLARED)


class StreamOptions(BaseModel):
    """The usage in a stream: at its end, and with vLLM's `continuous_usage_stats` in every event."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool = False
    continuous_usage_stats: bool = False


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: 63 bits, but for the first, whose seed is the one given.

    The same request has the same choices, then.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def choices_of(request: TextRequest, n: int) -> list[TextRequest]:
    """The request n times, with the seeds of its choices."""
    seed: Any = request.sampling.get("seed")
    is_seed = isinstance(seed, (int, float)) or (isinstance(seed, str) and len(seed) <= _MAX_SEED)
    if n == 1 or not is_seed:  # What is none is refused later.
        return [request] * n
    return [replace(request, sampling={**request.sampling, "seed": choice_seed(seed, i)}) for i in range(n)]


class GenerationRequest(SampledRequest):
    """What both kinds of completion share."""

    UNSUPPORTED: ClassVar[Mapping[str, Sequence[Any]]] = {
        "length_penalty": (1, 1.0),
        "logits_processors": ([],),
        "spaces_between_special_tokens": (True,),  # It has a meaning for slow tokenizers only.
        "truncation_side": ("left",),
        "use_beam_search": (False,),
    }

    READ: ClassVar[frozenset[str]] = frozenset(_SAMPLING) | FIELDS
    SAMPLING: ClassVar[Sequence[str]] = _SAMPLING

    n: int = Field(1, ge=1, le=MAX_N)
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    truncate_prompt_tokens: int | None = Field(None, ge=-1)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream=true", param="stream_options")
        self._structured_outputs = structured_outputs_of(self.extra, ignored=self._ignored)
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError("0 would leave no prompt", param="truncate_prompt_tokens")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs are not available with stream=true", param="prompt_logprobs")

    @abstractmethod
    def generations(self, call: CallContext) -> list[TextRequest]:
        """Its generations, one a choice; what is made of a prompt is made once for all of its choices."""

    def text_request(self, call: CallContext, **own: Any) -> TextRequest:
        return super().text_request(
            call,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            **own,
        )


class CompletionRequest(GenerationRequest):
    """A request to continue each of its prompts n times."""

    UNSUPPORTED: ClassVar[Mapping[str, Sequence[Any]]] = {
        **GenerationRequest.UNSUPPORTED,
        "prompt_embeds": ([],),
        "suffix": ("",),
    }

    prompt: Annotated[list[Prompt], BeforeValidator(partial(read_prompts, limit=MAX_CHOICES))]
    add_special_tokens: bool = True
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=1)

    def check(self) -> None:
        super().check()
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise InvalidRequestError(
                f"{len(self.prompt)} prompts times n={self.n}: at most {MAX_CHOICES} choices are allowed", param="n"
            )
        if self.echo and None not in (self.logprobs, self.prompt_logprobs) and self.logprobs != self.prompt_logprobs:
            raise InvalidRequestError("with echo, prompt_logprobs and logprobs must be equal", param="prompt_logprobs")
        if self.echo and self.truncate_prompt_tokens is not None:
            raise InvalidRequestError("not available with echo", param="truncate_prompt_tokens")
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequestError(f"best_of={self.best_of} is less than n={self.n}", param="best_of")
        if self.best_of is not None and self.best_of > self.n:
            raise UnsupportedFieldError("best_of", self.best_of, f" beyond n={self.n}")

    def generations(self, call: CallContext) -> list[TextRequest]:
        # With an echo, the log probabilities asked for are the prompt's too.
        scored = self.prompt_logprobs if self.logprobs is None or not self.echo else self.logprobs
        requests = [
            self.text_request(
                call,
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_ids=None if isinstance(prompt, str) else prompt,
                add_special_tokens=self.add_special_tokens,
                default_max_tokens=COMPLETION_MAX_TOKENS,
                asked=Submission(prompt_logprobs=scored),
                choices=len(self.prompt) * self.n,
                prompt_only=self.prompt_only,
            )
            for prompt in self.prompt
        ]
        return [choice for request in requests for choice in choices_of(request, self.n)]

    @property
    def prompt_only(self) -> bool:
        """Nothing is generated: OpenAI's way to ask for an echo alone."""
        limit = self.extra.get("max_tokens")
        return self.echo and type(limit) is int and limit == 0

    def sampling(self) -> dict[str, Any]:
        given = super().sampling()
        if self.prompt_only:
            given["max_tokens"] = 1  # A predictor makes one at least; the answer leaves it out.
        return given if self.logprobs is None else given | {"logprobs": True, "top_logprobs": self.logprobs}


class ChatCompletionRequest(GenerationRequest, ChatPromptRequest):
    """A request for n next messages of a conversation.

    `functions` and `function_call` are OpenAI's older names of `tools` and `tool_choice`, for one call at most.
    """

    UNSUPPORTED: ClassVar[Mapping[str, Sequence[Any]]] = {
        **GenerationRequest.UNSUPPORTED,
        "add_special_tokens": (False,),
        "audio": (),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "modalities": (["text"],),
        "web_search_options": (),
    }
    READ: ClassVar[frozenset[str]] = GenerationRequest.READ | {"max_completion_tokens"}

    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    reasoning_effort: Effort | None = None
    tool_choice: Choice = ToolChoice(mode="auto")
    parallel_tool_calls: bool = True
    functions: tuple[ToolFunction, ...] = ()
    function_call: ToolChoice | None = None

    @field_validator("functions", mode="before")
    @classmethod
    def _read_functions(cls, value: Any) -> Any:
        return read_tools([as_function(one) for one in value] if isinstance(value, list) else value)

    @field_validator("function_call", mode="before")
    @classmethod
    def _read_function_call(cls, value: Any) -> Any:
        if value not in ("none", "auto") and not isinstance(value, dict):
            raise ValueError("must be none, auto or the name of a function")
        return read_tool_choice(value if isinstance(value, str) else as_function(value))

    def generations(self, call: CallContext) -> list[TextRequest]:
        request = self.text_request(
            call,
            messages=self.conversation,
            template_options=self.template_options,
            asked=Submission(prompt_logprobs=self.prompt_logprobs),
            choices=self.n,
            tools=self.tool_use,
            has_parts=True,
        )
        return choices_of(request, self.n)

    @property
    def template_hints(self) -> Mapping[str, Any]:
        return effort_variables(self.reasoning_effort, "reasoning_effort")

    def check(self) -> None:
        super().check()
        has_newer = self.tools or self.tool_choice != ToolChoice(mode="auto")
        for name in ("functions", "function_call"):
            if has_newer and getattr(self, name):
                raise InvalidRequestError(f"{name} is the older way of tools; give one of both", param=name)
        self._ignored += dict.fromkeys(name for message in self.messages for name in message.unread)
        if self.functions or self.function_call is not None:
            choice = self.function_call or ToolChoice(mode="auto")
            self.read_tool_use("function_call", lambda: choice.use(self.functions, is_parallel=False))
        else:
            self.read_tool_use("tool_choice", lambda: self.tool_choice.use(self.tools, self.parallel_tool_calls))
        self.note_keywords()
        self.messages = []  # The conversation is kept.

    def sampling(self) -> dict[str, Any]:
        given = super().sampling()
        # The newer of two names for the same.
        limit = self.extra.get("max_completion_tokens")
        if limit is not None:
            given["max_tokens"] = limit
        if self.logprobs or self.top_logprobs:
            given |= {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        return given
