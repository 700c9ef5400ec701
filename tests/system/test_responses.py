"""OpenAI's Responses API through the gateway, with OpenAI's own client; its errors are in test_error_table.py."""

from tests.system.calls import rest
from tests.system.keyed_stack import MODEL, bearer, key_file, keyed
from tests.system.own_clients import client_passes

__all__ = ["key_file", "keyed"]


async def test_openais_own_client_works(stack):
    await client_passes("responses_client", stack.gateway)


async def test_a_client_continues_its_own_responses_only(keyed):
    stack, _ = keyed

    async def status(who, **fields):
        body = {"model": MODEL, "input": "Once", "max_output_tokens": 2} | fields
        answer = await rest(stack.gateway, "POST", "/v1/responses", body, **bearer(who))
        return answer.status, answer.json

    _, first = await status("alice")
    assert (await status("alice", previous_response_id=first["id"]))[0] == 200
    refused, body = await status("root", previous_response_id=first["id"])
    assert (refused, body["error"]["param"]) == (400, "previous_response_id")
    path = f"/v1/responses/{first['id']}"
    assert (await rest(stack.gateway, "GET", path, None, **bearer("alice"))).json["output"] == first["output"]
    for verb, place in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
        assert (await rest(stack.gateway, verb, path + place, None, **bearer("root"))).status == 404
    assert (await rest(stack.gateway, "DELETE", path, None, **bearer("alice"))).json["deleted"] is True
    gone = await rest(stack.gateway, "GET", path, None, **bearer("alice"))
    assert (gone.status, gone.json["error"]["code"]) == (404, "not_found")
