"""Rules that redact a record: paths, patterns, or patterns within paths.

A rule is a JSON object of `path`, `pattern` or both, and `replace`, the literal text that replaces the matches of the
pattern ("[redacted]" unless given). Patterns are RE2's: their time is linear in the text.

- A pattern alone covers prompt, answer, error message, the strings of the parameters, and the caller's metadata; not
  `request_id`, `client` and tensors, which need a path.
- A path is `$.` and names with dots between them. The first is a field of the record as `Query` shows it in JSON, see
  `FIELDS`; further names lead into objects, and into every element of a list: `$.parameters.user`, `$.inputs.data`.
  A string there becomes "[redacted]", anything else null. `$.text` covers the chunks, and `$.outputs` those of the
  chunks.
- A path with a pattern covers the strings at the path, and all strings below it.

Prompts that are JSON lists (messages, inputs of embeddings) are searched string by string, without JSON's escapes, and
once more in raw form. A pattern cannot see the text of token ids: any pattern that covers prompts redacts a prompt of
ids, and an answer loses the ids and log probabilities of its chunks up to the last one that a match touches (ids run
ahead of their text, never behind it). A match may span chunks: its replacement is in the chunk where it begins.

A record whose prompt or parameters a rule changes has no `prompt_ids` (encoding.py). Paths into `parameters` cover
`sampling` too.

Parameters that are no valid JSON, because they were cut off, are redacted whole. Rules are parsed at start-up, from the
settings; an invalid rule raises ValueError with its number. `redact` is called on the writer thread.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import re2
from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.validation import first_fault
from headrace_protos.headrace_pb2 import PayloadChunk, PayloadRecord, PayloadTensor

REDACTED = "[redacted]"

_TEXTS = ("prompt", "text", "message", "request_id", "client")
_TENSORS = ("inputs", "outputs")
FIELDS = (*_TEXTS, "parameters", "metadata", *_TENSORS)
_SEARCHED = ("prompt", "text", "parameters", "message", "metadata")  # By a pattern without a path.
_PATH = re.compile(r"\$(\.[\w-]+)+")
_TENSOR_FIELDS = ("name", "datatype", "digest", "data", "size")


class _Rule(BaseModel):
    """The JSON form of a rule."""

    model_config = ConfigDict(extra="forbid", strict=True)

    path: str | None = None
    pattern: str | None = None
    replace: str | None = None


class Redaction:
    """One rule; see the module."""

    def __init__(self, path: str | None, pattern: str | None, replace: str | None = None) -> None:
        if path is None and pattern is None:
            raise ValueError("has neither a path nor a pattern")
        if pattern is None and replace is not None:
            raise ValueError("replace needs a pattern")
        self._field: str | None = None
        self._names: Sequence[str] = ()  # Of the values in the field.
        if path is not None:
            self._field, self._names = _field_and_names(path)
        self._pattern = None if pattern is None else _Pattern(pattern, REDACTED if replace is None else replace)
        self._fields = _SEARCHED if self._field is None else (self._field,)
        if self._pattern is not None and self._field in _TENSORS:
            raise ValueError(f"{path}: tensors are bytes and not text; give the path without a pattern")

    @property
    def redacts_answers(self) -> bool:
        """Whether the rule covers the texts of answers, which it must see whole."""
        return "text" in self._fields

    def redact(self, record: PayloadRecord) -> None:
        """Changes a part of a record in place."""
        for field in self._fields:
            if field == "text":
                self._redact_answer(record)
            elif field == "parameters":
                record.parameters = self._parameters(record.parameters)
                record.sampling = self._parameters(record.sampling)
            elif field == "metadata":
                kept = _changed_at(dict(record.metadata), self._names, self._value)
                record.metadata.clear()
                record.metadata.update(kept or {})
            elif field in _TENSORS:
                self._redact_tensors(getattr(record, field))
            elif text := getattr(record, field):
                setattr(record, field, self._prompt(text) if field == "prompt" else self._text(text))
        if "outputs" in self._fields:
            for chunk in record.chunks:
                self._redact_tensors(chunk.outputs)

    def _text(self, text: str) -> str:
        return REDACTED if self._pattern is None else self._pattern.replaced(text)

    def _prompt(self, text: str) -> str:
        if self._pattern is None:
            return REDACTED
        if text.startswith("["):
            try:
                values = json.loads(text)
                changed = _mapped(_without_ids(values), self._pattern.replaced)
                if changed != values:
                    text = changed if isinstance(changed, str) else _json(changed)
            except (ValueError, RecursionError):
                pass  # The prompt is plain text.
        return self._pattern.replaced(text)

    def _value(self, value: Any) -> Any:
        """The replacement of a JSON value."""
        if self._pattern is not None:
            return _mapped(value, self._pattern.replaced)
        return REDACTED if isinstance(value, str) else None

    def _parameters(self, text: str) -> str:
        """The parameters, as JSON, redacted."""
        if not text:
            return ""
        try:
            values = json.loads(text)
            return _json(_changed_at(values, self._names, self._value))
        except (ValueError, RecursionError):
            return _json(REDACTED)

    def _redact_tensors(self, tensors: Any) -> None:
        if self._field is None or not tensors:
            return
        shown = [
            {"shape": list(tensor.shape)} | {name: getattr(tensor, name) for name in _TENSOR_FIELDS}
            for tensor in tensors
        ]
        kept = _changed_at(shown, self._names, self._value)
        if kept is None:
            del tensors[:]
            return
        for tensor, values in zip(tensors, kept, strict=True):
            _keep(tensor, values or {})

    def _redact_answer(self, record: PayloadRecord) -> None:
        if self._pattern is None:
            replacement = REDACTED
            for chunk in record.chunks:
                if chunk.text:
                    chunk.text, replacement = replacement, ""
            _clear_ids(record.chunks)
        else:
            self._pattern.replace_in_chunks(record.chunks)
        if record.text:
            record.text = self._text(record.text)


class _Pattern:
    """A regular expression, and the text that replaces its matches; an empty match is ignored."""

    def __init__(self, pattern: str, replace: str) -> None:
        options = re2.Options()
        options.log_errors = False
        try:
            self._expression = re2.compile(pattern, options)
        except re2.error as error:
            raise ValueError(f"{pattern!r} is no pattern of RE2: {_message(error)}") from None
        if self._expression.search(""):
            raise ValueError(f"{pattern!r} matches where there is no text")
        self._replace = replace

    def _matches(self, text: str) -> list[tuple[int, int]]:
        """Where matches begin and end, in order."""
        spans = (match.span() for match in self._expression.finditer(text))
        return [(start, end) for start, end in spans if start < end]

    def replaced(self, text: str) -> str:
        """The text with its matches replaced."""
        text = text.encode(errors="replace").decode()  # Escapes of JSON can hold halves of surrogate pairs.
        pieces, at = [], 0
        for start, end in self._matches(text):
            pieces += [text[at:start], self._replace]
            at = end
        return "".join([*pieces, text[at:]])

    def replace_in_chunks(self, chunks: Sequence[PayloadChunk]) -> None:
        """Replaces the matches in the joined texts of an answer's chunks."""
        texts = [chunk.text for chunk in chunks]
        matches, begin, last = deque(self._matches("".join(texts))), 0, 0
        for number, (chunk, text) in enumerate(zip(chunks, texts, strict=True), 1):
            end, at, pieces = begin + len(text), begin, []
            while matches and matches[0][0] < end:
                match_start, match_end = matches[0]
                if match_start >= begin:
                    pieces += [text[at - begin : match_start - begin], self._replace]
                at, last = min(match_end, end), number
                if match_end > end:
                    break  # The match continues in the next text.
                matches.popleft()
            if last == number:
                chunk.text = "".join([*pieces, text[at - begin :]])
            begin = end
        _clear_ids(chunks[:last])


def _field_and_names(path: str) -> tuple[str, list[str]]:
    """A field of a record, and the names that follow it in the path; raises ValueError."""
    if not _PATH.fullmatch(path):
        raise ValueError(f"{path!r} is no path: write $. and names with dots between them, as in $.parameters.user")
    field, *names = path.removeprefix("$.").split(".")
    if field not in FIELDS:
        raise ValueError(f"{path!r} must begin with $. and one of {', '.join(FIELDS)}")
    if field in _TEXTS and names:
        raise ValueError(f"{path!r} goes into a text; give $.{field} and a pattern")
    return field, names


def parse_redactions(text: str) -> tuple[Redaction, ...]:
    """The rules of a JSON list, or of a file that holds one; raises ValueError."""
    text = text.strip()
    if not text.startswith("["):
        try:
            text = Path(text).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"is neither a JSON list nor a file that can be read: {_message(error)}") from None
    try:
        rules = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the rules are not JSON: {_message(error)}") from None
    if not isinstance(rules, list):
        raise ValueError("the rules must be a JSON list")
    return tuple(_redaction(number, rule) for number, rule in enumerate(rules, 1))


def _redaction(number: int, rule: Any) -> Redaction:
    try:
        parsed = _Rule.model_validate(rule)
        return Redaction(parsed.path, parsed.pattern, parsed.replace)
    except ValidationError as error:
        place, message = first_fault(error)
        raise ValueError(f"rule {number}: {'.'.join(map(str, place))}: {message}") from None
    except ValueError as error:
        raise ValueError(f"rule {number}: {error}") from None


def _changed_at(value: Any, names: Sequence[str], change: Callable[[Any], Any]) -> Any:
    """The value with every value at the path of names changed, through every element of a list."""
    if not names:
        return change(value)
    if isinstance(value, list):
        return [_changed_at(item, names, change) for item in value]
    if isinstance(value, dict) and names[0] in value:
        return {**value, names[0]: _changed_at(value[names[0]], names[1:], change)}
    return value


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with all its strings changed, except the names in objects."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {name: _mapped(item, change) for name, item in value.items()}
    return value


def _without_ids(value: Any) -> Any:
    """A prompt's JSON value with its lists of token ids redacted."""
    if not isinstance(value, list):
        return value
    if value and all(type(item) is int for item in value):
        return REDACTED
    return [_without_ids(item) for item in value]


def _keep(tensor: PayloadTensor, values: dict[str, Any]) -> None:
    if values.get("shape") != list(tensor.shape):
        tensor.ClearField("shape")
    for name in _TENSOR_FIELDS:
        if values.get(name) is None:
            tensor.ClearField(name)  # type: ignore[arg-type]  # The name is one of its fields.
        elif values[name] != getattr(tensor, name):
            setattr(tensor, name, values[name])


def _clear_ids(chunks: Sequence[PayloadChunk]) -> None:
    for chunk in chunks:
        chunk.ClearField("token_ids")
        chunk.ClearField("logprobs")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _message(error: Exception) -> str:
    """The message of an error in one line; RE2's messages are bytes."""
    message = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else str(error)
    return " ".join(message.split()) or type(error).__name__
