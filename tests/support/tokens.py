"""JSON Web Tokens and their key sets, for tests."""

import base64
import json
import time
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

ISSUER, AUDIENCE = "https://issuer.example", "headrace"


class SigningKey:
    """An RSA key with an id, which signs with RS256."""

    def __init__(self, key_id: str) -> None:
        self._id = key_id
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)

    def public(self) -> dict[str, str]:
        numbers = self._key.public_key().public_numbers()
        n, e = (_base64(number.to_bytes((number.bit_length() + 7) // 8, "big")) for number in (numbers.n, numbers.e))
        return {"kty": "RSA", "alg": "RS256", "use": "sig", "kid": self._id, "n": n, "e": e}

    def token(self, **claims: Any) -> str:
        """A token of alice, valid for ten minutes; a claim that is None is left out."""
        every = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": int(time.time()) + 600} | claims
        payload = {name: value for name, value in every.items() if value is not None}
        signed = f"{_base64(_json({'alg': 'RS256', 'kid': self._id}))}.{_base64(_json(payload))}"
        signature = self._key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256())
        return f"{signed}.{_base64(signature)}"


def unsigned_token() -> str:
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": int(time.time()) + 600}
    return f"{_base64(_json({'alg': 'none'}))}.{_base64(_json(claims))}."


def publish(file: Path, *keys: SigningKey) -> None:
    """Replaces the file of a key set by renaming."""
    publish_text(file, json.dumps({"keys": [key.public() for key in keys]}))


def publish_text(file: Path, text: str) -> None:
    new = file.with_name(file.name + ".new")
    new.write_text(text)
    new.replace(file)


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
