"""JSON schemas as the grammars of llguidance enforce them. Pure.

What asks for nothing and what only annotates is left out. What llguidance can enforce in other words only is put so,
exactly or a little stricter: an answer is valid against the schema as it was given. The rest is ignored and named, or
stays where it is, for llguidance to refuse. Source: llguidance's docs/json_schema.md.
"""

import math
import re
from decimal import Decimal
from typing import Any

_MAX_DIVISOR = 10_000  # llguidance builds an automaton with so many states for multipleOf, and its limits ignore them.
_MAX_DEPTH = 100
_MAX_BOUND = 10**18  # llguidance fails for larger ones, or for both together.

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Beside these, other schemas may name more properties.
_OPEN = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties", "unevaluatedProperties"}
_ANNOTATIONS = {
    *("$comment", "$id", "contentEncoding", "contentMediaType", "contentSchema", "default", "deprecated"),
    *("description", "discriminator", "example", "examples", "externalDocs", "readOnly", "title", "writeOnly"),
    "xml",
}
# Without support, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "contains": (),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "if": (),
    "not": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
_PARTS = {"contains": ("minContains", "maxContains"), "if": ("then", "else")}  # Nothing without the keyword.
_FORMATS = frozenset(["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"])
_LOOK_AROUND = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[1-9bBk])")
# A prefix of one length, and literal texts that must not follow it.
_NOT_FOLLOWED = re.compile(
    r"(\^(?:(?:\[[^\]\\]+\]|\\[dw]|[\w@/:-])(?:\{\d+\})?)*)\(\?!((?:[\w@/:-]|\\[^\w|])+(?:\|(?:[\w@/:-]|\\[^\w|])+)*)\)"
)
_PICTURES = re.compile(r"\\p\{Extended_Pictographic\}(?!&&)")  # Fewer in newer Unicode, but each emoji stays one.
_UUID = "^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"


def enforceable(
    schema: Any, ignored: set[str] | None = None, is_strict: bool = True, closes: bool = False, place: str = "#"
) -> dict[str, Any]:
    """The schema as the module says; raises ValueError.

    The names of keywords that are not enforced go to `ignored`; with `is_strict` those that ask for something stay.
    With `closes` an object with `properties` has no others unless its schema says more about them. `place` is where
    the schema will be in another.
    """
    if not isinstance(schema, dict | bool) or schema is False:
        raise ValueError("no answer can be valid" if schema is False else "a JSON schema must be an object")
    reader = _Reader({} if schema is True else schema, set() if ignored is None else ignored, is_strict, closes, place)
    read: dict[str, Any] = reader.read(reader.root)
    return read


class _Reader:
    def __init__(self, root: dict[str, Any], ignored: set[str], is_strict: bool, closes: bool, place: str) -> None:
        self.root = root
        self._ignored = ignored
        self._is_strict = is_strict
        self._closes = closes
        self._place = place
        self._divisor = 1
        self._depth = 0

    def read(self, schema: Any, is_whole: bool = True) -> Any:
        """A schema; one that is not the whole of its object stays open."""
        if not isinstance(schema, dict):
            return schema
        if "nullable" in schema:  # Of OpenAPI 3.0: no dialect of JSON Schema knows it.
            is_null_too = schema["nullable"] is True and "$schema" not in self.root and self._depth
            schema = {name: value for name, value in schema.items() if name != "nullable"}
            if is_null_too:
                return {"anyOf": [self.read(schema, is_whole), {"type": "null"}]}
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError("is nested too deep")
        # A null stands for an absent keyword, but not in a value.
        given = {k: v for k, v in schema.items() if (v is not None or k == "const") and not _annotates(k, v)}
        self._drop_unsupported(given)
        self._rewrite(given)
        is_alone = is_whole and "properties" not in given
        found: dict[str, Any] = {}
        for name, value in given.items():
            if name in _BY_NAME and isinstance(value, dict):
                found[name] = {key: self.read(item) for key, item in value.items()}
            elif name in _LISTS and isinstance(value, list):
                is_choice = name != "allOf" or len(value) == 1
                found[name] = [self.read(item, (is_alone and is_choice) or name == "prefixItems") for item in value]
            elif name == "items" and isinstance(value, list):
                found[name] = [self.read(item) for item in value]
            elif name in _SINGLE:
                found[name] = self.read(value)
            elif name == "$ref" and isinstance(value, str) and value.startswith("#"):
                found[name] = self._place + value[1:]
            else:
                found[name] = value
        if self._closes and is_whole and isinstance(found.get("properties"), dict) and not found.keys() & _OPEN:
            found["additionalProperties"] = False
        self._depth -= 1
        return found

    def _drop(self, schema: dict[str, Any], name: str) -> None:
        if not self._is_strict:
            self._ignored.add(name)
            schema.pop(name, None)

    def _drop_unsupported(self, schema: dict[str, Any]) -> None:
        names, rest = schema.get("propertyNames"), schema.get("additionalProperties", {})
        if isinstance(names, dict) and "properties" not in schema and "patternProperties" not in schema:
            keys = _values(names)
            if keys is not None and all(isinstance(key, str) for key in keys):
                schema |= {"properties": dict.fromkeys(keys, rest), "additionalProperties": False}
                del schema["propertyNames"]
            elif isinstance(names.get("pattern"), str) and not names.keys() - {"type", "pattern"}:
                schema |= {"patternProperties": {names["pattern"]: rest}, "additionalProperties": False}
                del schema["propertyNames"]
        if schema.get("unevaluatedProperties") is False and not schema.keys() & (_OPEN - {"unevaluatedProperties"}):
            schema["additionalProperties"] = schema.pop("unevaluatedProperties")
        for name, harmless in _UNSUPPORTED.items():
            parts = [part for part in _PARTS.get(name, ()) if part in schema]
            is_nothing = name not in schema or any(schema[name] == one for one in harmless)
            if is_nothing or (name == "if" and not parts) or (name == "contains" and schema.get("minContains") == 0):
                schema.pop(name, None)
            else:
                self._drop(schema, name)
            if name not in schema:
                for part in parts:
                    del schema[part]

    def _rewrite(self, schema: dict[str, Any]) -> None:
        """Changes what llguidance knows in other words only."""
        kind = schema.get("type")
        for name in _COUNTS:
            if isinstance(value := schema.get(name), float) and value.is_integer():
                schema[name] = int(value)
        for name in _BOUNDS:
            bound: Any = schema.get(name)
            if not _is_number(bound):
                continue
            if name.endswith("inimum"):
                schema[name] = max(bound, -_MAX_BOUND)
            elif bound > _MAX_BOUND:  # Of integers, what has 64 bits.
                schema[name] = min(int(bound), 2**63 - 1) if kind == "integer" else _MAX_BOUND
        divisor = schema.get("multipleOf")
        if _is_number(divisor) and divisor:
            digits = Decimal(str(divisor)).normalize().as_tuple().digits  # Without the decimal point.
            lcm = math.lcm(self._divisor, int("".join(map(str, digits))))
            if lcm <= _MAX_DIVISOR:
                self._divisor = lcm
            elif self._is_strict:
                raise ValueError(f"multipleOf: the least common multiple of all is {lcm}, more than {_MAX_DIVISOR}")
            else:
                self._drop(schema, "multipleOf")
        self._read_text(schema)
        if isinstance(choices := schema.get("anyOf"), list):
            enforced = [one for one in choices if not (isinstance(one, dict) and _looks_around(one))]
            schema["anyOf"] = enforced or choices
        if isinstance(choices := schema.get("oneOf"), list) and "anyOf" not in schema:
            tag = self._tag_of(choices)
            kinds = {kind for one in choices if isinstance(kind := self._resolved(one).get("type"), str)} - {"number"}
            if tag is None and len(kinds) < len(choices):
                closed = [
                    {"additionalProperties": False, **one} if isinstance(one, dict) and "$ref" not in one else one
                    for one in choices
                ]
                if self._tells_apart(closed):
                    choices = closed
                else:
                    self._drop(schema, "oneOf")
                    if self._is_strict:
                        return
            schema.pop("oneOf", None)
            if tag is not None:  # So that an answer is valid against one of them only.
                choices = [{**one, "required": [*dict.fromkeys([*_list(one.get("required")), tag])]} for one in choices]
            schema["anyOf"] = choices

    def _read_text(self, schema: dict[str, Any]) -> None:
        """The format and the pattern of a text."""
        form, pattern = schema.get("format"), schema.get("pattern")
        if isinstance(form, str) and form not in _FORMATS:
            if re.fullmatch("uuid[1-8]", form) and pattern is None:
                schema["pattern"] = _UUID.format(form[-1])
            elif schema.get("type") in ("string", None):
                self._ignored.add("format")
            del schema["format"]
        if not isinstance(pattern, str):
            return
        pattern = schema["pattern"] = _PICTURES.sub(r"[\g<0>&&\\p{Emoji}]", pattern)
        if not _LOOK_AROUND.search(pattern):
            return
        # What must, or must not, follow from a fixed place on is one more pattern.
        parts = []
        while True:
            if pattern.startswith("^(?=") and (end := _closing(pattern, 1)):
                parts.append(f"^(?:{pattern[4:end]})")
                pattern = "^" + pattern[end + 1 :]
            elif found := _NOT_FOLLOWED.match(pattern):
                words = [re.sub(r"\\(.)", r"\1", word) for word in found[2].split("|")]
                parts.append(found[1] + _beginning_with_none(words))
                pattern = found[1] + pattern[found.end() :]
            else:
                break
        if parts and not _LOOK_AROUND.search("".join([pattern, *parts])):
            schema["pattern"] = pattern
            schema["allOf"] = [*_list(schema.get("allOf")), *({"type": "string", "pattern": part} for part in parts)]
        elif "format" in schema:  # It states the same, such as a duration.
            del schema["pattern"]
        else:
            self._drop(schema, "pattern")

    def _tag_of(self, choices: list[Any]) -> str | None:
        """A property whose value tells the choices apart."""
        seen: dict[str, list[Any]] = {}
        for choice in map(self._resolved, choices):
            properties = choice.get("properties")
            for name, value in properties.items() if isinstance(properties, dict) else ():
                values = _values(value) if isinstance(value, dict) else None
                seen.setdefault(name, []).append([repr(one) for one in values or ()])
        for name, lists in seen.items():
            every = [one for values in lists for one in values]
            if len(lists) == len(choices) and all(lists) and len(set(every)) == len(every):
                return name
        return None

    def _tells_apart(self, choices: list[Any]) -> bool:
        """Whether each choice is a closed object without a property that each other requires."""
        found = [self._resolved(one) for one in choices]
        if any(one.get("type") != "object" or one.keys() & _OPEN != {"additionalProperties"} for one in found):
            return False
        known = [list(one.get("properties") or ()) for one in found]
        return all(
            one["additionalProperties"] is False
            and all(
                any(name not in names for name in _list(other.get("required"))) for other in found[:i] + found[i + 1 :]
            )
            for i, (one, names) in enumerate(zip(found, known, strict=True))
        )

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """The schema that a reference from the root names; empty for what is none."""
        found: Any = schema
        if isinstance(schema, dict) and isinstance(ref := schema.get("$ref"), str) and ref.startswith("#/"):
            found = self.root
            for part in ref[2:].split("/"):
                found = found.get(part) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}


def _annotates(name: str, value: Any) -> bool:
    is_dialect = isinstance(value, str) and re.match("https?://json-schema.org/", value)
    return name in _ANNOTATIONS or name.startswith("x-") or (name == "$schema" and not is_dialect)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """The values of a schema that allows no others."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _looks_around(schema: dict[str, Any]) -> bool:
    pattern = schema.get("pattern")
    return isinstance(pattern, str) and bool(_LOOK_AROUND.search(pattern)) and not pattern.startswith("^(?=")


def _beginning_with_none(words: list[str]) -> str:
    """A pattern of what begins with none of the words, and is as long as their common beginning and one more."""
    rests: dict[str, list[str]] = {}
    for word in words:
        rests.setdefault(word[0], []).append(word[1:])
    others = f"[^{re.escape(''.join(rests))}]"
    more = [re.escape(first) + _beginning_with_none(rest) for first, rest in rests.items() if all(rest)]
    return f"(?:{'|'.join([others, *more])})"


def _closing(pattern: str, at: int) -> int:
    """The index of the parenthesis that closes the one at an index; 0 for none."""
    depth, in_class = 0, False
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 1
        elif in_class or character == "[":
            in_class = character != "]"
        else:
            depth += (character == "(") - (character == ")")
            if not depth:
                return at
        at += 1
    return 0
