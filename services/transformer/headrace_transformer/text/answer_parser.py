"""The text of one answer in parts: its reasoning, then its calls of functions and the text beside them.

`push` takes the text of one token at a time, so that the tokens of the reasoning are counted. Pure; the text may be cut
anywhere.

Reasoning is `<think>`, the reasoning, `</think>` before the answer. A template may open it itself: then the prompt ends
with the mark, and the output begins inside. Reasoning that is never closed, because the answer ended at its maximum
length, is reasoning to its end.

How a model writes calls and reasoning (`AnswerSyntax`) is seen from its chat template and vocabulary, or stated by the
settings.
"""

import hashlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from headrace_transformer.text.answer_parts import (
    Answer,
    CallArguments,
    CallStart,
    Content,
    Part,
    Reasoning,
    held_length,
    layout_length,
    merged,
)
from headrace_transformer.text.harmony import HarmonyParser
from headrace_transformer.text.tool_calls import PARSERS, ToolCallParser
from headrace_transformer.text.tools import ToolUse

NONE, HARMONY = "none", "harmony"
_TOOLS = re.compile(r"\btools\b")
# Of Qwen3-Coder and Functionary, GLM, MiniMax, Apriel, Hunyuan; most within <tool_call>.
_OTHER_MARKUP = ("<function=", "<arg_key>", "<invoke ", "<tool_calls>", "<tool_sep>")
_TOOL_MARKS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    HARMONY: ("<|constrain|>", "<|call|>", "<|return|>"),
}
TOOL_FORMATS = tuple(_TOOL_MARKS)


@dataclass(eq=False)
class AnswerParser:
    """One instance for each answer; without a parser for something, that is text. `max_calls` leaves out others.

    A `HarmonyParser` separates calls too.
    """

    reasoning: "ReasoningParser | HarmonyParser | None"
    tools: ToolCallParser | None
    max_calls: int | None = None
    _steps: list[list[Part]] = field(default_factory=lambda: [[]])
    _reasoning_tokens: int = 0  # With the marks.

    def push(self, text: str) -> None:
        """Takes the text of the next token."""
        was_open = self.reasoning is not None and self.reasoning.is_open
        self._steps.append([])
        self.push_rest(text)
        if self.reasoning is not None and (was_open or self.reasoning.is_open):
            self._reasoning_tokens += 1

    def push_rest(self, text: str) -> None:
        """Takes further text of tokens that were counted already."""
        self._take([Content(text)] if self.reasoning is None else self.reasoning.push(text))

    def flush(self) -> None:
        """Takes the rest, at the end."""
        if self.reasoning is not None:
            self._take(self.reasoning.flush())
        if self.tools is not None:
            self._keep(self.tools.flush())

    def taken(self) -> Answer:
        """The parts since the last call."""
        steps, self._steps = self._steps, [[]]
        parts = merged(part for step in steps for part in step)
        return Answer(parts, None if self.reasoning is None else self._reasoning_tokens, steps)

    def _take(self, parts: list[Part]) -> None:
        for part in parts:
            if isinstance(part, Content) and self.tools is not None:
                self._keep(self.tools.push(part.text))
            else:
                self._keep([part])

    def _keep(self, parts: list[Part]) -> None:
        limit = self.max_calls
        for part in parts:
            is_beyond = limit is not None and isinstance(part, CallStart | CallArguments) and part.number >= limit
            if not is_beyond and not (isinstance(part, Content) and not part.text):
                self._steps[-1].append(part)


class ReasoningMarks(NamedTuple):
    """The texts before and after a model's reasoning; `answer`, if any, is before every answer."""

    open: str
    close: str
    answer: str = ""

    @property
    def tokens(self) -> list[str]:
        """What may be a special token of the vocabulary: the marks, or within them such as `<|channel|>`."""
        return [token for mark in self for token in _TOKENS.findall(mark) or filter(None, [mark])]


_TOKENS = re.compile(r"<\|\w+\|>")
REASONING_FORMATS = {
    HARMONY: ReasoningMarks(
        "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>"
    ),  # gpt-oss
    "think": ReasoningMarks("<think>", "</think>"),  # DeepSeek-R1, Qwen3, QwQ
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),  # Magistral
}


class ReasoningParser:
    """Separates the reasoning of one answer from what follows; `is_open`: the prompt has opened it."""

    def __init__(self, marks: ReasoningMarks, is_open: bool) -> None:
        self._marks = marks
        self._text = ""  # Held back.
        self._is_at_start = True  # White space before the reasoning or the answer is layout.
        self.is_open = is_open
        self._is_before = not is_open

    def push(self, text: str) -> list[Part]:
        """The parts that are certain after adding `text`."""
        if not (self.is_open or self._is_before or self._is_at_start):
            return [Content(text)] if text else []
        self._text += text
        parts: list[Part] = []
        if self._is_before:
            self._begin()
        if self.is_open:
            self._reason(parts)
        if not (self.is_open or self._is_before):
            self._answer(parts)
        return parts

    def flush(self) -> list[Part]:
        """The rest, at the end."""
        text, self._text = self._text, ""
        if self.is_open:
            return [Reasoning(text)] if text.strip() else []
        return [Content(text)] if text and (self._is_before or text.strip()) else []

    def _begin(self) -> None:
        """Decides whether the output begins with reasoning."""
        text, marks = self._text.lstrip(), self._marks
        if text.startswith(marks.open):
            self._text, self._is_before, self.is_open = text[len(marks.open) :], False, True
        elif not marks.open.startswith(text):
            self._is_before = self._is_at_start = False

    def _reason(self, parts: list[Part]) -> None:
        if self._is_at_start:
            self._text = self._text.lstrip()
        at = self._text.find(self._marks.close)
        kept = held_length(self._text, self._marks.close)
        passed = self._text[:at] if at >= 0 else self._text[: len(self._text) - kept]
        if at >= 0:
            passed = passed[: len(passed) - layout_length(passed)]
            self._text = self._text[at + len(self._marks.close) :]
            self.is_open = False
        else:
            self._text = self._text[len(passed) :]
        if passed:
            parts.append(Reasoning(passed))
        self._is_at_start = not self.is_open or (self._is_at_start and not passed)

    def _answer(self, parts: list[Part]) -> None:
        text = self._text.lstrip() if self._is_at_start else self._text
        self._text = ""
        if text:
            self._is_at_start = False
            parts.append(Content(text))


class AnswerSyntax(NamedTuple):
    """Names of TOOL_FORMATS and of REASONING_FORMATS; "" for none. `takes_tools`: the chat template uses `tools`."""

    tools: str = ""
    reasoning: str = ""
    takes_tools: bool = False

    def marks(self, with_tools: bool) -> list[str]:
        """The texts that an answer is parsed by, which may be special tokens of the vocabulary."""
        tools = _TOOL_MARKS[self.tools] if self.tools and with_tools else ()
        return [*tools, *(REASONING_FORMATS[self.reasoning].tokens if self.reasoning else ())]

    def reasoning_after(self, prompt_end: str) -> tuple[ReasoningMarks | None, bool]:
        """The marks of reasoning that may follow a prompt, and whether the prompt has begun it.

        None where there is no reasoning, or where the prompt has ended it.
        """
        marks, end = REASONING_FORMATS.get(self.reasoning), prompt_end.rstrip()
        if marks is None or end.endswith(marks.open):
            return marks, marks is not None
        is_answer = not end.endswith("<|start|>assistant") if marks.answer else end.endswith(marks.close)
        return None if is_answer else marks, False

    def parser(self, prompt_end: str, tools: ToolUse | None, seed: int | None) -> AnswerParser | None:
        """The parser of an answer after that prompt, with functions that it may call; None if it is text alone.

        The ids of calls are the same for equal seeds; None: a random one.
        """
        calls, call_id = None, None
        if self.tools and tools is not None:
            call_id = partial(_call_id, random.getrandbits(64) if seed is None else seed, self.tools)
        max_calls = None if tools is None or tools.is_parallel else 1
        marks, is_open = self.reasoning_after(prompt_end)
        if self.reasoning == HARMONY or (self.tools == HARMONY and call_id is not None):
            return AnswerParser(HarmonyParser(is_open, call_id, self.reasoning != HARMONY), None, max_calls)
        if tools is not None and call_id is not None:
            calls = PARSERS[self.tools](tools.names, call_id)
        reasoning = None if marks is None else ReasoningParser(marks, is_open)
        return AnswerParser(reasoning, calls, max_calls) if calls or reasoning else None

    def parts_of(self, text: str, prompt_end: str, tools: ToolUse | None, seed: int) -> Sequence[Part]:
        """The parts of a whole answer."""
        parser = self.parser(prompt_end, tools, seed)
        if parser is None:
            return [Content(text)]
        parser.push_rest(text)
        parser.flush()
        return parser.taken().parts


def syntax_of(templates: Sequence[str], has_token: Callable[[str], bool]) -> AnswerSyntax:
    """The syntax of a model with these chat templates, whose vocabulary is asked for tokens."""
    template = "\n".join(templates)
    takes_tools = bool(_TOOLS.search(template))
    tools = ""
    if takes_tools and not any(markup in template for markup in _OTHER_MARKUP):
        if "<tool_call>" in template:
            tools = "hermes"
        elif has_token("[TOOL_CALLS]"):
            tools = "mistral"
        elif has_token("<|python_tag|>"):
            tools = "llama"
    reasoning = ""
    for name, marks in REASONING_FORMATS.items():
        if (marks.answer or marks.close) in template or (template and has_token(marks.close)):
            reasoning = name
    if takes_tools and reasoning == HARMONY:
        tools = HARMONY
    return AnswerSyntax(tools, reasoning, takes_tools)


class SyntaxSettings(NamedTuple):
    """The formats that the settings give for single models, by name; other models have their own."""

    tools: Mapping[str, str] = {}
    reasoning: Mapping[str, str] = {}

    def of(self, model: str, own: AnswerSyntax) -> AnswerSyntax:
        """The syntax of a model whose files have `own`."""
        tools, reasoning = self.tools.get(model), self.reasoning.get(model)
        return AnswerSyntax(
            own.tools if tools is None else tools.replace(NONE, ""),
            own.reasoning if reasoning is None else reasoning.replace(NONE, ""),
            own.takes_tools,
        )


def parse_formats(text: str, known: Sequence[str]) -> dict[str, str]:
    """Reads a comma list of model=format; raises ValueError."""
    found = {}
    for item in (item.strip() for item in text.split(",") if item.strip()):
        model, _, name = item.rpartition("=")
        if not model.strip() or name.strip() not in (*known, NONE):
            raise ValueError(f"{item!r} is not model=format with one of {', '.join((*known, NONE))}")
        found[model.strip()] = name.strip()
    return found


def _call_id(seed: int, tool_format: str, index: int) -> str:
    """The id of a call, the same at each repetition of the answer; Mistral's templates want nine letters and digits."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=16, person=b"tool call id").hexdigest()
    return digest[:9] if tool_format == "mistral" else f"call_{digest[:24]}"
