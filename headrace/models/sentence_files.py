"""The files of a folder that sentence-transformers wrote, for both services: its modules, prompts and limits.

`modules.json` lists the modules in their order; without it, a folder is a model of transformers alone, which
sentence-transformers reads with defaults of its own. What the files ask for and no code here computes raises
ValueError. Source: sentence-transformers 6.2.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from headrace.models.sources import read_config

MODULES_FILE = "modules.json"
CROSS_ENCODER = "CrossEncoder"
_EMBEDDER = "SentenceTransformer"
_OURS = "sentence_transformers."  # The package of modules; those of other packages are code in the folder.
_OUTPUTS = {"feature-extraction": "last_hidden_state", "sequence-classification": "logits", "text-generation": "logits"}
_UNLIMITED = 1e9
_TRANSFORMER_FILE = "sentence_bert_config.json"  # Earlier versions named it after the type of the model.
_TOKENIZER_OPTIONS = {"model_max_length", "padding_side", "use_fast", "trust_remote_code"}
# What the configuration of a Transformer may state; its arguments for weights change no number.
_KNOWN = {
    *("max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name", "unpad_inputs"),
    *("processing_kwargs", "processor_kwargs", "tokenizer_args", "model_kwargs", "model_args"),
}


class Module(NamedTuple):
    """A module's class, and the folder of its files."""

    kind: str
    folder: Path


@dataclass(frozen=True)
class SentenceFiles:
    """See the module. `config` is sentence-transformers' own configuration, `transformer` that of the first module."""

    folder: Path
    modules: Sequence[Module] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    transformer: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)  # config.json
    tokenizer: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json

    @property
    def is_cross_encoder(self) -> bool:
        """Whether it scores pairs: it says so, or has the head of a classifier and nothing that pools."""
        stated = self.config.get("model_type")
        if not stated and not any(module.kind == "Pooling" for module in self.modules):
            architectures = self.model.get("architectures") or [""]
            return bool(self.modules) and str(architectures[0]).endswith("ForSequenceClassification")
        return bool(stated == CROSS_ENCODER)

    @property
    def inner(self) -> Path:
        """The folder of the first module: of the transformer and the tokenizer."""
        return self.modules[0].folder if self.modules else self.folder

    @property
    def is_static(self) -> bool:
        """Whether it looks tokens up and has no transformer."""
        return bool(self.modules) and self.modules[0].kind == "StaticEmbedding"

    @property
    def task(self) -> str:
        return str(self.transformer.get("transformer_task") or "feature-extraction")

    @property
    def max_length(self) -> int | None:
        """Where sentence-transformers cuts a row, if at all; the model's position table may be shorter."""
        if self.is_static:
            return (read_config(self.inner, "tokenizer.json").get("truncation") or {}).get("max_length")
        limits = [self._tokenizer_options.get("model_max_length"), self.transformer.get("max_seq_length")]
        limits.append(self.tokenizer.get("model_max_length"))
        # Tokenizers without a limit state 10^30.
        return next((int(limit) for limit in limits if isinstance(limit, (int, float)) and limit < _UNLIMITED), None)

    @property
    def truncation_side(self) -> str:
        return str(self.tokenizer.get("truncation_side") or "right")

    @property
    def prompts(self) -> dict[str, str]:
        """The text before each text, by name."""
        defaults = {} if self.is_cross_encoder else {"query": "", "document": ""}
        return defaults | {name: str(text or "") for name, text in (self.config.get("prompts") or {}).items()}

    @property
    def normalizes(self) -> bool:
        """Whether its vectors have length one."""
        return bool(self.modules) and self.modules[-1].kind == "Normalize"

    @property
    def dimensions(self) -> Sequence[int] | None:
        """The sizes to which its vectors can be shortened, empty for any size; None if no file says that they can."""
        sizes = self.model.get("matryoshka_dimensions")
        is_any = self.model.get("is_matryoshka") or self.config.get("truncate_dim")
        return [int(size) for size in sizes] if sizes else [] if is_any else None

    @property
    def template_options(self) -> Mapping[str, Any]:
        """Variables of the chat template."""
        return dict((self.transformer.get("processing_kwargs") or {}).get("chat_template") or {})

    def message_format(self, template: object) -> str | None:
        """The form in which texts go into the tokenizer's chat template: flat, structured; None where they do not."""
        if self.modules:
            message = (self.transformer.get("modality_config") or {}).get("message")
            return None if message is None else str(message.get("format") or _format_of(template))
        return _format_of(template) if template else None

    def check(self) -> None:
        """Refuses what no code here computes; raises ValueError."""
        stated = self.config.get("model_type")
        if stated not in (None, _EMBEDDER, CROSS_ENCODER):
            raise ValueError(f"models of sentence-transformers' type {stated} are not served")
        if self.modules and (self.inner / "adapter_config.json").is_file():
            raise ValueError("it is an adapter of PEFT for an encoder: merge it into its base")
        processing = self.transformer.get("processing_kwargs") or {}
        modalities = self.transformer.get("modality_config") or {}
        output = {"method": "forward", "method_output_name": _OUTPUTS.get(self.task)}
        odd = [
            *(name for name, value in self.transformer.items() if value and name not in _KNOWN),
            *(f"processing_kwargs.{name}" for name, value in processing.items() if value and name != "chat_template"),
            *(f"tokenizer option {name}" for name in self._tokenizer_options if name not in _TOKENIZER_OPTIONS),
            *(f"modality {name}" for name in modalities if name not in ("text", "message")),
            *(f"{key} {one.get(key)}" for one in modalities.values() for key in output if one.get(key) != output[key]),
        ]
        if odd:
            raise ValueError(f"the configuration of its Transformer has {odd[0]}, which is not served")
        name = self.config.get("default_prompt_name")
        if name and name not in self.prompts:
            raise ValueError(f"its default prompt {name!r} is not among its prompts ({', '.join(self.prompts)})")

    @property
    def _tokenizer_options(self) -> Mapping[str, Any]:
        return self.transformer.get("processor_kwargs") or self.transformer.get("tokenizer_args") or {}


def read_sentence_files(folder: Path) -> SentenceFiles:
    """Reads and checks a folder; raises ValueError."""
    try:
        path = folder / MODULES_FILE
        modules = [_module(folder, module) for module in json.loads(path.read_text())] if path.is_file() else []
        inner, config, transformer = folder, {}, {}
        if path.is_file():
            inner = modules[0].folder
            config = read_config(folder, "config_sentence_transformers.json")
            names = [_TRANSFORMER_FILE, *(file.name for file in inner.glob("sentence_*_config.json"))]
            transformer = next(filter(None, (read_config(inner, name) for name in names)), {})
        model, tokenizer = read_config(inner, "config.json"), read_config(inner, "tokenizer_config.json")
        files = SentenceFiles(folder, modules, config, transformer, model, tokenizer)
        files.check()
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{MODULES_FILE} or a file that belongs to it is malformed ({error!r})") from None
    return files


def _module(folder: Path, module: Mapping[str, Any]) -> Module:
    name, path = str(module["type"]), Path(module["path"])
    if not name.startswith(_OURS):
        raise ValueError(f"{MODULES_FILE} has the module {name}: code of its own, which is never run")
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{MODULES_FILE} names files outside of its folder: {path}")
    return Module(name.rpartition(".")[2], folder / path)


def _format_of(template: object) -> str:
    """Whether a template reads the content as a list of parts or as a text, by sentence-transformers' own signs."""
    signs = ("content[0]", ".type", "'type'", '"type"', "item.type", "message.content[")
    is_flat = isinstance(template, str) and not any(sign in template for sign in signs)
    return "flat" if is_flat else "structured"
