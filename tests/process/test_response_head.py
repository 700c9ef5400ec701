"""Every answer to a client with limits has their rest, however the call ends; other clients get no such metadata."""

from contextlib import suppress

import grpc
import pytest

from headrace.clients import CLIENT, POLICY
from headrace.errors import NotFoundError
from headrace.rpc.limits.admission import Admission, head_of_call
from headrace.rpc.server.server import Server
from headrace.settings import ServiceSettings
from tests.support.listening import listening

LIMITED = ((CLIENT, "alice"), (POLICY, '{"requests_per_minute": 3}'))
OWN = ("x-own", "1")
REMAINING = "x-ratelimit-remaining-requests"


class Answers(grpc.GenericRpcHandler):
    """`/test/unary`, `/test/stream` and `/test/late`, which fails after its first message; "fail" fails at once."""

    def service(self, details):
        async def unary(request, context):
            head_of_call().add(OWN)
            if request == b"fail":
                raise NotFoundError("no")
            return b"done"

        async def stream(request, context):
            head_of_call().add(OWN)
            if request == b"fail":
                raise NotFoundError("no")
            if request == b"nothing":
                return
            yield b"one"
            if details.method == "/test/late":
                raise NotFoundError("no")
            yield b"two"

        if details.method == "/test/unary":
            return grpc.unary_unary_rpc_method_handler(unary)
        return grpc.unary_stream_rpc_method_handler(stream)


@pytest.fixture
async def channel():
    server = Server("test", ServiceSettings.model_construct(drain_s=0.0), admission=Admission())
    server.limits.add(lambda client: (("x-ratelimit-limit-tokens", "9"),) if client.name == "alice" else ())
    server.grpc.add_generic_rpc_handlers((Answers(),))
    async with listening(server.grpc) as address, grpc.aio.insecure_channel(address) as opened:
        yield opened


async def begins_and_ends_with(channel, method, request=b"", metadata=LIMITED):
    """Initial and trailing metadata of a call."""
    make = channel.unary_unary if method == "unary" else channel.unary_stream
    call = make(f"/test/{method}")(request, metadata=metadata)
    initial = dict(await call.initial_metadata())
    with suppress(grpc.aio.AioRpcError):
        _ = await call if method == "unary" else [message async for message in call]
    return initial, dict(await call.trailing_metadata())


@pytest.mark.parametrize(("method", "request_"), [("unary", b""), ("stream", b""), ("stream", b"nothing")])
async def test_the_remaining_limit_is_in_the_initial_metadata(channel, method, request_):
    initial, trailing = await begins_and_ends_with(channel, method, request_)
    assert (
        initial.items()
        >= {
            "x-ratelimit-limit-requests": "3",
            REMAINING: "2",
            "x-ratelimit-reset-requests": "1m1s",
            "x-ratelimit-limit-tokens": "9",
            "x-own": "1",
        }.items()
    )
    assert REMAINING not in trailing


async def test_a_call_that_fails_before_its_first_message_has_it_in_the_trailing_metadata(channel):
    for method, remaining in (("unary", "2"), ("stream", "1")):
        initial, trailing = await begins_and_ends_with(channel, method, b"fail")
        assert (trailing[REMAINING], trailing["x-own"], trailing["x-http-status"]) == (remaining, "1", "404")
        assert REMAINING not in initial
    initial, trailing = await begins_and_ends_with(channel, "late")
    assert (initial[REMAINING], REMAINING in trailing, trailing["x-http-status"]) == ("0", False, "404")


async def test_a_refusal_has_a_remaining_limit_of_zero(channel):
    for _ in range(3):
        await begins_and_ends_with(channel, "unary")
    _, trailing = await begins_and_ends_with(channel, "stream")
    assert (trailing[REMAINING], trailing["x-http-status"]) == ("0", "429")
    assert 0 < int(trailing["retry-after-ms"]) <= 61_000


@pytest.mark.parametrize(
    "metadata",
    [(), ((CLIENT, "bob"),), ((CLIENT, "bob"), (POLICY, '{"streams": 4}'))],
    ids=["no client", "free", "streams"],
)
async def test_clients_without_limits_get_no_remaining_limit(channel, metadata):
    initial, trailing = await begins_and_ends_with(channel, "unary", metadata=metadata)
    assert initial["x-own"] == "1"
    assert not [name for name in (*initial, *trailing) if name.startswith("x-ratelimit")]


async def test_a_malformed_policy_is_refused_without_a_remaining_limit(channel):
    metadata = ((CLIENT, "alice"), (POLICY, "{broken"))
    _, trailing = await begins_and_ends_with(channel, "unary", metadata=metadata)
    assert (trailing["x-http-status"], REMAINING in trailing) == ("401", False)
