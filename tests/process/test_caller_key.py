"""Programs that call a gateway send the environment's key, if there is one, with every kind of call."""

import asyncio

import grpc
import pytest

from headrace.rpc.client.caller_key import headers, with_key
from tests.support.listening import listening

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Echo(grpc.GenericRpcHandler):
    """Answers every call with its `authorization` metadata."""

    def service(self, details):
        kind = details.method.removeprefix("/echo/")
        own = dict(details.invocation_metadata).get("authorization", "none").encode()

        async def one(request, context):
            return own

        async def several(request, context):
            yield own

        answer = several if kind.endswith("stream") else one
        return getattr(grpc, f"{kind}_rpc_method_handler")(answer)


@pytest.fixture
async def target():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Echo(),))
    async with listening(server) as address:
        yield address


@pytest.mark.parametrize(("key", "expected"), [("k", b"Bearer k"), (" k\n", b"Bearer k"), ("", b"none")])
@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_call_has_the_key(target, monkeypatch, kind, key, expected):
    monkeypatch.setenv("HEADRACE_KEY", key)
    takes_stream, gives_stream = kind.startswith("stream"), kind.endswith("stream")

    def call_with_threads():
        with with_key(grpc.insecure_channel(target)) as channel:
            method = getattr(channel, kind)(f"/echo/{kind}")
            answer = method(iter([b""]) if takes_stream else b"", metadata=(("x-own", "1"),))
            return next(answer) if gives_stream else answer

    assert await asyncio.to_thread(call_with_threads) == expected


def test_http_has_the_key_too(monkeypatch):
    monkeypatch.setenv("HEADRACE_KEY", "k")
    assert headers() == {"authorization": "Bearer k"}
    monkeypatch.delenv("HEADRACE_KEY")
    assert headers() == {}
