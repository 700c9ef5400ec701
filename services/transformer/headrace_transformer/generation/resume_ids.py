"""Ids with which a client continues an answer after its connection broke, at any transformer.

Nothing is stored: seed, prompt and weights decide an answer. Its client sends the same request again with the id of the
last event that it received. The id has the seed and the weights' fingerprint, the number of tokens that the client has
and their checksum. The transformer computes the answer again and sends what follows.

An id is `<base64url of nonce, creation time, fingerprint, signature>.<tokens>[f|u].<checksum>.<age>.<signature>`. Seed
and id of the answer derive from the nonce. A request with an `Idempotency-Key` has its nonce from key, client and body;
others draw it. The first signature binds the first part to client and body, the second one binds the age to the first
part, so that nobody invents or renews an id. `c` means that all but the finish reason has been sent, `f` that the event
had it, `u` the usage at the end; the age is the event's, in seconds since the creation.

A signature is a keyed BLAKE2b of 8 bytes. All transformers of a stack, and all workers of one, need the same key: the
setting `signing_key`, else a file in the folder of the spool, which the first of them makes. Where that folder cannot
be written, the key lasts as long as the process.
"""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import logging
import os
import re
import secrets
import struct
import tempfile
import time
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.errors import GoneError, InvalidRequestError
from headrace.rpc.server.call_context import IDEMPOTENCY_KEY, CallContext

logger = logging.getLogger(__name__)

SIGNATURE_BYTES = 8
_KEY_BYTES = 32
_FILE = "signing-key"
MAX_AGE_S = 300
_MAX_KEY = 255  # Characters.
_NONCE_BYTES = 12
_HEAD = struct.Struct(f">{_NONCE_BYTES}sI16s8s")
_ID = re.compile(r"([\w-]{54})\.(\d{1,9})([cfu]?)\.([0-9a-f]{8})\.(\d{1,9})\.([0-9a-f]{16})", re.ASCII)
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")  # A predictor of ours reports such a one.
_HASHED_AT_ONCE = 256 * 1024  # Bytes; hashing more on the event loop would delay other requests.

Stage = Literal["", "c", "f", "u"]


class Signer:
    """Signs and verifies bytes; `purpose`, at most 16 bytes, keeps the signatures of one kind of id from another's."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = hashlib.sha256(key or secrets.token_bytes(_KEY_BYTES)).digest()

    def sign(self, purpose: bytes, data: bytes, size: int = SIGNATURE_BYTES) -> bytes:
        return hashlib.blake2b(data, digest_size=size, key=self._key, person=purpose).digest()

    def verifies(self, purpose: bytes, data: bytes, signature: bytes) -> bool:
        return hmac.compare_digest(self.sign(purpose, data), signature)


def signer_of(key: str | None, folder: Path) -> Signer:
    """The signer with `key`, else with the one that `folder` keeps."""
    return Signer(key.encode() if key else _kept_key(folder))


def _kept_key(folder: Path) -> bytes | None:
    path = folder / _FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if len(key := path.read_bytes() if path.exists() else b"") == _KEY_BYTES:
            return key
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f"{_FILE}.") as new:  # Readable by its owner alone.
            new.write(secrets.token_bytes(_KEY_BYTES))
            new.flush()
            if key:  # Incomplete, by a failure of the disk.
                path.unlink(missing_ok=True)
            with contextlib.suppress(FileExistsError):  # Another process was first.
                os.link(new.name, path)
        return path.read_bytes()
    except OSError as error:
        logger.warning("no key can be kept in %s (%s): the ids of answers are valid until the restart", folder, error)
        return None


@dataclass(frozen=True)
class ResumePoint:
    """What the client of a broken answer has: so many tokens, and with a `stage` the end too; see the module."""

    fingerprint: str
    tokens: int
    checksum: int
    stage: Stage


@dataclass(frozen=True)
class AnswerIdentity:
    """What one answer has in common with its repetitions.

    `created` is a Unix time; `body` a digest of client and body, empty if the answer's messages have no ids.
    """

    signer: Signer
    nonce: bytes
    created: int
    body: bytes = b""
    resume: ResumePoint | None = None

    @property
    def has_ids(self) -> bool:
        """Whether the answer's messages have ids."""
        return bool(self.body)

    @property
    def seed(self) -> int:
        """The seed for a request without one: 63 bits."""
        return int.from_bytes(self.nonce[:8], "big") >> 1

    @property
    def answer_id(self) -> str:
        """32 hexadecimal digits."""
        return hashlib.blake2b(self.nonce, digest_size=16, person=b"answer id").hexdigest()

    def signature(self, fingerprint: bytes) -> bytes:
        """Binds the first part of an id to the client and its body."""
        return self.signer.sign(b"resume id", self.nonce + self.created.to_bytes(4, "big") + fingerprint + self.body)

    def age_signature(self, head: str, age_s: int) -> str:
        """Binds the age of an id to its first part."""
        return self.signer.sign(b"age", f"{head}.{age_s}".encode()).hex()


async def identity_of(
    call: CallContext, body: bytes, resume_from: str = "", *, signer: Signer, has_ids: bool
) -> AnswerIdentity:
    """The identity of the answer to a request; `has_ids`: its messages will have ids.

    Raises InvalidRequestError for a malformed id, one of another body or client, and a malformed key; GoneError for an
    id that is too old.
    """
    key = call.header(IDEMPOTENCY_KEY)
    if not (key or resume_from or has_ids):
        return AnswerIdentity(signer, secrets.token_bytes(_NONCE_BYTES), int(time.time()))
    if len(key) > _MAX_KEY:
        raise InvalidRequestError(
            f"the key has {len(key)} characters, at most {_MAX_KEY} are allowed", param=IDEMPOTENCY_KEY
        )
    arguments = (call.client.name, body)
    digest = _digest(*arguments) if len(body) <= _HASHED_AT_ONCE else await asyncio.to_thread(_digest, *arguments)
    if resume_from:
        return _resumed(resume_from, digest, signer)
    drawn = secrets.token_bytes(_NONCE_BYTES)
    nonce = signer.sign(b"idempotency key", digest + key.encode(), _NONCE_BYTES) if key else drawn
    return AnswerIdentity(signer, nonce, int(time.time()), digest if has_ids else b"")


class ResumeIds:
    """The ids of one stream. `take` gets each chunk's tokens; an `id` then continues after them."""

    def __init__(self, identity: AnswerIdentity) -> None:
        self._identity = identity
        self._head: str | None = None  # "" where the weights are unknown: such an answer cannot be repeated.
        self._tokens = 0
        self._checksum = 0
        self._age = -1, ""  # Seconds, and the end of the ids that are so old.

    def take(self, fingerprint: str, token_ids: Sequence[int]) -> None:
        if self._head is None:
            self._head = _head(self._identity, fingerprint)
        if not self._head:
            return
        self._tokens += len(token_ids)
        self._checksum = checksum(token_ids, self._checksum)

    def id(self, stage: Stage = "") -> str:
        """The id of the next message, "" if its answer cannot be continued."""
        if not self._head:
            return ""
        age_s = max(0, int(time.time()) - self._identity.created)
        if self._age[0] != age_s:
            self._age = age_s, f"{age_s}.{self._identity.age_signature(self._head, age_s)}"
        return f"{self._head}.{self._tokens}{stage}.{self._checksum:08x}.{self._age[1]}"

    def line(self, stage: Stage = "") -> bytes:
        """The same as a line of a server-sent event."""
        return f"id: {found}\n".encode() if (found := self.id(stage)) else b""


def checksum(token_ids: Sequence[int], before: int = 0) -> int:
    """The checksum of tokens, which continues that of the tokens before them."""
    return zlib.crc32(array("i", token_ids), before)


def _head(identity: AnswerIdentity, fingerprint: str) -> str:
    if not identity.has_ids or not _FINGERPRINT.fullmatch(fingerprint):
        return ""
    weights = bytes.fromhex(fingerprint)
    head = _HEAD.pack(identity.nonce, identity.created, weights, identity.signature(weights))
    return base64.urlsafe_b64encode(head).rstrip(b"=").decode()


def _resumed(resume_from: str, body: bytes, signer: Signer) -> AnswerIdentity:
    found = _ID.fullmatch(resume_from)
    if found is None:
        raise InvalidRequestError(f"{resume_from[:96]!r} is not an id of this server", param="resume_from")
    head, tokens, stage, tokens_checksum, age_s, age_signature = found.groups()
    nonce, created, weights, signature = _HEAD.unpack(base64.urlsafe_b64decode(head + "=="))
    point = ResumePoint(weights.hex(), int(tokens), int(tokens_checksum, 16), stage)  # type: ignore[arg-type]
    identity = AnswerIdentity(signer, nonce, created, body, point)
    is_ours = hmac.compare_digest(identity.signature(weights), signature)
    if not (is_ours and hmac.compare_digest(identity.age_signature(head, int(age_s)), age_signature)):
        raise InvalidRequestError(
            "the id is damaged or of another request: send the same body with it, as the same client",
            param="resume_from",
        )
    if time.time() - created - int(age_s) > MAX_AGE_S:
        raise GoneError(f"the id is older than {MAX_AGE_S} seconds; send the request without it", param="resume_from")
    return identity


def _digest(client: str, body: bytes) -> bytes:
    digest = hashlib.blake2b(client.encode(), digest_size=16)
    digest.update(b"\0")
    digest.update(body)
    return digest.digest()
