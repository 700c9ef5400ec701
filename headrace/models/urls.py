"""Locations of models that are URLs: the hub's, buckets' and registries'.

    hf://organisation/name[@revision]
    s3://bucket/prefix, gs://bucket/prefix, az://container/prefix
    oci://registry[:port]/repository[:tag][@sha256:…]

A prefix is a folder, or one file. A pattern of allowed locations matches scheme and first part (bucket or host with
port) by themselves, and the rest: no wildcard reaches from one into another. A pattern's tag (`:v*`) or digest
(`@sha256:…`) is compared with what is fetched, which is the digest where a location has one.
"""

import re
from fnmatch import fnmatchcase

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
