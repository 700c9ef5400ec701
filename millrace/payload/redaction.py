"""Rules that take something out of a record: JSON paths, patterns, or patterns within paths.

A rule is a JSON object of `path`, `pattern` or both, and `replace`, the literal text that stands for what a pattern
matched ("[redacted]" unless given). Patterns are RE2's: the time they take is linear in the text.

- A pattern alone covers every text of a record: prompt, answer, message, the strings of the parameters, and
  the caller's metadata.
- A path begins with a field of the record as `Query` shows it in JSON, see `FIELDS`, the parameters being the
  object that they are. A string there becomes "[redacted]", anything else null. `$.text` covers the chunks, and
  `$.outputs` those of the chunks.
- A path with a pattern covers the strings at the path, and those within what is there.

Prompts that are JSON lists (messages, inputs of embeddings) are searched string by string, where nothing is
escaped, and once more as they stand. No pattern can see what token ids spell: a prompt of ids is taken out by
any pattern that covers prompts, and an answer loses the ids and log probabilities of its chunks up to the last one
that a match touches (ids run ahead of their text, never behind it). A match may span chunks: what stands
for it goes into the chunk where it begins.

What cannot be read (parameters that were cut off) is taken out whole. Rules are made at the start, from the
settings; a wrong one raises ValueError, which says which. `redact` belongs on the writer thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonpath_ng
import re2
from jsonpath_ng.exceptions import JSONPathError
from jsonpath_ng.parser import parse
from pydantic import BaseModel, ConfigDict, ValidationError

from millrace.payload.answer_redaction import Match, replace, take_out
from millrace_protos.millrace_pb2 import PayloadRecord, PayloadTensor

REDACTED = "[redacted]"

_TEXTS = ("prompt", "text", "message", "request_id", "client")
_TENSORS = ("inputs", "outputs")
FIELDS = (*_TEXTS, "parameters", "metadata", *_TENSORS)
_SEARCHED = ("prompt", "text", "parameters", "message", "metadata")  # By a pattern alone.
_STEPS = (jsonpath_ng.Fields, jsonpath_ng.Wildcard, jsonpath_ng.Index, jsonpath_ng.Slice)
_TENSOR_FIELDS = ("name", "datatype", "digest", "data")


class _Rule(BaseModel):
    """A rule as it is written."""

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
        self._path = None if path is None else _FieldPath(path)
        self._pattern = None if pattern is None else _Pattern(pattern, REDACTED if replace is None else replace)
        self._fields = _SEARCHED if self._path is None else (self._path.field,)
        if self._path is not None and self._pattern is not None and self._path.field in _TENSORS:
            raise ValueError(f"{path}: tensors are bytes and not text; give the path without a pattern")

    @property
    def redacts_answers(self) -> bool:
        return "text" in self._fields

    def redact(self, record: PayloadRecord) -> None:
        """Changes a part of a record in place."""
        for field in self._fields:
            if field == "text":
                self._redact_answer(record)
            elif field == "parameters":
                self._redact_parameters(record)
            elif field == "metadata":
                self._redact_metadata(record)
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
                pass  # A text like any other.
        return self._pattern.replaced(text)

    def _value(self, value: Any) -> Any:
        """What stands for a JSON value."""
        if self._pattern is not None:
            return _mapped(value, self._pattern.replaced)
        return REDACTED if isinstance(value, str) else None

    def _redact_parameters(self, record: PayloadRecord) -> None:
        if not record.parameters:
            return
        try:
            values = json.loads(record.parameters)
            record.parameters = _json(
                self._value(values) if self._path is None else self._path.apply(values, self._value)
            )
        except (ValueError, RecursionError):
            record.parameters = _json(REDACTED)

    def _redact_metadata(self, record: PayloadRecord) -> None:
        values = dict(record.metadata)
        kept = self._value(values) if self._path is None else self._path.apply(values, self._value)
        record.metadata.clear()
        record.metadata.update(kept or {})

    def _redact_tensors(self, tensors: Any) -> None:
        if self._path is None or not tensors:
            return
        shown = [
            {"shape": list(tensor.shape)} | {name: getattr(tensor, name) for name in _TENSOR_FIELDS}
            for tensor in tensors
        ]
        kept = self._path.apply(shown, self._value)
        if kept is None:
            del tensors[:]
            return
        for tensor, values in zip(tensors, kept, strict=True):
            _keep(tensor, values or {})

    def _redact_answer(self, record: PayloadRecord) -> None:
        if self._pattern is None:
            take_out(record.chunks, REDACTED)
        else:
            matches = self._pattern.matches("".join(chunk.text for chunk in record.chunks))
            replace(record.chunks, matches, self._pattern.replace)
        if record.text:
            record.text = self._text(record.text)


class _Pattern:
    """A regular expression, and the text that stands for its matches; empty ones are none."""

    def __init__(self, pattern: str, replace: str) -> None:
        options = re2.Options()
        options.log_errors = False
        try:
            self._expression = re2.compile(pattern, options)
        except re2.error as error:
            raise ValueError(f"{pattern!r} is no pattern of RE2: {_words(error)}") from None
        if self._expression.search(""):
            raise ValueError(f"{pattern!r} matches where there is no text")
        self.replace = replace

    def matches(self, text: str) -> list[Match]:
        """Where the pattern matches, in order."""
        spans = (Match(*match.span()) for match in self._expression.finditer(text))
        return [span for span in spans if span.start < span.end]

    def replaced(self, text: str) -> str:
        """The text without what matches."""
        text = text.encode(errors="replace").decode()  # Escapes of JSON can hold halves of surrogate pairs.
        pieces, at = [], 0
        for start, end in self.matches(text):
            pieces += [text[at:start], self.replace]
            at = end
        return "".join([*pieces, text[at:]])


class _FieldPath:
    """A JSON path that begins with a field of a record."""

    def __init__(self, path: str) -> None:
        try:
            self._expression = parse(path)
        except JSONPathError as error:
            raise ValueError(f"{path!r} is no JSON path: {_words(error)}") from None
        self.field = _first_field(self._expression)
        if self.field not in FIELDS:
            raise ValueError(f"{path!r} must go down from $. and one of {', '.join(FIELDS)}")
        if self.field in _TEXTS and not _is_field(self._expression):
            raise ValueError(f"{path!r} goes into a text; give $.{self.field} and a pattern")

    def apply(self, value: Any, change: Callable[[Any], Any]) -> Any:
        """The field's value with every value at the path changed."""
        document = {self.field: value}
        for match in reversed(self._expression.find(document)):  # What is within others comes after them.
            match.full_path.update(document, change(match.value))
        return document[self.field]


def parse_redactions(text: str) -> tuple[Redaction, ...]:
    """The rules of a JSON list, or of a file that holds one; raises ValueError."""
    text = text.strip()
    if not text.startswith("["):
        try:
            text = Path(text).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"is neither a JSON list nor a file that can be read: {_words(error)}") from None
    try:
        rules = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the rules are not JSON: {_words(error)}") from None
    if not isinstance(rules, list):
        raise ValueError("the rules must be a JSON list")
    return tuple(_redaction(number, rule) for number, rule in enumerate(rules, 1))


def _redaction(number: int, rule: Any) -> Redaction:
    try:
        told = _Rule.model_validate(rule)
        return Redaction(told.path, told.pattern, told.replace)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"rule {number}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except ValueError as error:
        raise ValueError(f"rule {number}: {error}") from None


def _first_field(expression: Any) -> str:
    """The field that a path begins with; empty where it begins with anything else, or leads back up."""
    while isinstance(expression, jsonpath_ng.Child | jsonpath_ng.Descendants):
        step = expression.right
        if not isinstance(step, _STEPS):
            return ""
        if _is_field(expression):
            return str(step.fields[0]) if isinstance(step, jsonpath_ng.Fields) else ""
        expression = expression.left
    return ""


def _is_field(expression: Any) -> bool:
    """Whether it is the root's one field and no more."""
    return (
        isinstance(expression, jsonpath_ng.Child)
        and isinstance(expression.left, jsonpath_ng.Root)
        and isinstance(expression.right, jsonpath_ng.Fields)
        and len(expression.right.fields) == 1
    )


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with all its strings changed, but for names."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {name: _mapped(item, change) for name, item in value.items()}
    return value


def _without_ids(value: Any) -> Any:
    """A prompt's JSON value without lists of token ids."""
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
            tensor.ClearField(name)  # type: ignore[arg-type]  # It is one of its fields.
        elif values[name] != getattr(tensor, name):
            setattr(tensor, name, values[name])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _words(error: Exception) -> str:
    """What an error says, in one line; RE2 says it in bytes."""
    said = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else str(error)
    return " ".join(said.split()) or type(error).__name__
