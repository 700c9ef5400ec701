"""Engines that `MODELS` or a file names by address: any server of OpenAI's API, such as vLLM's or llama.cpp's.

In `MODELS`: `name=http://host:8000/v1#served-name;tokenizer=folder-or-hub-id`, with `|` between the addresses of
several engines that serve the same model. Without a served name it is the only one that the engine lists, or `name`.

A file, for more than fits into a list:

    chat:
      addresses: [http://a:8000/v1, http://b:8000/v1]
      model: served-name
      tokenizer: folder-or-hub-id
      key_file: /run/secrets/engine-key
      kind: vllm
      max_running: 64
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.errors import StartupError
from headrace.validation import first_fault

OTHER = "openai"  # The kind of any other server of OpenAI's API.
TGI = "tgi"
KINDS = ("vllm", "sglang", "llamacpp", TGI, "headrace", OTHER)
_SCHEMES = ("http://", "https://")
_ADDRESS = re.compile(r"https?://[^\s/?#;|,@]+(:[0-9]{1,5})?(/[^\s?#;|,]*)?")
_OPTIONS = ("tokenizer",)


@dataclass(frozen=True)
class EngineSource:
    """A model at engines: its public name, their base addresses, which end before `/chat/completions`.

    `served` is the model's name there, "" for the engine's own; `tokenizer` a folder or hub id, "" for the engine's
    folder, where it is on this machine; `key_file` has the key that the engines ask for; `kind` one of KINDS, "" to
    find it out; `max_running` how many requests an engine runs at a time, None for what it says, or vLLM's default.
    """

    name: str
    addresses: tuple[str, ...]
    served: str = ""
    tokenizer: str = ""
    key_file: Path | None = None
    kind: str = ""
    max_running: int | None = None

    def __post_init__(self) -> None:
        for address in self.addresses:
            if not _ADDRESS.fullmatch(address):
                raise ValueError(f"{address!r} is not http://host:port/path")
        if not self.addresses or len(set(self.addresses)) < len(self.addresses):
            raise ValueError(f"model {self.name!r} needs addresses, each once")
        if self.max_running is not None and self.max_running < 1:
            raise ValueError("max_running must be at least 1")
        if self.kind and self.kind not in KINDS:
            raise ValueError(f"{self.kind!r} is none of {', '.join(KINDS)}")

    @property
    def key(self) -> str:
        """The key now; raises OSError."""
        return "" if self.key_file is None else self.key_file.read_text().strip()


def is_engine(location: str) -> bool:
    """Whether the location of a model in `MODELS` is that of engines."""
    return location.startswith(_SCHEMES)


def parse_engine(name: str, location: str) -> EngineSource:
    """The engines that an item of `MODELS` names; raises ValueError."""
    where, _, rest = location.partition("#")
    served, *options = rest.split(";") if rest else [""]
    if not rest and ";" in where:
        where, *options = where.split(";")
    given = dict(option.split("=", 1) for option in options if "=" in option)
    if len(given) < len(options) or not given.keys() <= set(_OPTIONS):
        raise ValueError(f"{location!r}: only {', '.join(_OPTIONS)}=… can follow the served name")
    return EngineSource(name, tuple(one.rstrip("/") for one in where.split("|")), served, given.get("tokenizer", ""))


class _Stated(BaseModel):
    model_config = ConfigDict(extra="forbid")

    addresses: tuple[str, ...]
    model: str = ""
    tokenizer: str = ""
    key_file: Path | None = None
    kind: str = ""
    max_running: int | None = None

    def source(self, name: str) -> EngineSource:
        addresses = tuple(address.rstrip("/") for address in self.addresses)
        return EngineSource(name, addresses, self.model, self.tokenizer, self.key_file, self.kind, self.max_running)


def read_engines(path: Path) -> tuple[EngineSource, ...]:
    """The engines of a file; raises StartupError."""
    try:
        stated: Any = yaml.safe_load(path.read_text()) or {}
        if not isinstance(stated, Mapping):
            raise ValueError("must be an object of models")
        return tuple(_Stated.model_validate(value).source(str(name)) for name, value in stated.items())
    except ValidationError as error:
        place, message = first_fault(error)
        raise StartupError(f"{path}: {'.'.join(map(str, place))}: {message}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise StartupError(f"{path}: {error}") from error
