"""The requests of front ends to the pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headrace.errors import InvalidRequestError
from headrace.rpc.server.call_context import CallContext
from headrace_protos.steps_pb2 import Submission
from headrace_transformer.generation.resume_ids import ResumePoint
from headrace_transformer.text.tools import ToolUse

if TYPE_CHECKING:  # The processes of bodies need no tokenizer.
    from headrace_transformer.text.tokenizer import Messages


MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_LENGTH = 256
MAX_MESSAGES = 4096  # Of one conversation: rendering more would stop the event loop.


class SharedPrompt:
    """The values that all choices of a request share: the prompt's ids, their charge, and its text in records.

    Owned by the event loop; shared by requests that differ only in their seeds.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.ids: dict[str, list[int] | InvalidRequestError] = {}  # By model; an error if the model refuses the prompt.
        self.charged: set[str] = set()  # Models: the tokens of a prompt count once for all choices.
        self.recorded: tuple[str, dict[str, Any]] | None = None  # The prompt, and the parameters without the seed.


@dataclass(frozen=True)
class TextRequest:
    """One generation: one of `prompt`, `prompt_ids` and `messages`, and the sampling parameters given.

    `add_special_tokens` is of `prompt`. `bad_words` become `bad_token_ids`. `template_options` are variables of the
    chat template. Without max_tokens in `sampling`, the maximum is `default_max_tokens`, or the model's default, or the
    room left in the context, if that is less. `asked` has fields of the submission that it is to have as they are;
    `choices` is how many such requests make one answer. With
    `prompt_only` the answer has no token of its own. `ignored_fields` are names, for the record. `default_seed` is the
    seed if `sampling` has none, None for a random one. The chunks that the client has, as `resume` says, are
    `repeated`. `include_stop_str_in_output` and `skip_special_tokens` are vLLM's. Of the prompt the last
    `truncate_prompt_tokens` are used, with -1 as many as leave room for the answer. `further_parameters` are for the
    record only. `tools` are the functions that the model may call. With `cuts_max_tokens` a maximum beyond the room in
    the context is that room; with `drops_messages` the oldest messages of a conversation that is too long are left out;
    with `has_parts` the chunks have calls and reasoning apart from the text. `engine_fields` are none of ours: only an
    engine of another kind reads them.
    """

    call: CallContext
    model: str
    prompt: str | None = None
    prompt_ids: Sequence[int] | None = None
    messages: Messages = ()
    add_special_tokens: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    default_max_tokens: int | None = None
    stop: Sequence[str] = ()
    bad_words: Sequence[str] = ()
    version: str = ""
    shared: SharedPrompt = field(default_factory=SharedPrompt, repr=False, compare=False)
    ignored_fields: Sequence[str] = ()
    asked: Submission = field(default_factory=Submission)
    choices: int = 1
    prompt_only: bool = False
    default_seed: int | None = None
    resume: ResumePoint | None = None
    further_parameters: Mapping[str, Any] = field(default_factory=dict)
    tools: ToolUse | None = None
    cuts_max_tokens: bool = False
    drops_messages: bool = False
    has_parts: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    engine_fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompt_kind(self) -> str:
        """Which of the three the prompt is: "text", "ids" or "messages"."""
        return "text" if self.prompt is not None else "ids" if self.prompt_ids is not None else "messages"

    @cached_property
    def refusal(self) -> InvalidRequestError | None:
        """The fault of the parts that do not depend on the model; None if there is none."""
        try:
            check_stop(self.stop)
            check_bad_words(self.bad_words)
        except InvalidRequestError as fault:
            return fault
        if (self.prompt is not None) + (self.prompt_ids is not None) + bool(self.messages) != 1:
            return InvalidRequestError("give one of a prompt, its ids and messages")
        return InvalidRequestError("the prompt is empty") if self.prompt == "" else None


def check_message_count(count: int) -> None:
    """Refuses a conversation of more messages than are rendered; call it before they are read."""
    if count > MAX_MESSAGES:
        raise InvalidRequestError(f"{count} messages, at most {MAX_MESSAGES} are allowed")


def check_stop(stop: Sequence[str]) -> None:
    """Refuses too many stop strings, and those that are empty or too long."""
    check_stop_count(len(stop))
    if any(not text or len(text) > MAX_STOP_LENGTH for text in stop):
        raise InvalidRequestError(f"a stop string must have 1 to {MAX_STOP_LENGTH} characters", param="stop")


def check_stop_count(count: int) -> None:
    """Refuses too many stop strings; call it before they are read."""
    if count > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"{count} stop strings, at most {MAX_STOP_STRINGS} are allowed", param="stop")


def check_bad_words(words: Sequence[str]) -> None:
    """Refuses too many bad words, and those that are empty or too long."""
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError(f"{len(words)} bad words, at most {MAX_BAD_WORDS} are allowed", param="bad_words")
    if any(not word.strip() or len(word) > MAX_BAD_WORD_LENGTH for word in words):
        raise InvalidRequestError(f"a bad word must have 1 to {MAX_BAD_WORD_LENGTH} characters", param="bad_words")
