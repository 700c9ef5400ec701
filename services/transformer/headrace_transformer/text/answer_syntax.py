"""How a model writes calls of functions and reasoning: by its chat template and vocabulary, or by the settings."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from headrace_transformer.text.answer_parser import REASONING_FORMATS, AnswerParser, ReasoningMarks, ReasoningParser
from headrace_transformer.text.answer_parts import Content, Part
from headrace_transformer.text.tool_calls import PARSERS
from headrace_transformer.text.tools import ToolUse

NONE = "none"
_TOOLS = re.compile(r"\btools\b")
_OTHER_MARKUP = ("<function=", "<arg_key>")  # Of Qwen3-Coder and GLM, within <tool_call>.
_TOOL_MARKS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
}


class AnswerSyntax(NamedTuple):
    """Names of PARSERS and of REASONING_FORMATS; "" for none. `takes_tools`: the chat template uses `tools`."""

    tools: str = ""
    reasoning: str = ""
    takes_tools: bool = False

    def marks(self, with_tools: bool) -> list[str]:
        """The texts that an answer is parsed by, which may be special tokens of the vocabulary."""
        tools = _TOOL_MARKS[self.tools] if self.tools and with_tools else ()
        return [*tools, *(REASONING_FORMATS[self.reasoning] if self.reasoning else ())]

    def reasoning_after(self, prompt_end: str) -> tuple[ReasoningMarks | None, bool]:
        """The marks of reasoning that may follow a prompt, and whether the prompt has begun it.

        None where there is no reasoning, or where the prompt has ended it.
        """
        marks, end = REASONING_FORMATS.get(self.reasoning), prompt_end.rstrip()
        if marks is None or end.endswith(marks.close):
            return None, False
        return marks, end.endswith(marks.open)

    def parser(self, prompt_end: str, tools: ToolUse | None, seed: int | None) -> AnswerParser | None:
        """The parser of an answer after that prompt, with functions that it may call; None if it is text alone.

        The ids of calls are the same for equal seeds; None: a random one.
        """
        calls = None
        if self.tools and tools is not None:
            call_id = _mistral_call_id if self.tools == "mistral" else _call_id
            seed = random.getrandbits(64) if seed is None else seed
            calls = PARSERS[self.tools](tools.names, partial(call_id, seed))
        marks, is_open = self.reasoning_after(prompt_end)
        reasoning = None if marks is None else ReasoningParser(marks, is_open)
        max_calls = None if tools is None or tools.is_parallel else 1
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
    if takes_tools:
        if "<tool_call>" in template and not any(markup in template for markup in _OTHER_MARKUP):
            tools = "hermes"
        elif has_token("[TOOL_CALLS]"):
            tools = "mistral"
        elif has_token("<|python_tag|>"):
            tools = "llama"
    reasoning = ""
    for name, marks in REASONING_FORMATS.items():
        if marks.close in template or (template and has_token(marks.close)):
            reasoning = name
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


def _call_id(seed: int, index: int) -> str:
    """The id of a call of an answer, the same at each repetition of the answer."""
    return f"call_{_digest(seed, index)[:24]}"


def _mistral_call_id(seed: int, index: int) -> str:
    """The same for templates that refuse any id but of nine letters and digits."""
    return _digest(seed, index)[:9]


def _digest(seed: int, index: int) -> str:
    return hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=16, person=b"tool call id").hexdigest()
