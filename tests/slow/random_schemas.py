"""Random JSON schemas of the keywords that grammars support; their values are small: no endless strings or lists."""

from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]
PATTERNS = (
    "^[a-z]{1,8}$",
    "^[A-Z]{2}-[0-9]{3}$",
    "^(red|green|blue)$",
    "^\\d{1,3}(\\.\\d{1,2})?$",
    '^[^\\s"\\\\]{2,6}$',
)
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")
VALUES = (None, True, False, 0, -7, 2.5, "", "a b", "ü\n", 'say "no"', [1, "x"], {"k": []})
NAMES = ("name", "age", "a b", "größe", "x-1", "items", "$id2", 'q"', "t")
_DEPTH = 3


def random_schema(random: Random) -> Schema:
    """An object or a list at the top; some have definitions that refer to each other."""
    definitions = {f"d{i}": _schema(random, _DEPTH - 1, ()) for i in range(random.choice((0, 0, 0, 1, 2)))}
    schema = random.choice((_object, _object, _list))(random, 0, tuple(definitions))
    return schema | ({"$defs": definitions} if definitions else {})


def _schema(random: Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    if definitions and random.random() < 0.2:
        return {"$ref": f"#/$defs/{random.choice(definitions)}"}
    kinds = _LEAVES if depth >= _DEPTH else _LEAVES + _NODES
    return random.choice(kinds)(random, depth, definitions)


def _string(random: Random, *_: Any) -> Schema:
    kind = random.randrange(3)
    if kind == 0:
        return {"type": "string", "pattern": random.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": random.choice(FORMATS)}
    least = random.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + random.randrange(20)}


def _integer(random: Random, *_: Any) -> Schema:
    low = random.randrange(-1000, 1000)
    lower, upper = random.choice(("minimum", "exclusiveMinimum")), random.choice(("maximum", "exclusiveMaximum"))
    schema: Schema = {"type": "integer", lower: low, upper: low + random.randrange(10, 5000)}
    return schema | random.choice(({}, {}, {"multipleOf": random.choice((2, 5, 10))}))


def _number(random: Random, *_: Any) -> Schema:
    low = random.randrange(-100, 100) / 4
    return {"type": "number", "minimum": low, "maximum": low + random.randrange(1, 400) / 4}


def _plain(random: Random, *_: Any) -> Schema:
    return random.choice(
        ({"type": "boolean"}, {"type": "null"}, {"type": ["null", "boolean"]}, {"type": "integer"}, {"const": 1})
    )


def _enum(random: Random, *_: Any) -> Schema:
    return {"enum": random.sample(VALUES, random.randrange(1, 5))}


def _const(random: Random, *_: Any) -> Schema:
    return {"const": random.choice(VALUES)}


def _object(random: Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    names = random.sample(NAMES, random.randrange(5))
    schema: Schema = {
        "type": "object",
        "properties": {name: _schema(random, depth + 1, definitions) for name in names},
        "required": random.sample(names, random.randrange(len(names) + 1)),
        "additionalProperties": False,
    }
    return schema


def _list(random: Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    least = random.randrange(3)
    first = [_schema(random, depth + 1, definitions) for _ in range(random.choice((0, 0, 0, 2)))]
    items = _schema(random, depth + 1, definitions)
    most = max(least, len(first)) + random.randrange(3)
    return {"type": "array", "items": items, "minItems": least, "maxItems": most} | (
        {"prefixItems": first} if first else {}
    )


def _any_of(random: Random, depth: int, definitions: tuple[str, ...]) -> Schema:
    return {"anyOf": [_schema(random, depth + 1, definitions) for _ in range(random.randrange(1, 4))]}


def _all_of(random: Random, *_: Any) -> Schema:
    low = random.randrange(100)
    return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + 50}]}


_LEAVES: tuple[Callable[..., Schema], ...] = (_string, _integer, _number, _plain, _enum, _const, _all_of)
_NODES: tuple[Callable[..., Schema], ...] = (_object, _list, _any_of)
