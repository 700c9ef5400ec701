"""Where processors come from: a comma list of `name=package.module:Class` or `name=folder/file.py:Class`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.models.sources import is_name

_ENTRY = re.compile(r"(?P<name>[^=]+)=(?P<where>[^:=]+):(?P<cls>[A-Za-z_]\w*)")


@dataclass(frozen=True)
class ProcessorSource:
    """A name, and the class behind it; `where` is a module or a file that ends in .py."""

    name: str
    where: str
    class_name: str


def parse_processors(text: str) -> tuple[ProcessorSource, ...]:
    """The processors in a setting; raises ValueError with what is malformed."""
    sources: list[ProcessorSource] = []
    for item in (item.strip() for item in text.split(",") if item.strip()):
        match = _ENTRY.fullmatch(item)
        if match is None or not is_name(match["name"]):
            raise ValueError(f"{item!r} is not name=package.module:Class or name=folder/file.py:Class")
        if any(source.name == match["name"] for source in sources):
            raise ValueError(f"names {match['name']!r} twice")
        sources.append(ProcessorSource(match["name"], match["where"], match["cls"]))
    return tuple(sources)
