"""Models in buckets: `s3://`, `gs://` and `az://`, by fsspec and its implementations s3fs, gcsfs and adlfs.

These find credentials and endpoints as their makers' own tools do, in the environment (AWS_*, GOOGLE_*, AZURE_*) or in
the machine's identity; `FSSPEC_S3_ANON=true` reads public buckets. The digest of a listing is that of the names, sizes
and versions (ETags) of its files.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from headrace.errors import StartupError
from headrace.models.downloads import Listing, RemoteFile, is_plain

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
_OPTIONS: Mapping[str, dict[str, Any]] = {
    # Its defaults wait for a host that does not answer for half an hour.
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}},
}
_LISTING_S = 30.0  # Of the retries of adlfs no setting shortens the three minutes.
_BLOCK_BYTES = 8 << 20
_BLOCKS = 4  # Requests at once.
_VERSIONS = ("VersionId", "generation", "ETag", "etag")
_REFUSED = ("Credential", "Authentication", "Unauthorized", "RefreshError", "account_name", "Forbidden")


def resolve(location: str) -> Listing:
    """What lies at a checked URL; raises ConnectionError, and StartupError with one line."""
    scheme, _, place = location.partition("://")
    try:
        import fsspec
        from fsspec.asyn import sync

        cls = fsspec.get_filesystem_class(scheme)
    except ImportError:
        raise StartupError(
            f"{location} needs the package {_PACKAGES[scheme]}: install headrace with its extra `buckets`"
        ) from None
    logging.getLogger(_PACKAGES[scheme]).setLevel(logging.CRITICAL)  # Errors come as exceptions too.
    with _errors(location):
        files = cls(skip_instance_cache=True, use_listings_cache=False, **_OPTIONS.get(scheme, {}))
        try:
            found: dict[str, dict[str, Any]] = sync(files.loop, files._find, place, detail=True, timeout=_LISTING_S)
        except TimeoutError:
            raise ConnectionError(f"no listing within {_LISTING_S:g} s") from None
    # Names are relative to the prefix; a location that is one file has that file's name.
    prefix = f"{place.rpartition('/')[0]}/" if place in found else f"{place}/"
    named = {key.removeprefix(prefix): (key, details) for key, details in found.items()}
    plain = sorted(name for name in named if is_plain(name))
    basis = []
    for name in plain:
        _, details = named[name]
        version = next((str(details[key]) for key in _VERSIONS if details.get(key)), "")
        basis.append((name, details["size"], version))
    digest = hashlib.sha256(json.dumps(basis).encode()).hexdigest()
    return Listing(digest, tuple(_file(location, files, name, *named[name]) for name in plain))


def _file(location: str, files: Any, name: str, key: str, details: Mapping[str, Any]) -> RemoteFile:
    size = int(details["size"])

    def is_current() -> bool:
        with _errors(location):
            now = files.info(key)
            both = [name for name in _VERSIONS if details.get(name) and now.get(name)]
            return all(str(now[name]) == str(details[name]) for name in both)

    return RemoteFile(name, size, partial(_read, location, files, key, size), is_current=is_current)


def _read(location: str, files: Any, key: str, size: int, start: int) -> Iterator[bytes]:
    while start < size:
        starts = list(range(start, min(start + _BLOCKS * _BLOCK_BYTES, size), _BLOCK_BYTES))
        ends = [min(begin + _BLOCK_BYTES, size) for begin in starts]
        with _errors(location):
            blocks = files.cat_ranges([key] * len(starts), starts, ends, on_error="raise")
        for block, begin, end in zip(blocks, starts, ends, strict=True):
            if len(block) != end - begin:
                raise ConnectionError(f"{key} ended early")
            yield block
        start = ends[-1]


@contextmanager
def _errors(location: str) -> Iterator[None]:
    """Errors of the implementations, which have many types, as those of `resolve`."""
    try:
        yield
    except FileNotFoundError:
        raise StartupError(f"{location} does not exist") from None
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        if isinstance(error, PermissionError) or any(word in f"{type(error).__name__} {error}" for word in _REFUSED):
            raise StartupError(f"{location} may not be read: {reason}; docs/models.md names the credentials") from None
        raise ConnectionError(reason) from None
