"""OpenAI's own client, unmodified: the Batch API with the storyteller: GATEWAY KEY.

Run in the clients' environment; prints "done" if every check passed.
"""

import json
import sys
import time

import openai

client = openai.OpenAI(base_url=f"http://{sys.argv[1]}/v1", api_key=sys.argv[2], max_retries=0)
FINAL = {"failed", "completed", "expired", "cancelled"}


def upload(*lines):
    data = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    return client.files.create(file=("requests.jsonl", data), purpose="batch")


def line(custom_id, url="/v1/chat/completions", **body):
    body = {"model": "storyteller", "max_tokens": 8, "seed": 1} | body
    if url == "/v1/chat/completions":
        body.setdefault("messages", [{"role": "user", "content": "Tell me a story about a fox."}])
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def create(file, endpoint="/v1/chat/completions", **fields):
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def ended(batch):
    ends_at = time.monotonic() + 60
    while batch.status not in FINAL:
        assert time.monotonic() < ends_at, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def results(file_id):
    return {item["custom_id"]: item for item in map(json.loads, client.files.content(file_id).text.splitlines())}


# Answers are those of the same requests by HTTP; a request's error is its result.
good = [line(f"good-{number}", seed=number) for number in range(20)]
bad = [line("streams", stream=True), line("hot", temperature=-1)]
file = upload(*good, *bad)
assert client.files.retrieve(file.id).filename == "requests.jsonl"
batch = create(file, metadata={"purpose": "test"})
assert (batch.status, batch.object, batch.endpoint) == ("validating", "batch", "/v1/chat/completions")
batch = ended(batch)
assert (batch.status, batch.metadata) == ("completed", {"purpose": "test"}), batch
counts = batch.request_counts
assert (counts.total, counts.completed, counts.failed) == (22, 20, 2), batch
assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
answers = results(batch.output_file_id)
assert answers.keys() == {item["custom_id"] for item in good}
answer = answers["good-3"]["response"]
assert answers["good-3"]["error"] is None
assert (answer["status_code"], answer["request_id"]) == (200, f"{batch.id}/good-3")
alone = client.chat.completions.create(**good[3]["body"])
assert answer["body"]["choices"][0]["message"]["content"] == alone.choices[0].message.content
errors = results(batch.error_file_id)
assert {name: item["response"]["body"]["error"]["param"] for name, item in errors.items()} == {
    "streams": "stream",
    "hot": "temperature",
}
assert {item["response"]["status_code"] for item in errors.values()} == {400}

# A file that is larger than what is parsed on the event loop.
large = upload(*(line(str(number), "/v1/completions", prompt="fox " * 250, max_tokens=1) for number in range(80)))
batch = ended(create(large, "/v1/completions"))
assert (batch.status, batch.request_counts.completed, batch.error_file_id) == ("completed", 80, None), batch

# Responses.
asked = {"model": "storyteller", "input": "Tell me a story about a fox.", "max_output_tokens": 8}
batch = ended(create(upload(line("one", "/v1/responses") | {"body": asked}), "/v1/responses"))
answer = results(batch.output_file_id)["one"]["response"]["body"]
assert (answer["object"], answer["model"]) == ("response", "storyteller")

# What is wrong with a file is named by line.
wrong = [line("one"), b"no JSON\n", {**line("two"), "method": "GET"}]
batch = ended(create(upload(*wrong)))
assert batch.status == "failed"
assert [(error.line, error.code) for error in batch.errors.data] == [(2, "invalid_json_line"), (3, "invalid_method")], (
    batch
)
batch = ended(create(upload(line("one", model="nobody"))))
assert [(error.line, error.code) for error in batch.errors.data] == [(1, "model_not_allowed")], batch

# Cancelled, the rest is errors.
many = upload(*(line(str(number), max_tokens=200, ignore_eos=True) for number in range(100)))
batch = create(many)
assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
batch = ended(batch)
assert batch.status == "cancelled"
assert batch.request_counts.completed < 100
errors = results(batch.error_file_id)
assert {item["error"]["code"] for item in errors.values()} == {"batch_cancelled"}
assert len(errors) + batch.request_counts.completed == 100

# Lists, in pages.
listed = list(client.batches.list(limit=2))
assert len(listed) == 6
assert listed[0].id == batch.id
assert len(list(client.files.list(purpose="batch"))) == 6
assert client.files.delete(many.id).deleted


def error_of(call, kind):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("not refused")


for call in (
    lambda: client.files.retrieve(many.id),
    lambda: create(many),
    lambda: client.batches.retrieve("batch_../x"),
):
    assert error_of(call, openai.NotFoundError).code == "not_found"
wrong_window = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "1y"}
for call, param in (
    (lambda: client.files.create(file=("x", b"x"), purpose="fine-tune"), "purpose"),
    (lambda: create(file, "/v1/models"), "endpoint"),
    (lambda: client.batches.create(**wrong_window), "completion_window"),
    (lambda: client.batches.cancel(batch.id), None),
    (lambda: client.batches.list(limit=101), "limit"),
):
    assert error_of(call, openai.BadRequestError).param == param
print("done")
