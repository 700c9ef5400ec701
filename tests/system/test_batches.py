"""OpenAI's Batch API through the gateway, with keys."""

import json
import secrets

import pytest_asyncio

from tests.system.calls import rest
from tests.system.keyed_stack import write
from tests.system.own_clients import client_passes
from tests.waiting import until

KEYS = {name: "hr-" + secrets.token_urlsafe(32) for name in ("alice", "bob", "root")}
ENTRIES = [{"name": name, "key": key, "models": ["storyteller"]} for name, key in KEYS.items() if name != "root"]
LINES = 12
FORM = (
    b'--edge\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--edge\r\nContent-Disposition: form-data; name="file"; filename="lines"\r\n\r\n%s\r\n--edge--\r\n'
)


@pytest_asyncio.fixture(scope="module")
async def keyed(stacks, tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write(path, [*ENTRIES, {"name": "root", "key": KEYS["root"], "role": "admin"}])
    async with stacks.use(models="storyteller=models/storyteller", gateway_keys=str(path)) as started:
        yield started


async def call(stack, who, method, path, body=None, **headers):
    return await rest(stack.gateway, method, path, body, authorization=f"Bearer {KEYS[who]}", **headers)


async def test_openais_own_client_runs_batches(keyed):
    await keyed.wait_ready()
    await client_passes("openai_batches", keyed.gateway, KEYS["bob"])


async def test_a_batch_ends_with_one_result_for_each_line_though_the_transformer_is_killed(keyed):
    await keyed.wait_ready()
    # At this pace each line takes a second, eight run at once.
    body = {"model": "storyteller", "prompt": "Once", "max_tokens": 11, "ignore_eos": True, "pace": 10}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    data = b"\n".join(json.dumps({**line, "custom_id": str(number)}).encode() for number in range(LINES))
    form = {"content_type": "multipart/form-data; boundary=edge"}
    file = (await call(keyed, "alice", "POST", "/v1/files", FORM % data, **form)).json
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    path = f"/v1/batches/{(await call(keyed, 'alice', 'POST', '/v1/batches', asked)).json['id']}"

    async def completed():
        answer = await call(keyed, "alice", "GET", path)
        if answer.status != 200:  # The transformer is away.
            return 0, ""
        return answer.json["request_counts"]["completed"], answer.json["status"]

    await until(completed, holds=lambda state: state[0] > 0)
    killed = keyed.pid("transformer")
    await keyed.kill("transformer")
    await until(completed, holds=lambda state: state[1] == "completed")
    assert keyed.pid("transformer") != killed
    batch = (await call(keyed, "alice", "GET", path)).json
    output = f"/v1/files/{batch['output_file_id']}/content"
    lines = (await call(keyed, "root", "GET", output)).body.splitlines()
    names = [json.loads(line)["custom_id"] for line in lines]
    assert sorted(names, key=int) == [str(number) for number in range(LINES)]
    assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}

    for hidden in (path, output, f"/v1/files/{file['id']}"):
        assert (await call(keyed, "bob", "GET", hidden)).status == 404
    # Each line is on record, as its client's, in a trace of its own.
    request_id = f"{batch['id']}/{names[-1]}"
    path = f"/headrace/v1/payloads?request_id={request_id}"
    answer = await until(lambda: call(keyed, "root", "GET", path), holds=lambda answer: answer.body.strip())
    record = json.loads(answer.body.splitlines()[0])
    record = record.get("record", record)
    assert (record["client"], record["protocol"]) == ("alice", "headrace.rest.v1.OpenAI/Completions")
    assert len(record["trace_id"]) == 32
