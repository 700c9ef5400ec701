"""Wrong requests to the front ends of text in JSON: OpenAI's, the generate extension, and Headrace's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random

from tests.fuzz.case import Case, HttpCall, Maker
from tests.fuzz.json_values import (
    HUGE,
    NO_OBJECT,
    NO_TEXT,
    NO_TRUTH,
    NO_WHOLE,
    SAMPLING,
    Wrong,
    bad_transport,
    broken_body,
    either,
    joined,
    nested,
    one_of,
    real,
    whole,
)

JSON = {"content-type": "application/json"}
_LONG = json.dumps("once " * 1500)
_MODELS = one_of("null", "5", "[]", "{}", '""', '"nobody"', '"../../etc/passwd"', json.dumps("m" * 5000), '"a\\u0000"')
_MESSAGES = one_of(
    "null",
    "[]",
    "{}",
    '"x"',
    "[5]",
    "[{}]",
    '[{"role":5}]',
    '[{"role":""}]',
    '[{"role":"alien","content":"x"}]',
    '[{"role":"user","content":5}]',
    '[{"role":"user","content":[{"type":"image_url"}]}]',
    '[{"role":"user","content":[{"text":"x"}]}]',
    '[{"role":"user","content":[5]}]',
    '[{"role":"user","content":"x","tool_calls":[{"id":"1"}]}]',
    '[{"role":"user","content":"\\ud800"}]',
    json.dumps([{"role": "user", "content": "x"}] * 5000),
    json.dumps([{"role": "user", "content": "once " * 1500}]),
)
_STOP = one_of("5", "true", "{}", "[5]", '[""]', '""', json.dumps(["a"] * 17), json.dumps("x" * 1025), "[[]]")

_OPENAI: Mapping[str, Wrong] = {
    **SAMPLING,
    "model": _MODELS,
    "stop": _STOP,
    "n": either(NO_WHOLE, whole(-9, 0), whole(17, 10**9), HUGE, one_of('"2"')),
    "stream": either(NO_TRUTH, one_of("1", '"true"')),
    "stream_options": one_of("5", "[]", '"x"', '{"include_usage":true}', '{"include_usage":5}'),
    "response_format": one_of('{"type":"structural_tag"}', '{"type":"json_schema"}', "5", "[]"),
    "structured_outputs": one_of("{}", "5", "[]", '{"regex":"("}', '{"json":{"not":{}}}', '{"grammar":"start: x"}'),
    "truncate_prompt_tokens": either(NO_WHOLE, one_of("0", "-2", "true"), HUGE),
}
COMPLETION: Mapping[str, Wrong] = {
    **_OPENAI,
    "prompt": either(
        one_of("null", '""', "{}", "5", "true", "[]", "[[]]", "[[-1]]", "[1.5]", '["a",1]', "[99999999]", "[true]"),
        one_of('[["a"]]', json.dumps(["x"] * 65), "[2147483648]", _LONG, json.dumps([5] * 2000), '"\\ud800"', "[{}]"),
        nested,
    ),
    "logprobs": either(NO_WHOLE, whole(-9, -1), whole(21, 999)),
    "best_of": either(NO_WHOLE, whole(-9, 0), whole(2, 99)),
    "echo": either(NO_TRUTH, one_of('"yes"', "1")),
    "suffix": one_of('"x"', "5"),
}
CHAT: Mapping[str, Wrong] = {
    **_OPENAI,
    "messages": either(_MESSAGES, nested),
    "logprobs": either(NO_TRUTH, one_of("1", '"true"')),
    "top_logprobs": either(NO_WHOLE, whole(-9, -1), whole(1, 999)),
    "tools": one_of('[{"type":"function"}]', "5"),
    "max_completion_tokens": SAMPLING["max_tokens"],
    "chat_template": one_of('"x"', "5"),
    "chat_template_kwargs": one_of("5", "[]", '"x"', '{"tokenize":true}'),
}
# Without a name the only embedding model is used.
_OTHER_MODELS = one_of("5", "[]", "{}", '"nobody"', json.dumps("m" * 5000), '"a\\u0000"')
EMBEDDING: Mapping[str, Wrong] = {
    "model": either(_OTHER_MODELS, one_of('"storyteller"', '"identity"', '"classifier"')),
    "input": either(
        one_of(
            "null", "{}", "5", "true", "[]", "[[]]", "[[-1]]", "[1.5]", '["a",1]', "[120]", "[true]", "[2147483648]"
        ),
        one_of('[["a"]]', json.dumps(["x"] * 2049), json.dumps(["the fox"] * 3 + [5]), json.dumps([5] * 500), "[{}]"),
        one_of(json.dumps("the fox " * 300), '"\\ud800"'),
        nested,
    ),
    "encoding_format": either(NO_TEXT, one_of('"int8"', '""', '"FLOAT"')),
    "dimensions": one_of("5", '"x"', "0"),
}
_TENSORS: Mapping[str, Wrong] = {
    "text_input": either(one_of("null", "5", "true", "[]", "{}", "[5]", '["a","b"]', '[["a"],["b"]]', '""'), nested),
    "stream": either(NO_TRUTH, one_of("1", '"true"', "[true,false]")),
    "exclude_input_in_output": either(NO_TRUTH, one_of("0", '"false"')),
    "sampling_parameters": one_of("5", "true", '"{"', '"[]"', '"5"', '"{\\"temperature\\":-1}"', '{"bogus":1}', "[1]"),
    "return_logprobs": one_of("5", '"yes"'),
}
GENERATE_EXTENSION: Mapping[str, Wrong] = {
    **{name: wrong for name, wrong in SAMPLING.items() if name != "ignore_eos"},
    **_TENSORS,
    "ignore_eos": one_of("2", '"maybe"', "{}"),
    "stop": one_of("5", "{}", "[5]", '[""]', "true"),
    "parameters": either(NO_OBJECT, one_of('{"bogus":1}', '{"a":[{}]}', '{"temperature":-1}', '{"max_tokens":1}')),
    "bogus": either(one_of("1", '"x"', "true", "[1]", "{}"), nested),
    "triton_final_response": one_of("true", "1"),
    "id": either(NO_TEXT, one_of(json.dumps("i" * 300))),
}
# Envoy parses this one: protobuf's JSON accepts numbers as text, and some text as numbers.
HEADRACE: Mapping[str, Wrong] = {
    "model": one_of('""', '"nobody"', "[]", "{}", '["a"]'),
    "prompt": one_of('""', "{}", "[]", '["a","b"]', _LONG),
    "messages": one_of('"x"', "5", '[{"role":"user","content":"x"}]', "[5]", '[{"role":{}}]', '{"role":5}'),
    "temperature": either(one_of('"hot"', "{}", "[]", "true", '"NaN"'), real(-1e6, -1e-3), real(100.1, 1e9)),
    "top_p": either(one_of('"x"', "{}"), real(-5, 0), real(1.0001, 9)),
    "max_tokens": either(
        one_of('"x"', "{}", "1.5", "true"), whole(-(2**31), 0), whole(1025, 2**31), whole(2**32, 2**70)
    ),
    "top_k": either(one_of('"x"', "{}", "1.5"), whole(-(2**31), -1), whole(2**32, 2**70)),
    "seed": either(one_of('"x"', "{}", "1.5"), whole(-(2**31), -1), whole(2**64, 2**90)),
    "stop": one_of('[""]', json.dumps(["a"] * 17), json.dumps(["x" * 1025]), "[{}]"),
    "ignore_eos": one_of('"maybe"', "{}", "[]", "5"),
    "chunk_tokens": either(one_of('"x"', "0"), whole(4097, 2**31)),
    "stop_token_ids": one_of("[-1]", "[4294967296]", "[99999]", '["x"]'),
    "logit_bias": one_of("[]", "5", '{"x":1}', '{"5":101}', '{"5":{}}', '{"-1":1}', '{"99999":1}'),
    "bad_token_ids": one_of("[1]", "[{}]", '[{"ids":[]}]', '[{"ids":[99999]}]', '[{"ids":["x"]}]'),
    "top_logprobs": either(whole(1, 20), whole(21, 2**31)),
    "request_id": one_of(json.dumps("i" * 300)),
}


def _maker(
    path: str | Callable[[Random], str],
    good: Mapping[str, str],
    wrong: Mapping[str, Wrong],
    required: Sequence[str] = ("model", "prompt", "messages", "input", "text_input"),
) -> Maker:
    """Cases of one path: a field that is wrong, a required one that is missing, a broken body, a wrong transport."""

    def make(random: Random) -> Case:
        target = path if isinstance(path, str) else path(random)
        way = random.random()
        if way < 0.6:
            name = random.choice(list(wrong))
            value = wrong[name](random)
            body = joined({**good, name: value})
            return Case(f"{name}={value[:80]}", HttpCall(target, body, JSON))
        if way < 0.65:
            name = random.choice([name for name in good if name in required])
            body = joined({key: value for key, value in good.items() if key != name})
            return Case(f"{name} missing", HttpCall(target, body, JSON))
        if way < 0.9:
            what, body = broken_body(random, joined(good))
            return Case(f"body: {what}", HttpCall(target, body, JSON), must_fail=True)
        if way < 0.97:
            return bad_transport(random, target, joined(good), JSON)
        return _harmless(random, target, good)

    return make


_HEADRACE = "/headrace/v1/generate"
_CONTENT_TYPES = (
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data",
    "nonsense",
    "image/png; x=y",
)


def _harmless(random: Random, path: str, good: Mapping[str, str]) -> Case:
    """An unusual but valid request."""
    if random.random() < 0.5:
        kind = random.choice(_CONTENT_TYPES)
        return Case(f"content-type {kind}", HttpCall(path, joined(good), {"content-type": kind}), must_fail=False)
    extra = {f"x{random.randrange(99)}": nested(random) for _ in range(random.randint(1, 4))}
    return Case("unknown fields", HttpCall(path, joined({**good, **extra}), JSON), must_fail=False)


_PROMPT = {"model": '"storyteller"', "prompt": '"Once"', "max_tokens": "1"}
_CONVERSATION = {"model": '"storyteller"', "messages": '[{"role":"user","content":"Hi"}]', "max_tokens": "1"}
_GENERATE = {"text_input": '"Once"', "max_tokens": "1"}


def _openai(tail: str) -> Callable[[Random], str]:
    return lambda random: random.choice(("/v1", "/openai/v1")) + tail


def _streamed(maker: Maker) -> Maker:
    """The same, with half of the bodies requesting a stream."""

    def make(random: Random) -> Case:
        case = maker(random)
        call = case.call
        if isinstance(call, HttpCall) and call.body.startswith(b'{"model"') and random.random() < 0.5:
            changed = call.body.replace(b'{"model"', b'{"stream":true,"model"', 1)
            # With a stream its options are valid.
            if b'"stream":' not in call.body and b"stream_options" not in call.body:
                return Case(
                    f"{case.what}, streamed", HttpCall(call.path, changed, call.headers, call.method), case.must_fail
                )
        return case

    return make


completions = _streamed(_maker(_openai("/completions"), _PROMPT, COMPLETION))
chat_completions = _streamed(_maker(_openai("/chat/completions"), _CONVERSATION, CHAT))
embeddings = _maker(_openai("/embeddings"), {"model": '"embedder"', "input": '"the fox"'}, EMBEDDING, ("input",))
generate = _maker("/v2/models/storyteller/generate", _GENERATE, GENERATE_EXTENSION)
generate_stream = _maker("/v2/models/storyteller/generate_stream", _GENERATE, GENERATE_EXTENSION)
headrace_generate = _maker(_HEADRACE, _PROMPT, HEADRACE)
