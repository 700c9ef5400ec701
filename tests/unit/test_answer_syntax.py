"""A model's format of calls and reasoning, from the marks of its chat template and vocabulary or from the settings."""

import pytest

from headrace_transformer.text.answer_parser import AnswerSyntax, SyntaxSettings, parse_formats, syntax_of
from headrace_transformer.text.tool_calls import PARSERS

TOOLS = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
MODELS = {
    "bundled": (("{{ message.content }}",), (), AnswerSyntax()),
    "text alone, in a vocabulary with marks": (("{{ messages }}",), ("[TOOL_CALLS]",), AnswerSyntax()),
    "Qwen2.5": ((TOOLS + '<tool_call>{"name": ',), (), AnswerSyntax("hermes", "", True)),
    "Qwen3": ((TOOLS + "<tool_call> '</think>' in content",), (), AnswerSyntax("hermes", "think", True)),
    "Hermes": (("{{ messages }}", TOOLS + "<tool_call>"), (), AnswerSyntax("hermes", "", True)),
    "Llama-3.2": ((TOOLS,), ("<|python_tag|>",), AnswerSyntax("llama", "", True)),
    "Mistral": ((TOOLS,), ("[TOOL_CALLS]",), AnswerSyntax("mistral", "", True)),
    "Magistral": ((TOOLS,), ("[TOOL_CALLS]", "[/THINK]"), AnswerSyntax("mistral", "mistral", True)),
    "DeepSeek-R1": (("{{ messages }}",), ("</think>",), AnswerSyntax("", "think", False)),
    "Qwen3-Coder": ((TOOLS + "<tool_call>\n<function=",), (), AnswerSyntax("", "", True)),
    "GLM-4.5": ((TOOLS + "<tool_call><arg_key>",), (), AnswerSyntax("", "", True)),
    "gpt-oss": (
        (TOOLS + "<|start|>assistant<|channel|>final<|message|>",),
        (),
        AnswerSyntax("harmony", "harmony", True),
    ),
    "MiniMax-M3": ((TOOLS + '<tool_call><invoke name="',), (), AnswerSyntax("", "", True)),
    "Apriel-1.5": ((TOOLS + "<tool_calls>[ <tool_call>",), (), AnswerSyntax("", "", True)),
    "Hunyuan": ((TOOLS + "<tool_call>name<tool_sep>",), (), AnswerSyntax("", "", True)),
    "Functionary 3.1": ((TOOLS + "<function=",), ("<|python_tag|>",), AnswerSyntax("", "", True)),
    "without a template": ((), ("</think>", "<|python_tag|>"), AnswerSyntax()),
}


@pytest.mark.parametrize("model", MODELS)
def test_the_format_is_found_in_the_models_files(model):
    templates, vocabulary, syntax = MODELS[model]
    assert syntax_of(templates, vocabulary.__contains__) == syntax


def test_marks_are_what_may_be_a_token_of_the_vocabulary():
    assert AnswerSyntax("hermes", "think").marks(with_tools=True) == [
        *("<tool_call>", "</tool_call>", "<think>", "</think>")
    ]
    assert {*AnswerSyntax("", "harmony").marks(with_tools=False)} == {
        *("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    }


def test_the_settings_name_the_format_of_a_model():
    settings = SyntaxSettings(parse_formats(" mine=llama, org/x = none", tuple(PARSERS)), {"mine": "none"})
    own = AnswerSyntax("hermes", "think", True)
    assert settings.of("mine", own) == AnswerSyntax("llama", "", True)
    assert settings.of("org/x", own) == AnswerSyntax("", "think", True)
    assert settings.of("other", own) == own
    for text in ("mine", "mine=json", "=llama"):
        with pytest.raises(ValueError, match="is not model=format with one of hermes, llama, mistral, none"):
            parse_formats(text, tuple(PARSERS))


@pytest.mark.parametrize(
    ("prompt", "may_follow", "is_open"),
    [("Hi", True, False), ("Hi<think>\n", True, True), ("Hi<think>\n\n</think>\n\n", False, False)],
)
def test_the_end_of_the_prompt_decides_about_reasoning(prompt, may_follow, is_open):
    marks, opened = AnswerSyntax("", "think").reasoning_after(prompt)
    assert (marks is not None, opened) == (may_follow, is_open)
    assert AnswerSyntax("hermes").reasoning_after(prompt) == (None, False)


def test_the_form_of_an_answer_that_is_continued_follows_no_channel():
    syntax = AnswerSyntax("", "harmony")
    assert syntax.reasoning_after("<|end|><|start|>assistant")[0] is not None
    assert syntax.reasoning_after("<|start|>assistant<|channel|>final<|message|>Yes,") == (None, False)
