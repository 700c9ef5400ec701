"""Signatures of the ids that clients send back: only ids that this stack gave out reach a predictor or the payload log.

A signature is a keyed BLAKE2b of 8 bytes. All transformers of a stack, and all workers of one, need the same key: the
setting `signing_key`, else a file in the folder of the spool, which the first of them makes. Where that folder cannot
be written, the key lasts as long as the process.
"""

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

SIGNATURE_BYTES = 8
_KEY_BYTES = 32
_FILE = "signing-key"


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
