"""Forms of answers, one of each kind, and whether a text has one."""

import json
import random
import re

import numpy as np

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "rain", "ü"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
FORMS = (
    {"json": PERSON},
    {"json": PERSON, "disable_any_whitespace": True},
    {"json_object": True},
    {"regex": "[A-F]{3}-[0-9]{2,4}"},
    {"choice": ["yes", "yesterday", "no"]},
    {"grammar": 'start: "a" start | "b"'},
)


def follows(form, text):
    kind, value = next(iter(form.items()))
    if kind == "regex":
        return re.fullmatch(value, text)
    if kind == "choice":
        return text in value
    if kind == "grammar":
        return re.fullmatch("a*b", text)
    answer = json.loads(text)
    if form.get("disable_any_whitespace"):
        assert text == json.dumps(answer, separators=(",", ":"), ensure_ascii=False)
    return list(answer) == ["name", "age", "likes"] if kind == "json" else isinstance(answer, dict)


def walked(form, seed, long=300):
    """A random text of a form, as `read_structured_outputs` returns it: to its first end after `long` bytes."""
    from llguidance import LLTokenizer

    from headrace.grammars import compile_grammar

    tokenizer, choices, text = LLTokenizer("byte"), random.Random(seed), bytearray()
    matcher = compile_grammar(form, tokenizer)
    # A pattern's own letters are what ends a text of it, which letters at random do not find.
    ends = [f'{letters}"'.encode() for letters in (*re.findall("[a-z@.0-9>]+", form), "a@b.co", ".co", "bb")]
    while True:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [token for token in np.flatnonzero(bits).tolist() if token != tokenizer.eos_token]
        assert allowed or matcher.is_accepting(), (bytes(text), matcher.get_error())
        if not allowed or (matcher.is_accepting() and choices.random() < 0.5):
            return text.decode()
        piece = [choices.choice(allowed)]
        if len(text) > long:
            closing = [[byte] for byte in b'"]}n' if byte in allowed]
            if ord('"') not in allowed:
                closing = [list(end) for end in ends if matcher.validate_tokens(list(end)) == len(end)] + closing
            piece = (closing or [piece])[0]
        assert len(text) < 20 * long, bytes(text)
        assert matcher.consume_tokens(piece)
        text += bytes(piece)
