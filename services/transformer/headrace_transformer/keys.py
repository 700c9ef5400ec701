"""The key file: the operator's list of clients, and the digests of their keys by which the gateway knows them.

The operator's file (TRANSFORMER_KEYS) is YAML, a list of entries; docs/security.md shows one.

An entry has a name, `sha256`, the digest of the key, or `key`, the key itself, and the policy of headrace/clients.py.
Two entries may share a name, so that a key can be replaced, if they differ in nothing else. The gateway reads another
file (TRANSFORMER_KEY_DIGESTS), which has no keys, and passes name and policy on with each call (envoy/callers.lua).
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from headrace.clients import NAME_PATTERN, Policy
from headrace.errors import StartupError
from headrace.files import WatchedFile, load_yaml, replace_file
from headrace.validation import first_fault, matching

logger = logging.getLogger(__name__)

MAX_ENTRIES = 10_000
_RETRY_S = 5.0
_LEAST_KEY, _MOST_KEY = 16, 512
_MOST_POLICY_BYTES = 8192  # Beside the caller's headers (envoy/rest_errors.lua) in the 64 KiB that a service takes.

Name = Annotated[str, matching(NAME_PATTERN, "must have 1 to 128 letters, digits and . _ : @ | -")]
Digest = Annotated[
    str, matching("[0-9a-f]{64}", "must be the SHA-256 of the key, as `sha256sum` prints it: 64 hexadecimal digits")
]
Key = Annotated[
    str,
    matching(
        f"[!-~]{{{_LEAST_KEY},{_MOST_KEY}}}",
        f"must have {_LEAST_KEY} to {_MOST_KEY} printable ASCII characters without spaces; `make key NAME=…` makes one",
    ),
]


class Entry(Policy):
    """A client's key, with what it allows."""

    name: Name
    sha256: Digest | None = None
    key: Key | None = Field(None, repr=False)

    @model_validator(mode="after")
    def _has_one_key(self) -> "Entry":
        if (self.sha256 is None) == (self.key is None):
            raise ValueError("needs one of key and sha256")
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of the key in hexadecimal."""
        return self.sha256 or hashlib.sha256((self.key or "").encode()).hexdigest()

    @property
    def gateway_policy(self) -> str:
        """The members of the policy without its role, as JSON of visible ASCII: a header of each call."""
        members = self.policy.model_dump(mode="json", exclude={"role"}, exclude_defaults=True)
        return json.dumps(members, separators=(",", ":"))[1:-1].replace("\x7f", r"\u007f")

    @property
    def policy(self) -> Policy:
        return Policy(**self.model_dump(include=set(Policy.model_fields)))


_ENTRIES: TypeAdapter[list[Entry]] = TypeAdapter(Annotated[list[Entry], Field(max_length=MAX_ENTRIES)])


def parse_keys(text: str) -> list[Entry]:
    """The entries of a key file; raises ValueError with one line that names the entry and never the key."""
    document = load_yaml(text)
    if not isinstance(document, list):
        raise ValueError("is not a list of entries such as {name: alice, sha256: …}")
    try:
        entries = _ENTRIES.validate_python(document)
    except ValidationError as error:
        raise ValueError(_first_fault(error, document)) from None
    policies: dict[str, Policy] = {}
    names: dict[str, str] = {}
    for number, entry in enumerate(entries, 1):
        if (size := len(entry.gateway_policy)) > _MOST_POLICY_BYTES:
            raise ValueError(
                f"entry {number} ({entry.name}): its policy has {size} bytes, a call carries at most"
                f" {_MOST_POLICY_BYTES}: name fewer models, or a route for several"
            )
        if policies.setdefault(entry.name, entry.policy) != entry.policy:
            raise ValueError(f"the entries of {entry.name} differ in more than the key")
        if names.setdefault(entry.digest, entry.name) != entry.name:
            raise ValueError(f"{names[entry.digest]} and {entry.name} have the same key")
    return entries


def digests(entries: Sequence[Entry]) -> str:
    """The gateway's file: a line for each entry, with digest, name, role and the rest of the policy."""
    return "".join(f"{one.digest}\t{one.name}\t{one.role}\t{one.gateway_policy}\n" for one in entries)


class KeyFile:
    """The operator's file, which the gateway's follows.

    A process that restarts while the operator's cannot be read leaves the gateway's as it is; StartupError if there is
    none, or if it cannot be written. While a disk cannot take a change, it is tried again.
    """

    def __init__(self, path: Path, gateway_file: Path) -> None:
        self._gateway_file = gateway_file
        unread: list[Entry] = []
        self._file = WatchedFile(path, parse_keys, unread if gateway_file.exists() else None)
        self._unwritten: Sequence[Entry] | None = None
        if self._file.value is not unread:
            self._write(self._file.value)

    async def follow(self) -> None:
        """Keeps the gateway's file equal to the operator's, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._file.watch(self._write), name="changes of the keys")
            group.create_task(self._write_later(), name="keys that a disk did not take")

    async def _write_later(self) -> None:
        while True:
            await asyncio.sleep(_RETRY_S)
            if self._unwritten is not None:
                await asyncio.to_thread(self._write, self._unwritten)

    def _write(self, entries: Sequence[Entry]) -> None:
        try:
            replace_file(self._gateway_file, digests(entries))
            self._unwritten = None
        except OSError as error:
            if not self._gateway_file.exists():
                raise StartupError(f"{self._gateway_file} cannot be written: {error.strerror}") from None
            self._unwritten = entries
            logger.error("%s cannot be written, the gateway keeps its keys: %s", self._gateway_file, error.strerror)


def _first_fault(error: ValidationError, document: list[Any]) -> str:
    place, message = first_fault(error)
    if not place or not isinstance(place[0], int):
        return message
    entry = document[place[0]]
    name = entry.get("name") if isinstance(entry, dict) else None
    named = f"entry {place[0] + 1}" + (f" ({name})" if isinstance(name, str) else "")
    field = ".".join(str(part) for part in place[1:])
    return f"{named}: {field + ': ' if field else ''}{message}"
