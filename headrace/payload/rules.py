"""What a record contains: modes per model, sampling, redaction, the caller's metadata, tensors' contents.

Rules are immutable; any thread may use them. `mode` takes microseconds. `redact` takes as long as its patterns need:
the writer thread calls it before anything is written.

A mode keeps the request (prompt, parameters, inputs), the answer (text, chunks, outputs), both or neither; every mode
but `off` keeps status, usage, times and ids. Sampling selects whole requests by a hash of their id, so that either all
records of an id are kept, in every process, or none. The usage of a client with a key must be known: for its requests
that are not selected, a record keeps the metadata.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from headrace_protos.headrace_pb2 import PayloadRecord

if TYPE_CHECKING:
    from headrace.payload.redaction import Redaction

_HEADER = re.compile(r"[a-z0-9_.-]+")
# Credentials are never recorded.
_SECRET = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key"})


class Mode(StrEnum):
    """Which contents of a request and its answer a record keeps."""

    ALL = "all"
    REQUEST = "request"
    RESPONSE = "response"
    METADATA = "metadata"
    OFF = "off"

    @property
    def keeps_request(self) -> bool:
        """Whether prompt, parameters and inputs are kept."""
        return self in (Mode.ALL, Mode.REQUEST)

    @property
    def keeps_response(self) -> bool:
        """Whether text, chunks and outputs are kept."""
        return self in (Mode.ALL, Mode.RESPONSE)


class Digest(StrEnum):
    """What identifies the contents of a tensor: nothing, or their digest by an algorithm of hashlib."""

    OFF = "off"
    BLAKE2B = "blake2b"
    SHA256 = "sha256"

    def of(self, data: bytes | memoryview) -> str:
        """The digest as a record has it, with the name of its algorithm; empty for OFF."""
        return "" if self is Digest.OFF else f"{self.value}:{hashlib.new(self.value, data).hexdigest()}"


@dataclass(frozen=True)
class PayloadRules:
    """See the module. `models` have the modes of single models, `default` is that of all others.

    `metadata` are the names of the request headers that are kept.

    `tensor_bytes` is the maximum size of contents that are kept. `tensor_digest` is the digest of every tensor, however
    large; without a digest, larger contents are not read.
    """

    default: Mode = Mode.ALL
    models: Mapping[str, Mode] = field(default_factory=dict)
    sample: float = 1.0
    redactions: Sequence[Redaction] = ()
    metadata: frozenset[str] = frozenset()
    tensor_bytes: int = 0
    tensor_digest: Digest = Digest.OFF

    def __str__(self) -> str:
        """The modes, as `parse_modes` reads them."""
        return ",".join([self.default.value, *(f"{name}={mode.value}" for name, mode in self.models.items())])

    def mode(self, model: str, request_id: str, client: str = "") -> Mode:
        """The mode of a request; if it is not sampled, METADATA for a named client, else OFF."""
        mode = self.models.get(model, self.default)
        if mode is not Mode.OFF and self.sample < 1.0:
            # The same for an id in every process.
            digest = hashlib.blake2b(request_id.encode(errors="replace"), digest_size=6).digest()
            if int.from_bytes(digest, "big") / 2**48 >= self.sample:
                return Mode.METADATA if client else Mode.OFF
        return mode

    @property
    def redacts_answers(self) -> bool:
        """Whether the text of an answer may be written only once it is complete."""
        return any(redaction.redacts_answers for redaction in self.redactions)

    def redact(self, record: PayloadRecord) -> None:
        for redaction in self.redactions:
            redaction.redact(record)


def parse_modes(text: str) -> PayloadRules:
    """The rules by a comma list of one mode for all models and `model=mode` for single ones; raises ValueError."""
    default: Mode | None = None
    models: dict[str, Mode] = {}
    for item in filter(None, map(str.strip, text.split(","))):
        name, equals, word = (part.strip() for part in item.rpartition("="))
        if word not in tuple(Mode):
            raise ValueError(f"{word!r} is no mode; there are {', '.join(Mode)}")
        mode = Mode(word)
        if not equals:
            if default is not None:
                raise ValueError(f"two modes for all models, {default.value} and {word}; write model={word} for one")
            default = mode
        elif not name:
            raise ValueError(f"{item!r} names no model")
        elif name in models:
            raise ValueError(f"two modes for the model {name!r}")
        else:
            models[name] = mode
    return PayloadRules(default or Mode.ALL, models)


def parse_metadata(text: str) -> frozenset[str]:
    """A comma list of names of headers, in small letters; raises ValueError."""
    names = frozenset(item.strip().lower() for item in text.split(",") if item.strip())
    for name in sorted(names):
        if not _HEADER.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a header")
        if name in _SECRET:
            raise ValueError(f"{name} is a secret of the caller's and is never recorded")
        if name.endswith("-bin"):
            raise ValueError(f"{name} is binary metadata, which is not recorded")
    return names
