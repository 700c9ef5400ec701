"""The bytes of single tokens: a token need not be a whole character.

Three ways of writing are distinguished, as tokenizers' decoders read them: byte-level vocabularies, where each
character of a token stands for a byte; byte fallback, where `<0xE2>` is one; and tokens that are text, whose leading
space, if any, shows only behind another token.
"""

import re
from functools import cache
from typing import Any

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Reads a tokenizer's vocabulary; `backend` is the fast tokenizer."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._known: dict[int, bytes] = {}  # Of the vocabulary's tokens, as they were asked for.
        self._added = {token_id: str(token) for token_id, token in backend.get_added_tokens_decoder().items()}
        self._is_byte_level = b'"ByteLevel"' in (backend.decoder.__getstate__() if backend.decoder else b"")
        self._before = self._ordinary_id()
        self._text_before = self._decode([self._before])

    def of(self, token_id: int) -> bytes:
        """The token's bytes; none for an id that has no token."""
        found = self._known.get(token_id)
        if found is None:
            token: str | None = self._backend.id_to_token(token_id)
            if token is None:
                return b""
            found = self._known[token_id] = self._read(token_id, token)
        return found

    def _read(self, token_id: int, token: str) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        if self._is_byte_level and all(character in _bytes_of_characters() for character in token):
            return bytes(_bytes_of_characters()[character] for character in token)
        if fallback := _FALLBACK.fullmatch(token):
            return bytes.fromhex(fallback[1])
        return self._decode([self._before, token_id])[len(self._text_before) :].encode()

    def id_of(self, data: bytes) -> int | None:
        """The token that has exactly these bytes, which need not be a whole character; None if there is none."""
        token = ""
        if self._is_byte_level:
            token = "".join(map(_characters_of_bytes().__getitem__, data))
        elif len(data) == 1:
            token = f"<0x{data[0]:02X}>"
        found: int | None = self._backend.token_to_id(token) if token else None
        return found

    def _ordinary_id(self) -> int:
        """The first token that is a letter, behind which others are read."""
        for token_id in range(self._backend.get_vocab_size()):
            if token_id not in self._added and self._decode([token_id]).isalpha():
                return token_id
        return 0

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


@cache
def _bytes_of_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's: others are written from U+0100 on.
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


@cache
def _characters_of_bytes() -> dict[int, str]:
    return {byte: character for character, byte in _bytes_of_characters().items()}
