"""Where models come from: `MODELS`, a comma list of `name=folder-or-hub-id[@revision]`.

A GGUF file stands for a folder; on the hub, `org/repo:Q4_K_M` for the file of that quantisation. `org/name[@revision]`
alone is the hub's model, under its id. In place of a hub id a URL may stand, see below. An item can be a model at
engines instead, see engine_sources.py.

URLs are the hub's, buckets' and registries':

    hf://organisation/name[@revision]
    s3://bucket/prefix, gs://bucket/prefix, az://container/prefix
    oci://registry[:port]/repository[:tag][@sha256:…]

A prefix is a folder, or one file. A pattern of allowed locations matches scheme and first part (bucket or host with
port) by themselves, and the rest: no wildcard reaches from one into another. A pattern's tag (`:v*`) or digest
(`@sha256:…`) is compared with what is fetched, which is the digest where a location has one.
"""

import json
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from headrace.models.engine_sources import EngineSource, is_engine, parse_engine

DEFAULT_MODELS = "storyteller=models/storyteller,normalizer=models/normalizer"

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(rf"{_PART}(/{_PART})*")
_MAX_NAME = 255
_REVISION = re.compile(r"[\w][\w./-]*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[A-Za-z0-9][\w.-]*)?")
GGUF_SUFFIX = ".gguf"

HUB = "hf://"
_SCHEME = re.compile(r"(hf|s3|gs|az|oci)://")
_BUCKET = re.compile(r"(s3|gs|az)://[A-Za-z0-9][\w.-]*(/[\w.=+@: -]+)*/?", re.ASCII)
_OCI = re.compile(
    r"oci://(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{1,5})?)/(?P<repository>[a-z0-9._-]+(/[a-z0-9._-]+)*)"
    r"(:(?P<tag>\w[\w.-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)
_PATTERN = re.compile(r"(s3|gs|az|oci)://[\w.*?:-]+(/[\w.=+@: *?-]+)*|[\w.*?-]+(/[\w.*?-]+)?", re.ASCII)


def is_url(location: str) -> bool:
    """Whether a location is one of these URLs, well-formed or not."""
    return _SCHEME.match(location) is not None


def check_url(location: str) -> str:
    """The URL of a bucket or a registry without a slash at its end; raises ValueError."""
    fits = _OCI.fullmatch(location) or _BUCKET.fullmatch(location)
    if not fits or any(part.strip(". ") == "" for part in location.rstrip("/").split("/")[2:]):
        raise ValueError(f"{location!r} is not s3://bucket/prefix, gs://…, az://… or oci://registry/repository:tag")
    return location.rstrip("/")


def parse_image(location: str) -> tuple[str, str, str]:
    """Host, repository, and digest or else tag, of a registry's URL that `check_url` has checked."""
    found = _OCI.fullmatch(location)
    if found is None:
        raise ValueError(f"{location!r} is not oci://registry/repository:tag")
    return found["host"], found["repository"], found["digest"] or found["tag"] or "latest"


def check_pattern(pattern: str) -> str:
    """A pattern of locations without the hub's scheme; raises ValueError."""
    plain = pattern.removeprefix(HUB)
    if not _PATTERN.fullmatch(plain):
        raise ValueError(
            f"{pattern!r} is not a pattern of hub ids, such as org/* or org/name, or of URLs, such as s3://bucket/*"
        )
    return plain


def matches(location: str, pattern: str) -> bool:
    """Whether a hub id or a checked URL matches a checked pattern."""
    if "://" not in location or "://" not in pattern:
        return "://" not in location + pattern and fnmatchcase(location, pattern)
    (scheme, _, place), (wanted_scheme, _, wanted) = location.partition("://"), pattern.partition("://")
    (first, _, rest), (wanted_first, _, wanted_rest) = place.partition("/"), wanted.partition("/")
    if (found := _OCI.fullmatch(location)) is not None:
        # What is fetched: of a tag with a digest the latter.
        reference = f"@{found['digest']}" if found["digest"] else f":{found['tag'] or 'latest'}"
        rest = found["repository"]
        wanted_rest, *wanted_reference = re.split("(?=[:@])", wanted_rest, maxsplit=1)
        if wanted_reference and not fnmatchcase(reference, wanted_reference[0]):
            return False
    return scheme == wanted_scheme and fnmatchcase(first, wanted_first) and fnmatchcase(rest, wanted_rest)


@dataclass(frozen=True)
class ModelSource:
    """One served model: its public name, and a local folder or GGUF file, a URL, or a hub id with an optional revision.

    With `from_hub` the location is a hub id even where a folder has the same name.
    """

    name: str
    location: str
    revision: str | None = None
    from_hub: bool = False

    @property
    def is_local(self) -> bool:
        return not (self.from_hub or self.is_url) and is_local(self.location)

    @property
    def is_url(self) -> bool:
        return is_url(self.location)

    @property
    def where(self) -> str:
        """The location and revision as `MODELS` names them."""
        return self.location if self.revision is None else f"{self.location}@{self.revision}"


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of a model's folder; empty where there is none; raises ValueError, which names the file."""
    path = folder / name
    try:
        value = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} has no JSON object")
    return value


def parse_models(text: str) -> tuple[ModelSource | EngineSource, ...]:
    """The sources in `MODELS`; raises ValueError with what is malformed."""
    sources = tuple(_parse_one(item.strip()) for item in text.split(",") if item.strip())
    if not sources:
        raise ValueError("names no model; expected name=folder-or-hub-id[@revision]")
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"names the model {name!r} twice")
    return sources


def parse_own_models(text: str) -> tuple[ModelSource, ...]:
    """Those of them that predictors of ours load."""
    return tuple(source for source in parse_models(text) if isinstance(source, ModelSource))


def is_name(text: str) -> bool:
    """Whether a model can be called so: parts between slashes, none of them empty, hidden or `..`."""
    return len(text) <= _MAX_NAME and _NAME.fullmatch(text) is not None


def parse_hub_id(name: str, text: str) -> ModelSource:
    """The source that a hub id with an optional revision means, even if a folder has this name; raises ValueError."""
    hub_id, at, revision = text.partition("@")
    if not _HUB_ID.fullmatch(hub_id) or any(part.strip(".") == "" for part in hub_id.split("/")):
        raise ValueError(f"{text!r} is not a hub id")
    if at and not _REVISION.fullmatch(revision):
        raise ValueError(f"{revision!r} is not a revision")
    return ModelSource(name, hub_id, revision or None, from_hub=True)


def parse_remote(name: str, text: str) -> ModelSource:
    """The source that a URL or a hub id means, never a folder; raises ValueError."""
    if is_url(text) and not text.startswith(HUB):
        return ModelSource(name, check_url(text))
    return parse_hub_id(name, text.removeprefix(HUB))


def is_local(location: str) -> bool:
    """Whether a folder is there, or a GGUF file."""
    path = Path(location)
    return path.is_dir() or (path.suffix == GGUF_SUFFIX and path.is_file())


def parse_location(name: str, location: str) -> ModelSource:
    """The source of a model of any name: what is local, a URL, or a hub id with a revision; raises ValueError."""
    if is_url(location):
        return parse_remote(name, location)
    if is_local(location):
        return ModelSource(name, location)
    hub_id, _, revision = location.partition("@")
    if location.startswith((".", "/", "~")) or hub_id.count("/") > 1 or location.endswith(GGUF_SUFFIX):
        raise ValueError(f"{location!r} is not a folder{' or file' if location.endswith(GGUF_SUFFIX) else ''}")
    if not _HUB_ID.fullmatch(hub_id):
        raise ValueError(f"{location!r} is neither a folder nor a hub id")
    return ModelSource(name, hub_id, revision or None)


def _parse_one(item: str) -> ModelSource | EngineSource:
    name, equals, location = item.partition("=")
    hub_id = re.split("[@:]", item, maxsplit=1)[0]
    if not equals and "/" in hub_id and is_name(hub_id):
        return parse_hub_id(hub_id, item)
    if not location or not is_name(name):
        raise ValueError(f"{item!r} is not name=folder-or-hub-id[@revision]")
    return parse_engine(name, location) if is_engine(location) else parse_location(name, location)
