"""OpenAI's API through the real Envoy by HTTP/2: streams, slow and leaving readers, and their effect on others."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.process.gateway_before_fakes import OPENAI, Gateway, running_gateway
from tests.waiting import until

MIB = 1 << 20
LEAVING = 1000
AT_ONCE = 50


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path_factory.mktemp("http")) as running:
        yield running


def begin(gateway: Gateway, **fields: int | bool) -> socket.socket:
    """A request whose answer is not read yet, by a client with small buffers."""
    host, _, port = gateway.address.rpartition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
    client.settimeout(30)
    client.connect((host, int(port)))
    body = json.dumps(fields).encode()
    head = f"POST {OPENAI} HTTP/1.1\r\nhost: {gateway.address}\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


async def test_a_slow_reader_stops_only_its_own_stream_and_one_that_leaves_ends_it(gateway: Gateway) -> None:
    openai = gateway.openai
    before = openai.written
    client = await asyncio.to_thread(begin, gateway, pieces=1_000_000, size=1000)
    await until(lambda: openai.running == 1)
    written = -1

    async def stands() -> bool:
        nonlocal written
        last, written = written, openai.written
        await asyncio.sleep(0.3)
        return last == written == openai.written

    await until(stands)
    assert written - before < 8 * MIB, "buffers of the gateway and the kernel, and no more"
    assert (await gateway.post(pieces=10, size=1000)).body == b"x" * 10_000
    client.close()
    await until(lambda: openai.running == 0)


async def test_64_streams_are_written_side_by_side_and_each_has_all_of_its_own(gateway: Gateway) -> None:
    answers = await asyncio.gather(*(gateway.post(pieces=50, size=100 + number) for number in range(64)))
    assert [len(answer.body) for answer in answers] == [50 * (100 + number) for number in range(64)]
    assert {answer.status for answer in answers} == {200}


async def test_callers_that_leave_end_no_other_stream_of_the_connection(gateway: Gateway) -> None:
    gateway.openai.first_chunk_was_read.clear()
    others = [await asyncio.to_thread(begin, gateway, stream=True) for _ in range(8)]
    turns = asyncio.Semaphore(AT_ONCE)

    async def leave(number: int) -> None:
        async with turns:
            client = await asyncio.to_thread(begin, gateway, pieces=1_000_000, size=1000)
            await asyncio.sleep(0.005 * (number % 4))
            client.close()

    await asyncio.gather(*(leave(number) for number in range(LEAVING)))
    await until(lambda: gateway.openai.running == 0)
    gateway.openai.first_chunk_was_read.set()

    def rest(client: socket.socket) -> bytes:
        received = b""
        while not received.endswith(b"0\r\n\r\n") and (data := client.recv(65536)):
            received += data
        client.close()
        return received

    for client in others:
        assert b"data: [DONE]" in await asyncio.to_thread(rest, client)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_another_method_is_an_unknown_path(gateway: Gateway, method: str) -> None:
    answer = await gateway.request(method, OPENAI)
    assert (answer.status, answer.json["error"]["message"]) == (404, "unknown path or method")
    assert answer.headers["x-failed-hop"] == "gateway"


async def test_the_inner_path_of_a_method_is_an_unknown_path(gateway: Gateway) -> None:
    answer = await gateway.request("POST", "/headrace.rest.v1.OpenAI/Completions", b"{}")
    assert (answer.status, answer.headers["x-failed-hop"]) == (404, "gateway")


async def test_a_slow_body_reaches_the_service_when_it_is_complete(gateway: Gateway) -> None:
    host, _, port = gateway.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"pieces": 1, "size": 3, "padding": "x" * 100_000}).encode()
    writer.write(f"POST {OPENAI} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body[:-1])
    await writer.drain()
    assert (await gateway.post(pieces=1, size=1)).body == b"x"  # The first body has arrived by now, except its end.
    assert gateway.openai.running == 0
    written = gateway.openai.written
    writer.write(body[-1:])
    assert b"200 OK" in await reader.readline()
    assert gateway.openai.written == written + 3
    writer.close()


async def test_a_body_beyond_60_mib_is_refused_by_the_gateway_and_one_of_60_is_not(gateway: Gateway) -> None:
    body = json.dumps({"pieces": 1, "size": 1}).encode()
    answer = await gateway.request("POST", OPENAI, body.ljust(60 * MIB))
    assert (answer.status, answer.body) == (200, b"x")
    answer = await gateway.request("POST", OPENAI, body.ljust(60 * MIB + 1))
    assert (answer.status, answer.headers["x-failed-hop"]) == (413, "gateway")
    assert answer.json["error"]["message"] == "the body is larger than 60 MiB"


async def exchange(gateway: Gateway, *requests: bytes) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The status lines and headers of answers to requests on one connection; those to HEAD have no body."""
    host, _, port = gateway.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answers = []
    try:
        async with asyncio.timeout(20):
            for request in requests:
                writer.write(request)
                status, *lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
                headers = dict(line.lower().split(b": ", 1) for line in lines if line)
                answers.append((status, headers))
                if request.startswith(b"HEAD"):
                    continue
                if headers.get(b"transfer-encoding") == b"chunked":
                    await reader.readuntil(b"\r\n0\r\n\r\n")
                else:
                    await reader.readexactly(int(headers[b"content-length"]))
    finally:
        writer.close()
        await writer.wait_closed()
    return answers


@pytest.mark.parametrize("path", ["/", "/playground/main.js", "/v2/health/ready", "/v1/models", "/health", "/nothing"])
async def test_head_has_the_status_of_get_and_no_body(gateway: Gateway, path: str) -> None:
    requests = [f"{method} {path} HTTP/1.1\r\nhost: a\r\n\r\n".encode() for method in ("GET", "HEAD", "HEAD", "GET")]
    answers = await exchange(gateway, *requests)
    assert len({status for status, _ in answers}) == 1
    assert {headers.get(b"x-failed-hop") for _, headers in answers} == {answers[0][1].get(b"x-failed-hop")}


async def test_http_1_0_is_answered_and_closes_unless_asked_to_stay(gateway: Gateway) -> None:
    page = b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n"
    assert [status for status, _ in await exchange(gateway, page, page)] == [b"HTTP/1.0 200 OK"] * 2
    host, _, port = gateway.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    stream = json.dumps({"pieces": 3, "size": 10}).encode()
    writer.write(b"POST %s HTTP/1.0\r\ncontent-length: %d\r\n\r\n%s" % (OPENAI.encode(), len(stream), stream))
    async with asyncio.timeout(20):
        head, _, received = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert (head.split(b"\r\n")[0], received) == (b"HTTP/1.0 200 OK", b"x" * 30)


@pytest.mark.parametrize(
    "path",
    ["/v1/completions/", "//v1//completions", "/openai/v1/completions/", "/v1/completions/?a=b", "/v1/./completions"],
)
async def test_slashes_that_say_nothing_do_not_matter(gateway: Gateway, path: str) -> None:
    answer = await gateway.request("POST", path, json.dumps({"answer": {"is": "whole"}}).encode() + b" " * MIB)
    assert (answer.status, answer.json) == (200, {"is": "whole"})
    assert (await gateway.request("GET", "//v2/health/ready/")).json["error"] == 'model "a" is loading'
    assert (await gateway.request("GET", "//")).status == 200
