"""OpenAI's own client, unmodified, with keys that have limits: GATEWAY KEY REQUESTS KEY REQUESTS TOKENS.

The first key's client has made no call. Run in the clients' environment; prints "done" if every check passed.
"""

import re
import sys

import openai

gateway, few_key, few, counted_key, requests, tokens = sys.argv[1:]
DURATION = r"(\d+m)?\d+s"
COMPLETION = {"model": "storyteller", "prompt": "Once", "max_tokens": 2}
MESSAGES = [{"role": "user", "content": "Tell me a story."}]


def client_of(key):
    return openai.OpenAI(base_url=f"http://{gateway}/v1", api_key=key, max_retries=0)


def check(headers, kind, limit):
    remaining = int(headers[f"x-ratelimit-remaining-{kind}"])
    assert headers[f"x-ratelimit-limit-{kind}"] == limit, headers
    assert 0 <= remaining < int(limit), headers
    assert re.fullmatch(DURATION, headers[f"x-ratelimit-reset-{kind}"]), headers
    return remaining


counted = client_of(counted_key)
raw = counted.completions.with_raw_response.create(**COMPLETION)
before = {kind: check(raw.headers, kind, limit) for kind, limit in (("requests", requests), ("tokens", tokens))}
assert raw.parse().usage.completion_tokens == 2
raw = counted.chat.completions.with_raw_response.create(
    model="storyteller", messages=MESSAGES, max_tokens=5, stream=True
)
assert check(raw.headers, "requests", requests) < before["requests"]
assert check(raw.headers, "tokens", tokens) < before["tokens"]
assert list(raw.parse())
with counted.completions.with_streaming_response.create(**COMPLETION) as streamed:
    check(streamed.headers, "tokens", tokens)

limited = client_of(few_key)
seen = [check(limited.models.with_raw_response.list().headers, "requests", few) for _ in range(int(few))]
assert seen == list(reversed(range(int(few)))), seen
refused = None
try:
    limited.completions.create(**COMPLETION)
except openai.RateLimitError as error:
    refused = error
assert refused is not None
assert check(refused.response.headers, "requests", few) == 0
assert 1 <= int(refused.response.headers["retry-after"]) <= 61
assert refused.type == "rate_limit_error", refused.body
print("done")
