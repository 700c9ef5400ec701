"""The tokenizer in a model's folder, for every part that needs one.

`tokenizer.json` is used as it is. transformers would build normalizer, pre-tokenizer and post-processor anew for many
of the classes that a configuration can name, and then gives other ids. What the file lacks comes from the files beside
it, as transformers reads them: added and special tokens from `tokenizer_config.json`, whose `added_tokens_decoder` also
changes the flags of tokens in the file, or else from `special_tokens_map.json` and `added_tokens.json`; chat templates
from `chat_template.jinja`, the folder `additional_chat_templates` or `tokenizer_config.json`. A folder without
`tokenizer.json` is converted by transformers.

Flags such as `add_bos_token` do not count where the file has a post-processor: transformers ignores them too. Limits of
length and padding in the file are switched off.
"""

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from headrace.models.sources import read_config

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Of each kind of tokenizer, the file that transformers converts; without one it makes up a vocabulary.
VOCABULARIES = (TOKENIZER_FILE, "vocab.txt", "vocab.json", "*.model", "*.spm", "tekken.json")

# Lists of special tokens, or such tokens by name.
_LISTS = ("extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens")
_DEFAULT_TEMPLATE = "default"
_TEMPLATE_FILES = ("tokenizer_config.json", "chat_template.json", "processor_config.json")
_CALL_END = "<|call|>"  # gpt-oss ends an answer with it too, which not every generation_config.json says.
_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*(?=\[)')  # Within a string, its quotation marks would be escaped.
_CONVERSION_S = 300.0
_MAX_REASON = 500


@dataclass(frozen=True)
class ModelTokenizer:
    """See the module. The special tokens have names such as `bos_token`; the templates are those of chats, by name."""

    backend: Tokenizer
    special_tokens: Mapping[str, str]
    templates: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokenizer's own end tokens."""
        ids = map(self.backend.token_to_id, (self.special_tokens.get("eos_token", ""), _CALL_END))
        return frozenset(token_id for token_id in ids if token_id is not None)


def has_vocabulary(folder: Path) -> bool:
    """Whether a folder has the files of a tokenizer."""
    return any(file.is_file() for pattern in VOCABULARIES for file in folder.glob(pattern))


def read_tokenizer(folder: Path) -> ModelTokenizer:
    """The tokenizer in a folder; raises ValueError, which names the file at fault; a conversion blocks for seconds."""
    if not has_vocabulary(folder):
        raise ValueError(f"no tokenizer in {folder}: it has none of {', '.join(VOCABULARIES)}")
    config, path = read_config(folder, "tokenizer_config.json"), folder / TOKENIZER_FILE
    named: dict[str, str] = {}
    if path.is_file():
        backend = _read(path, path.read_bytes())
    else:
        converted, named = _converted(folder)
        backend = _read(folder, converted)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    try:
        declared = _declared(folder, config)
        _add(backend, _of_ids(config), replaces=True)
        _add(backend, (token for _, token in declared))
        named |= {name: token.content for name, token in declared if name}
        return ModelTokenizer(backend, named, chat_templates(folder), config)
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{folder}: the tokenizer's configuration cannot be read: {error!r}") from None


def own_end_ids(folder: Path) -> frozenset[int]:
    """The end tokens of a folder's tokenizer; none where there is no tokenizer that can be read."""
    try:
        config = read_config(folder, "tokenizer_config.json")
        stated = config.get("added_tokens_decoder") or {}
        adds = _CALL_END in str(config) or (folder / "special_tokens_map.json").is_file()
        if stated or not adds:  # Without building a tokenizer, which takes longer.
            own = _added_tokens(folder / TOKENIZER_FILE) or [{"id": i, **one} for i, one in stated.items()]
            ids = {token["content"]: int(token["id"]) for token in own}  # The file's ids have priority.
            if (eos := config.get("eos_token")) in [*ids]:
                return frozenset(ids[name] for name in (eos, _CALL_END) if name in ids)
        return read_tokenizer(folder).end_ids if has_vocabulary(folder) else frozenset()
    except (ValueError, TypeError, AttributeError, KeyError, OSError) as error:
        logger.warning("the tokenizer's end token is unknown: %s", error)
        return frozenset()


@contextmanager
def tokenizer_errors(what: object, raised: type[Exception] = ValueError) -> Iterator[None]:
    """Raises an error of that type, of one line, for what tokenizers raises while it reads `what`.

    That is bare Exceptions, and PanicException, which is none.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise raised(f"{what} cannot be read: {_one_line(error)}") from None


def _read(path: Path, contents: bytes) -> Tokenizer:
    with tokenizer_errors(path):
        backend = Tokenizer.from_buffer(contents)
    if backend.decoder is not None:
        with tokenizer_errors(f"{path}: the decoder, which fails on a text without characters,"):
            backend.decoder.decode([""])  # With `Strip` at the end of a text the library panics.
    return backend


def _added_tokens(path: Path) -> list[dict[str, Any]]:
    """The `added_tokens` of tokenizer.json, without parsing its vocabulary, which takes longest."""
    text = path.read_bytes().decode() if path.is_file() else ""
    found = _ADDED_TOKENS.search(text)
    return json.JSONDecoder().raw_decode(text, found.end())[0] if found else []


def _of_ids(config: Mapping[str, Any]) -> list[AddedToken]:
    """The tokens of `added_tokens_decoder`, whose flags have priority over those in tokenizer.json."""
    by_id = config.get("added_tokens_decoder") or {}
    return [_token(by_id[index], is_special=False) for index in sorted(by_id, key=lambda index: (len(index), index))]


def _declared(folder: Path, config: Mapping[str, Any]) -> list[tuple[str, AddedToken]]:
    """The other tokens in the files beside tokenizer.json, each with its name or "", in the order of new ids."""
    is_old = "added_tokens_decoder" not in config
    mapped = read_config(folder, "special_tokens_map.json") if is_old else {}
    named: dict[str, Any] = {**config, **mapped}
    extra: list[Any] = []
    for stated in (part.get(name) for part in (config, mapped) for name in _LISTS):
        if isinstance(stated, dict):
            named |= stated
        else:
            extra += stated or []
    names = [*NAMED_TOKENS, *(name for name in named if name not in NAMED_TOKENS and name.endswith("_token"))]
    names = [name for name in names if isinstance(named.get(name), (str, dict))]
    tokens = [(name, _token(named[name], is_special=True)) for name in names]
    tokens += (("", _token(token, is_special=True)) for token in extra)
    if is_old:
        added = read_config(folder, "added_tokens.json")
        known = {token.content for _, token in tokens}
        tokens[:0] = (("", AddedToken(text, special=text in known)) for text in sorted(added, key=added.__getitem__))
    return tokens


def _token(value: str | Mapping[str, Any], is_special: bool) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=is_special, normalized=False)
    flags = {name: value[name] for name in ("single_word", "lstrip", "rstrip", "normalized") if name in value}
    return AddedToken(value["content"], special=is_special or bool(value.get("special")), **flags)


def _add(backend: Tokenizer, tokens: Iterable[AddedToken], replaces: bool = False) -> None:
    """Adds what the tokenizer does not have as added tokens, and makes special what is declared so.

    With `replaces` the other flags of present tokens change too.
    """
    present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for token in tokens:
        own = present.get(token.content)
        before = own and own.__getstate__()
        if own is not None:
            token.special = own.special = own.special or token.special
            token = token if replaces else own
        present[token.content] = token
        if token.__getstate__() != before:
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def chat_templates(folder: Path) -> dict[str, str]:
    """The chat templates in a folder by name; a file has priority over the configuration."""
    files = {file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / CHAT_TEMPLATE_FILE).is_file():
        files[_DEFAULT_TEMPLATE] = folder / CHAT_TEMPLATE_FILE
    if files:
        return {name: file.read_text("utf-8") for name, file in files.items()}
    configs = (read_config(folder, name) for name in _TEMPLATE_FILES)
    stated: Any = next(filter(None, (config.get("chat_template") for config in configs)), [])
    if isinstance(stated, str):
        return {_DEFAULT_TEMPLATE: stated}
    return {template["name"]: template["template"] for template in stated}


def _converted(folder: Path) -> tuple[bytes, dict[str, str]]:
    """What transformers makes of other files: a tokenizer.json, and the named tokens.

    In a process of its own: the import blocks the interpreter and stays in memory.
    """
    command = (sys.executable, "-m", "headrace.models.tokenizer_conversion", str(folder))
    try:
        done = subprocess.run(command, capture_output=True, timeout=_CONVERSION_S)
    except subprocess.TimeoutExpired:
        raise ValueError(f"the tokenizer in {folder} cannot be converted within {_CONVERSION_S:g} s") from None
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise ValueError(f"the tokenizer in {folder} cannot be converted: {_one_line(last)}")
    result = json.loads(done.stdout)
    return result["tokenizer"].encode(), result["named"]


def _one_line(error: object) -> str:
    text = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else str(error)
    return " ".join(text.split())[:_MAX_REASON]
