"""Forms of answers, one of each kind, and whether a text has one."""

import json
import re

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
