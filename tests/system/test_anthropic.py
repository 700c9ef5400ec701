"""Anthropic's Messages API through the gateway, with Anthropic's own client; its errors are in test_error_table.py."""

from tests.system.calls import rest
from tests.system.keyed_stack import KEYS, MODEL, bearer, key_file, keyed
from tests.system.own_clients import client_passes

__all__ = ["key_file", "keyed"]


async def test_anthropics_own_client_works(stack):
    await client_passes("anthropic_client", stack.gateway)


async def test_the_key_may_be_where_anthropics_clients_have_it(keyed):
    stack, _ = keyed
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "Once"}]}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert (await rest(stack.gateway, "POST", path, body, **{"x-api-key": KEYS["alice"]})).status == 200
        refused = await rest(stack.gateway, "POST", path, body, **{"x-api-key": "mr-unknown"})
        assert (refused.status, refused.json["error"]["type"]) == (401, "authentication_error")
        forbidden = await rest(stack.gateway, "POST", path, body | {"model": "normalizer"}, **bearer("alice"))
        assert (forbidden.status, forbidden.json["error"]["type"]) == (403, "permission_error")
