"""The HTTP/2 server: calls with gRPC's semantics, start and stop."""

import asyncio
import json

import pytest
from h2.errors import ErrorCodes

from headrace.errors import StartupError
from headrace.rpc.server.listeners import reserved
from tests.process.http2_service import COUNT, ECHO, FAIL, HANG, HOST, KIB, NAME, Served, served
from tests.support.http2_client import connected
from tests.waiting import until

__all__ = ["served"]  # A fixture.


# ------------------------------------------------------------------ calls


@pytest.mark.parametrize(
    ("path", "named"),
    [("/a%20b%2Fc", "a b/c"), ("/%ff", "\ufffd"), ("?model=d+e&x=1", "d e"), ("/one?model=two", "one"), ("", "")],
)
async def test_a_method_without_a_body_gets_the_argument_of_its_path_or_query(
    served: Served, path: str, named: str
) -> None:
    async with connected(served.port) as client:
        stream = await (await client.request(NAME + path, verb="GET")).wait()
    assert (stream.status, stream.data.decode()) == (200, named)


async def test_an_error_before_the_first_byte_is_the_answer_and_a_later_one_is_in_the_trailers(served: Served) -> None:
    async with connected(served.port) as client:
        first = await (await client.request(FAIL)).wait()
        later = await (await client.request(FAIL, b"begun")).wait()
    assert first.status == 429
    assert json.loads(first.data)["error"] == {
        "message": "full",
        "type": "rate_limit_error",
        "code": "rate_limit_exceeded",
        "param": None,
    }
    assert (first.headers["x-failed-hop"], first.headers["retry-after-ms"]) == ("transformer", "20")
    assert "x-http-status" not in first.headers
    assert (later.status, later.data, later.reset_with) == (200, b"begun", None)
    assert (later.trailers["grpc-status"], later.trailers["x-failed-hop"]) == ("8", "transformer")


# ------------------------------------------------------------------ start and stop


async def test_a_stop_lets_calls_end_and_accepts_no_new_connection(served: Served) -> None:
    body = json.dumps({"pieces": 100, "size": KIB}).encode()
    async with connected(served.port, window=10 * KIB, reads=False) as client:
        running = await client.request(COUNT, body)
        await until(lambda: len(running.data) == 10 * KIB)
        stopping = asyncio.create_task(served.server.stop(30))
        await until(lambda: len(client.gone_away) == 2)
        assert client.gone_away == [2**31 - 1, running.number]
        with pytest.raises(ConnectionError):
            await asyncio.open_connection(HOST, served.port)
        late = await (await client.request(ECHO, b"late")).wait()
        assert late.reset_with == ErrorCodes.REFUSED_STREAM
        assert not stopping.done()
        while not running.is_ended:
            await running.read_on()
            before = len(running.data)
            await running.wait(lambda before=before: len(running.data) > before)
        assert len(running.data) == 100 * KIB
        await client.closed()
        await stopping


async def test_a_call_that_outlasts_the_grace_period_ends_with_the_error_that_the_service_stops(served: Served) -> None:
    async with connected(served.port) as client:
        silent, begun = await client.request(HANG), await client.request(HANG, b"begun")
        await until(lambda: served.service.hanging == 2)
        await served.server.stop(0.1)
        await client.closed()
    assert (silent.status, json.loads(silent.data)["error"]["message"]) == (503, "the service stops")
    assert begun.trailers["x-http-status"] == "503"
    assert served.service.ended == 2


async def test_a_second_stop_shortens_the_first(served: Served) -> None:
    async with connected(served.port) as client:
        await client.request(HANG, b"begun")
        await until(lambda: served.service.hanging == 1)
        patient = asyncio.create_task(served.server.stop(1000))
        await served.server.stop(0.1)
        await patient


async def test_two_servers_share_a_port_and_one_that_does_not_share_is_refused() -> None:
    with reserved(HOST, 0) as port:
        servers = [await Served(shares_port=True).start(port) for _ in range(2)]
        served = set()
        for number in range(64):
            async with connected(port) as client:
                assert (await (await client.request(ECHO, b"x")).wait()).status == 200
                await client.request(HANG, b"x")
                served |= {one for one in servers if one.service.hanging}
            if len(served) == 2:
                break
            assert number < 63
        with pytest.raises(StartupError, match="is the port taken"):
            await Served().start(port)
        for one in servers:
            await one.server.stop(0)
