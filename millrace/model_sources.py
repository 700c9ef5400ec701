"""Where models come from: `MODELS`, a comma list of `name=folder-or-hub-id[@revision]`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_MODELS = "storyteller=models/storyteller,normalizer=models/normalizer"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class ModelSource:
    """One served model: its public name, and a local folder or a hub id with an optional revision."""

    name: str
    location: str
    revision: str | None = None

    @property
    def is_local(self) -> bool:
        return Path(self.location).is_dir()


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of a model's folder; empty where there is none; ValueError where it is not JSON."""
    path = folder / name
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def parse_models(text: str) -> tuple[ModelSource, ...]:
    """The sources that `MODELS` names; ValueError says what is malformed."""
    sources = tuple(_parse_one(item.strip()) for item in text.split(",") if item.strip())
    if not sources:
        raise ValueError("names no model; expected name=folder-or-hub-id[@revision]")
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"names the model {name!r} twice")
    return sources


def _parse_one(item: str) -> ModelSource:
    name, equals, location = item.partition("=")
    if not equals or not _NAME.fullmatch(name) or not location:
        raise ValueError(f"{item!r} is not name=folder-or-hub-id[@revision]")
    if Path(location).is_dir():
        return ModelSource(name, location)
    hub_id, _, revision = location.partition("@")
    if location.startswith((".", "/", "~")) or hub_id.count("/") > 1:
        raise ValueError(f"{location!r} is not a folder")
    if not _HUB_ID.fullmatch(hub_id):
        raise ValueError(f"{location!r} is neither a folder nor a hub id")
    return ModelSource(name, hub_id, revision or None)
