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
        sent = {"x-api-key": "hr-unknown", "x-request-id": "mine"}
        refused = await rest(stack.gateway, "POST", path, body, **sent)
        assert (refused.status, refused.json["error"]["type"]) == (401, "authentication_error")
        assert (refused.json["request_id"], refused.headers["request-id"]) == ("mine", "mine")
        forbidden = await rest(stack.gateway, "POST", path, body | {"model": "acme/normalizer"}, **bearer("alice"))
        assert (forbidden.status, forbidden.json["error"]["type"]) == (403, "permission_error")


async def test_models_have_the_shape_of_the_api_whose_headers_a_request_has(keyed):
    stack, _ = keyed
    for headers in ({"x-api-key": KEYS["alice"]}, bearer("alice") | {"anthropic-version": "2023-06-01"}):
        (model,) = (await rest(stack.gateway, "GET", "/v1/models?limit=5", None, **headers)).json["data"]
        assert (model["type"], model["id"], model["lifecycle"]) == ("model", MODEL, "active")
        found = await rest(stack.gateway, "GET", f"/v1/models/{MODEL}", None, **headers)
        assert found.json == model
        refused = await rest(stack.gateway, "GET", "/v1/models/acme/normalizer", None, **headers)
        assert (refused.status, refused.json["error"]["type"]) == (403, "permission_error")
    unknown = await rest(stack.gateway, "GET", "/v1/models", None, **{"x-api-key": "hr-unknown"})
    assert (unknown.status, unknown.json["type"]) == (401, "error")
    (model,) = (await rest(stack.gateway, "GET", "/v1/models", None, **bearer("alice"))).json["data"]
    assert (model["object"], model["id"]) == ("model", MODEL)


async def test_without_keys_the_version_alone_has_anthropics_shape(stack):
    for headers, kind in (({"x-api-key": "any"}, "object"), ({"anthropic-version": "2023-06-01"}, "type")):
        models = (await rest(stack.gateway, "GET", "/v1/models", None, **headers)).json["data"]
        assert {model.get(kind) for model in models} == {"model"}


async def test_ids_of_requests_are_in_errors_and_counted_tokens_name_what_is_ignored(stack):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Once"}], "thinking": {"type": "enabled"}}
    counted = await rest(stack.gateway, "POST", "/v1/messages/count_tokens", body | {"context_management": {"a": 1}})
    assert set(counted.headers["x-ignored-fields"].split(", ")) == {"context_management", "thinking"}
    refused = await rest(stack.gateway, "POST", "/v1/messages", body, **{"x-request-id": "mine"})
    assert (refused.status, refused.json["request_id"], refused.headers["request-id"]) == (400, "mine", "mine")
