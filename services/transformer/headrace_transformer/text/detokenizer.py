"""Token ids to text, as they come: never half a character, never any part of a stop string.

Pure: one instance a request, no I/O. Text that could still become a stop string is held back until it cannot. The work
is linear in the text, for any stop strings.

The text of new ids is what they add to the text of the ids shortly before them, since what a decoder writes for an id
depends on its neighbours (vLLM and TGI decode in the same way). Most decoders write an id behind other text always in
the same way: that text is kept, and such ids are not decoded again. Two kinds of text are not yet certain:

- a trailing U+FFFD, which may be the beginning of a character whose other bytes follow;
- a run of byte-fallback tokens (`<0xE2>`): the decoder joins the whole run, and writes U+FFFD for each byte of a run
  that is not UTF-8. A run is held back until another token ends it.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_FALLBACK = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_UNFINISHED = "\ufffd"
_MAX_PIECES = 1 << 15  # Of one tokenizer, in at most 5 MB; more ids than that are rarely in use.


class StopFinder:
    """Passes text on up to the stop string that ends first; of those that end together, up to the longest.

    With `includes_stop` the stop string is passed on too.
    """

    def __init__(self, stop: Sequence[str], includes_stop: bool = False) -> None:
        self._includes_stop = includes_stop
        self._begun = dict.fromkeys(stop, 0)  # How many characters at the end of the text begin a stop string.
        self._held = ""
        self.string: str | None = None  # The stop string that was found.

    @property
    def found(self) -> bool:
        return self.string is not None

    def push(self, text: str, is_early: bool = False) -> str:
        """The text that can be passed on after adding `text`; what ends in an early one is no stop string."""
        if not self._begun:
            return text
        if self.found:
            return ""
        before, held = len(self._held), self._held + text
        ends: dict[str, int] = {}
        for stop, begun in self._begun.items():
            at = _first(stop, held, before - begun)
            while is_early and at + len(stop) <= len(held):
                at = _first(stop, held, at + 1)
            self._begun[stop] = len(held) - at
            if at + len(stop) <= len(held):
                ends[stop] = at + len(stop)
        if ends:
            end = min(ends.values())
            self.string = max((stop for stop, at in ends.items() if at == end), key=len)
            self._held = ""
            return held[: end if self._includes_stop else end - len(self.string)]
        kept = len(held) - max(self._begun.values())
        self._held = held[kept:]
        return held[:kept]

    def flush(self) -> str:
        """The text that is still held back, at the end."""
        held, self._held = self._held, ""
        return held


def _first(stop: str, text: str, at: int) -> int:
    """Where in `text`, from an index on, a stop string is or may have begun; the text's end where none has.

    An index that was passed over is never looked at again, so the work is linear in the text.
    """
    while (at := text.find(stop[0], at)) >= 0 and not stop.startswith(text[at : at + len(stop)]):
        at += 1
    return at if at >= 0 else len(text)


class Piece(NamedTuple):
    """The text of an id after other text, and its number of characters when decoded alone."""

    text: str
    own_length: int


class Decoder:
    """Decodes ids; one for all sequences of a model. `backend` is the fast tokenizer."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        # All special tokens, by id. `id_to_token` would write them as the normalizer does.
        self.special_texts: Mapping[int, str] = {id: token.content for id, token in added.items() if token.special}
        self.end_texts: Mapping[int, str] = {}  # Of the model's end tokens, by id.
        self._end = max(vocabulary.values(), default=-1) + 1
        # In a byte-level vocabulary a character stands for a byte, in others it is one: never too small.
        self.longest_token_bytes = max((len(token.encode()) for token in vocabulary), default=0)
        self.fallback: frozenset[int] = frozenset()
        if b'"ByteFallback"' in (backend.decoder.__getstate__() if backend.decoder else b""):
            self.fallback = frozenset(token_id for token, token_id in vocabulary.items() if _FALLBACK.fullmatch(token))
        self._before = self._ordinary_id() if _joins_pieces(backend.decoder) else None
        self._pieces: dict[int, Piece | None] = {}

    def set_end_ids(self, end_ids: Iterable[int]) -> None:
        """Sets the ids that end an answer; not all are special tokens in every tokenizer."""
        self.end_texts = {end: self._backend.id_to_token(end) or "" for end in end_ids}

    def skips(self, token_id: int) -> bool:
        """Whether the id has no text: a special token, or an id outside of the vocabulary."""
        return token_id in self.special_texts or not 0 <= token_id < self._end

    def special_ids(self, marks: Iterable[str]) -> dict[int, str]:
        """Those of the marks that are special tokens, by id."""
        ids = ((self._backend.token_to_id(mark), mark) for mark in marks)
        return {token_id: mark for token_id, mark in ids if token_id in self.special_texts}

    def grammar_ids(self, marks: Iterable[str]) -> dict[str, int]:
        """The ids of those marks that a grammar of llguidance must name by id: its strings match no special token.

        It also takes added tokens in angle brackets for special ones.
        """
        ids = ((mark, self._backend.token_to_id(mark)) for mark in marks)
        return {
            mark: token_id
            for mark, token_id in ids
            if token_id in self.special_texts
            or (token_id in self._added and mark.startswith("<") and mark.endswith(">"))
        }

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def piece(self, token_id: int) -> Piece | None:
        """What an id that has text is always written as behind another one that has; None if that depends on it."""
        try:
            return self._pieces[token_id]
        except KeyError:
            piece = self._new_piece(token_id)
            if len(self._pieces) < _MAX_PIECES:
                self._pieces[token_id] = piece
            return piece

    def _new_piece(self, token_id: int) -> Piece | None:
        if self._before is None:
            return None
        text = self.decode([self._before, token_id])[len(self.decode([self._before])) :]
        # It may be a part of a character, and an empty one is kept together with what follows it.
        return None if not text or _UNFINISHED in text else Piece(text, len(self.decode([token_id])))

    def _ordinary_id(self) -> int | None:
        """The first id that is written as letters or digits."""
        return next((id for id in range(self._end) if not self.skips(id) and self.decode([id]).isalnum()), None)


def _joins_pieces(decoder: Any) -> bool:
    """Whether a decoder writes every token but the first, and parts of characters, in the same way behind any other."""
    if decoder is None:
        return True  # Tokens are joined by spaces.
    return json.loads(decoder.__getstate__()).get("type") in ("ByteLevel", "Metaspace")


class Detokenizer:
    """Decodes one sequence's output; never raises, for any ids. One instance for each sequence.

    `prompt_ids` are what the output follows, so that a tokenizer that drops the space before the first word of a text
    does not drop it here; empty where the output begins a text of its own. Stop strings, which must not be empty, count
    where they end in text that becomes certain after the first `min_tokens` ids. `kept` are texts of special tokens
    that are not left out. With `includes_stop` the text ends with the stop string, not before it.
    """

    _CONTEXT = 6  # Ids of the prompt, of which one has text, that decide how the output's first id is written.
    # At most so many ids are kept without certain text. An unfinished character of UTF-8 is in the last three.
    _MAX_UNCERTAIN, _UNCERTAIN_CONTEXT = 64, 8

    def __init__(
        self,
        decoder: Decoder,
        prompt_ids: Sequence[int],
        stop: Sequence[str],
        min_tokens: int = 0,
        kept: Mapping[int, str] | None = None,
        includes_stop: bool = False,
    ) -> None:
        self._decoder = decoder
        self._kept = kept or {}
        self._early = min_tokens
        # The new ids and those before them; of these, the number of ids and of characters that were passed on.
        start = max(0, len(prompt_ids) - self._CONTEXT)
        # The decoder joins a whole run of byte-fallback ids; from its middle they would be no characters.
        first = max(0, start - self._MAX_UNCERTAIN)
        while first < start and (prompt_ids[start] in decoder.fallback or all(map(decoder.skips, prompt_ids[start:]))):
            start -= 1
        self._ids = list(prompt_ids[start:])
        self._passed_ids = len(self._ids)
        self._passed = len(decoder.decode(self._ids))
        self._is_settled = False  # The ids are of the output, with text that was passed on whole.
        self._finder = StopFinder(stop, includes_stop)

    @property
    def stopped(self) -> bool:
        """A stop string was found; what follows it is not wanted."""
        return self._finder.found

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._finder.string

    def push(self, token_id: int) -> str:
        """The text that can be passed on after this id."""
        piece = self._special(token_id) if self._decoder.skips(token_id) else self._new_text(token_id)
        self._early -= 1
        return self._finder.push(piece, is_early=self._early >= 0)

    def flush(self) -> str:
        """The rest of the text, when no more ids follow: an unfinished character is written as U+FFFD."""
        rest = self._finder.push(self._decoder.decode(self._ids)[self._passed :])
        return rest if self.stopped else rest + self._finder.flush()

    def _special(self, token_id: int) -> str:
        """The text of a special token that is kept, after the text that has not become certain before it."""
        if token_id not in self._kept:
            return ""
        text = self._decoder.decode(self._ids)
        rest, self._passed = text[self._passed :], len(text)
        return rest + self._kept[token_id]

    def _new_text(self, token_id: int) -> str:
        if self._is_settled and (known := self._decoder.piece(token_id)) is not None:
            self._ids, self._passed_ids, self._passed = [token_id], 1, known.own_length
            return known.text
        self._is_settled = False
        self._ids.append(token_id)
        if token_id in self._decoder.fallback:
            return ""
        text = self._decoder.decode(self._ids)
        certain = len(text) - text.endswith(_UNFINISHED)
        piece = text[self._passed : certain]
        self._passed = max(self._passed, certain)
        if piece and certain == len(text):
            # The text passed on now is the context of later ids.
            del self._ids[: self._passed_ids]
            self._is_settled = True
        elif len(self._ids) > self._MAX_UNCERTAIN:
            del self._ids[: -self._UNCERTAIN_CONTEXT]
        else:
            return piece
        self._passed_ids = len(self._ids)
        self._passed = len(self._decoder.decode(self._ids)) - (len(text) - certain)
        return piece
