"""Which web pages may call: those of the gateway and of the allowed origins, under a host name that is not foreign.

A page of another origin can send a form or `text/plain` without a preflight request. A page whose host name was
pointed at this machine (DNS rebinding) has the gateway's own origin; only the host name distinguishes it.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.process.gateway_before_fakes import HOST, METADATA, OPENAI, ORIGIN, V2, Gateway, running_gateway

# What a browser sends without an origin; the last by a page that hides what it can.
BROWSER: list[dict[str, str]] = [
    {"user_agent": "Mozilla/5.0 (X11; Linux x86_64) Gecko/20100101 Firefox/140.0", "accept_language": "en"},
    {"sec_fetch_mode": "cors"},
    {"sec_fetch_site": "same-origin"},
    {"cookie": "a=b"},
    {"referer": "http://evil.example/"},
    {"user_agent": "curl/8.5.0", "accept_language": ""},
]
GRPC, GRPC_WEB, REST, FORM = "application/grpc", "application/grpc-web+proto", "application/json", "text/plain"
REQUESTS = [(METADATA, GRPC), (METADATA, GRPC_WEB), (OPENAI, REST), (OPENAI, FORM)]


@pytest_asyncio.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path_factory.mktemp("gateway")) as running:
        yield running


async def call(
    gateway: Gateway, path: str, content_type: str, host: str, *origins: str, **others: str
) -> tuple[str, str]:
    """The status of an answer, gRPC's if it has one, and the hop that failed, if any; `others` are headers."""

    def send() -> tuple[str, str]:
        connection = http.client.HTTPConnection(gateway.address, timeout=30)
        try:
            body = bytes(5) if content_type.startswith(GRPC) else b"{}"
            connection.putrequest("POST", path, skip_host=True)
            for name, value in (("host", host), ("content-type", content_type), ("content-length", str(len(body)))):
                connection.putheader(name, value)
            for origin in origins:
                connection.putheader("origin", origin)
            for name, value in others.items():
                connection.putheader(name.replace("_", "-"), value)
            connection.endheaders(body)
            response = connection.getresponse()
            answer = response.read()
            found = {name.lower(): value for name, value in response.getheaders()}
            status = found.get("grpc-status", "") if content_type.startswith(GRPC) else str(response.status)
            if not status:  # gRPC's status is in the trailers, which gRPC-Web writes into the body.
                status = "0" if b"grpc-status:0" in answer or content_type == GRPC else "?"
            return status, found.get("x-failed-hop", "")
        finally:
            connection.close()

    return await asyncio.to_thread(send)


def refused(content_type: str) -> tuple[str, str]:
    return ("7" if content_type.startswith(GRPC) else "403"), "gateway"


def served(content_type: str) -> tuple[str, str]:
    return ("0" if content_type.startswith(GRPC) else "200"), ""


@pytest.mark.parametrize(("path", "content_type"), REQUESTS)
async def test_a_page_of_another_origin_is_refused(gateway: Gateway, path: str, content_type: str) -> None:
    port = gateway.address.partition(":")[2]
    others = [
        "http://evil.example",
        "null",
        "",
        f"http://127.0.0.1:{int(port) + 1}",
        "http://127.0.0.1",
        ORIGIN + ".evil",
    ]
    for origin in others:
        assert await call(gateway, path, content_type, gateway.address, origin) == refused(content_type), origin
    # The first of two is allowed.
    assert await call(gateway, path, content_type, gateway.address, ORIGIN, others[0]) == refused(content_type)


@pytest.mark.parametrize(("path", "content_type"), REQUESTS)
async def test_the_gateway_s_own_page_and_allowed_ones_are_served(
    gateway: Gateway, path: str, content_type: str
) -> None:
    own = f"http://{gateway.address}"
    for host, origins in (
        (gateway.address, ()),
        (gateway.address, (own,)),
        (gateway.address, (ORIGIN,)),
        (gateway.address, (ORIGIN.upper(),)),
        (HOST, (f"https://{HOST}",)),  # A proxy before the gateway ends TLS.
        (HOST.upper(), (f"https://{HOST}",)),
    ):
        assert await call(gateway, path, content_type, host, *origins) == served(content_type), (host, origins)


@pytest.mark.parametrize(("path", "content_type"), REQUESTS)
async def test_a_host_name_that_may_be_foreign_is_refused_and_others_are_served(
    gateway: Gateway, path: str, content_type: str
) -> None:
    for host in (
        "isvc.ns.example.com",
        "evil.example",
        "evil.example:8080",
        "127.0.0.1.evil.example",
        "localhost.",
        f"{HOST}.evil",
        "1.2.3.4.5",
    ):
        # The page's origin is that of its name, which a browser does not send where the page reads.
        assert await call(gateway, path, content_type, host, f"http://{host}") == refused(content_type), host
        for header in BROWSER:
            assert await call(gateway, path, content_type, host, **header) == refused(content_type), (host, header)
        # What is no browser calls by any name, as a test of an ingress does.
        assert await call(gateway, path, content_type, host, user_agent="curl/8.5.0") == served(content_type), host
    for host in (
        "localhost",
        "localhost:1",
        "a.localhost",
        "host.docker.internal:8080",
        "envoy:8080",
        "[::1]:8080",
        "[::1]",
        "10.0.0.1",
        HOST,
        f"{HOST}:9",
    ):
        assert await call(gateway, path, content_type, host, **BROWSER[0]) == served(content_type), host


async def test_reading_calls_are_refused_too_with_advice(gateway: Gateway) -> None:
    for path in ("/", V2, "/headrace/v1/payloads", "/nothing"):
        answer = await gateway.request("GET", path, host="evil.example", user_agent="Mozilla/5.0")
        assert (answer.status, answer.headers["x-failed-hop"]) == (403, "gateway"), path
        assert "GATEWAY_HOSTS" in answer.json["error"]
    page = await gateway.request("POST", OPENAI, b"{}", origin="http://evil.example")
    assert page.json["error"]["type"] == "permission_error"
    assert "GATEWAY_ALLOWED_ORIGINS" in page.json["error"]["message"]
