"""Folders of models with chat templates for tools and reasoning: the storyteller's files with another template."""

import json
import shutil
from pathlib import Path

STORYTELLER = Path(__file__).parents[2] / "models" / "storyteller"

# `start` opens a call, `member` names its arguments, `end` closes it; `think` ends the prompt.
_TEMPLATE = """{{- bos_token -}}
{%%- if tools -%%}<|system|>Tools: {{ tools | tojson }} %(start)s{"name": "f", "%(member)s": {}}%(end)s{%%- endif -%%}
{%%- for message in messages -%%}
<|{{ "user" if message.role == "tool" else message.role }}|>
{%%- if message.role == "tool" %%}[{{ message.tool_call_id }}] {%% endif -%%}
{%%- if message.reasoning_content %%}({{ message.reasoning_content }}) {%% endif -%%}
{{- message.content -}}
{%%- for call in message.tool_calls or [] -%%}
%(start)s{"name": "{{ call.function.name }}", "%(member)s": {{ call.function.arguments | tojson }}}%(end)s
{%%- endfor -%%}
{%%- if message.role == "assistant" -%%}{{ eos_token }}{%%- endif -%%}
{%%- endfor -%%}
{%%- if add_generation_prompt -%%}<|assistant|>%(think)s{%%- endif -%%}
"""
_THINK = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)
_FORMATS = {
    "hermes": {"start": "<tool_call>", "member": "arguments", "end": "</tool_call>"},
    "llama": {"start": "", "member": "parameters", "end": ""},
    "mistral": {"start": "[TOOL_CALLS]", "member": "arguments", "end": ""},
}
_SPECIAL = {"llama": ("<|python_tag|>",), "mistral": ("[TOOL_CALLS]", "[ARGS]")}


def save_tool_model(folder: Path, tool_format: str, thinks: bool = False) -> Path:
    """The storyteller with a template of a format of tool calls, and with that format's special tokens.

    Their ids are beyond those of the weights, so that only a fake predictor can give them.
    """
    shutil.copytree(STORYTELLER, folder)
    template = _TEMPLATE % (_FORMATS[tool_format] | {"think": _THINK if thinks else ""})
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    used = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    for number, content in enumerate(_SPECIAL.get(tool_format, ()), max(used) + 1):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": number, "content": content, "special": True, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder
