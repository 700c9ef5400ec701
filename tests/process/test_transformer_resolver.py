"""A name of predictors stands for its present addresses, a service for the hosts and ports of its SRV records.

Both keep what they had while no name server answers.
"""

import asyncio
import json
import socket
import threading
from types import SimpleNamespace

import dns.rcode
import dns.resolver
import pytest
import pytest_asyncio

from headrace_transformer.predictors.discovery import resolver as module
from headrace_transformer.predictors.discovery.resolver import Resolver
from headrace_transformer.routing.gateway_files import list_endpoints
from tests.support.service_records import HOST, SERVICE, ask_at, service_server
from tests.waiting import until


@pytest_asyncio.fixture
async def server(monkeypatch):
    # Restored after the test.
    monkeypatch.setattr(dns.resolver.Resolver, "read_resolv_conf", dns.resolver.Resolver.read_resolv_conf)
    async with service_server() as running:
        ask_at(running.port)
        yield running


@pytest_asyncio.fixture
async def resolver(server):
    resolver = Resolver([SERVICE, "10.0.0.1:9000"])
    yield resolver
    await resolver.close()


async def found(resolver):
    """The addresses of the service with their ranks."""
    addresses = await resolver.addresses()
    assert addresses[-1] == "10.0.0.1:9000"
    assert resolver.rank("10.0.0.1:9000") == 0
    return {address: resolver.rank(address) for address in addresses[:-1]}


async def test_a_service_has_the_hosts_and_ports_of_its_records_as_they_are_now(server, resolver):
    assert await found(resolver) == {}
    server.services[SERVICE] = [(0, HOST, 9100)]
    assert await found(resolver) == {"127.0.0.1:9100": 0}
    server.services[SERVICE].append((0, HOST, 9200))
    assert await found(resolver) == {"127.0.0.1:9100": 0, "127.0.0.1:9200": 0}
    server.services[SERVICE] = [(0, HOST, 9300), (0, "nowhere.invalid", 9400)]
    assert await found(resolver) == {"127.0.0.1:9300": 0}
    for none in ([], [(0, "", 0)]):  # An empty answer; a service that is not offered.
        server.services[SERVICE] = none
        assert await found(resolver) == {}


async def test_an_answer_may_be_longer_than_a_datagram(server, resolver):
    server.services[SERVICE] = [(0, HOST, 9000 + number) for number in range(100)]
    assert await found(resolver) == {f"127.0.0.1:{9000 + number}": 0 for number in range(100)}


async def test_addresses_are_ranked_by_the_priorities_of_their_records(server, resolver):
    server.services[SERVICE] = [
        (20, HOST, 9001),
        (10, HOST, 9002),
        (10, HOST, 9003),
        (30, HOST, 9003),
        (30, HOST, 9004),
    ]
    assert await found(resolver) == {"127.0.0.1:9001": 1, "127.0.0.1:9002": 0, "127.0.0.1:9003": 0, "127.0.0.1:9004": 2}


@pytest.mark.parametrize("is_silent", [True, False])
async def test_while_no_name_server_answers_a_service_keeps_its_addresses(
    server, resolver, monkeypatch, caplog, is_silent
):
    server.services[SERVICE] = [(0, HOST, 9100)]
    assert await found(resolver) == {"127.0.0.1:9100": 0}
    server.services[SERVICE] = [(0, HOST, 9200)]
    if is_silent:
        monkeypatch.setattr(module, "_WAIT_S", 0.1)
        server.is_silent = True
    else:
        server.rcode = dns.rcode.SERVFAIL
    queries = server.queries
    assert await found(resolver) == {"127.0.0.1:9100": 0}
    assert server.queries > queries
    server.is_silent, server.rcode = False, None
    monkeypatch.setattr(module, "_WAIT_S", 10.0)
    if is_silent:
        assert await found(resolver) == {"127.0.0.1:9200": 0}  # The question is asked again.
    else:
        assert "cannot be resolved now" in caplog.text


async def test_the_gateway_s_file_follows_the_addresses_and_keeps_the_last_ones(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace_transformer.routing.gateway_files._INTERVAL_S", 0.01)
    path, links = tmp_path / "predictors.json", SimpleNamespace(listed={})

    def groups():
        if not path.exists():
            return None
        resources = json.loads(path.read_text())["resources"]
        return [
            [tuple(host["endpoint"]["address"]["socket_address"].values()) for host in group["lb_endpoints"]]
            for resource in resources
            for group in resource["endpoints"]
        ]

    async def has(expected):
        return groups() == expected

    writing = asyncio.create_task(list_endpoints(path, links))
    try:
        await until(lambda: has([]))
        # Envoy's priorities have no gaps.
        links.listed = {"127.0.0.1:9002": 3, "[::1]:9001": 0, "127.0.0.1:9000": 0}
        expected = [[("127.0.0.1", 9000), ("::1", 9001)], [("127.0.0.1", 9002)]]
        await until(lambda: has(expected))
        links.listed = {}
        await asyncio.sleep(0.05)
        assert groups() == expected
        links.listed = {"127.0.0.1:9009": 0}
        await until(lambda: has([[("127.0.0.1", 9009)]]))
        # The runner restores a removed run folder.
        path.unlink()
        await until(lambda: has([[("127.0.0.1", 9009)]]))
        path.write_text('{"resources": []}')
        await until(lambda: has([[("127.0.0.1", 9009)]]))
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


class Names:
    """A name service: addresses by name and family; a name in `failing` has no answer, one in `late` waits for it."""

    def __init__(self):
        self.known, self.failing, self.late, self.asked = {}, set(), {}, []

    def getaddrinfo(self, host, port, *, family, type):
        self.asked.append(host)
        if host in self.late:
            self.late[host].wait(20)
        if host in self.failing:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        found = self.known.get((host, family), ())
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(family, type, 6, "", (address, port)) for address in found]


@pytest.fixture
def names(monkeypatch):
    made = Names()
    monkeypatch.setattr(socket, "getaddrinfo", made.getaddrinfo)
    return made


async def test_a_name_has_all_its_ipv4_addresses_or_else_its_ipv6_addresses(names):
    names.known = {
        ("both", socket.AF_INET): ["10.0.0.2", "10.0.0.1"],
        ("both", socket.AF_INET6): ["2001:db8::1"],
        ("six", socket.AF_INET6): ["2001:db8::2"],
    }
    resolver = Resolver(["both:9000", "six:9001", "unknown:9000", "10.0.0.1:9000", "[2001:db8::3]:9000"])
    addresses = ["10.0.0.1:9000", "10.0.0.2:9000", "[2001:db8::2]:9001", "[2001:db8::3]:9000"]
    assert await resolver.addresses() == addresses
    assert set(names.asked) == {"both", "six", "unknown"}
    names.known["both", socket.AF_INET] = ["10.0.0.3"]
    del names.known["six", socket.AF_INET6]
    assert await resolver.addresses() == ["10.0.0.3:9000", "10.0.0.1:9000", "[2001:db8::3]:9000"]
    await resolver.close()


async def test_while_no_name_server_answers_a_name_keeps_its_addresses(names, caplog):
    names.known = {("a", socket.AF_INET): ["10.0.0.1"]}
    resolver = Resolver(["a:9000"])
    assert await resolver.addresses() == ["10.0.0.1:9000"]
    names.failing.add("a")
    for _ in range(3):
        assert await resolver.addresses() == ["10.0.0.1:9000"]
    assert caplog.text.count("cannot be resolved now") == 1
    names.failing.clear()
    names.known = {("a", socket.AF_INET): ["10.0.0.2"]}
    assert await resolver.addresses() == ["10.0.0.2:9000"]
    await resolver.close()


async def test_a_name_that_hangs_delays_no_other_for_long_and_is_asked_once_at_a_time(names, monkeypatch):
    monkeypatch.setattr(module, "_WAIT_S", 0.1)
    names.known = {("good", socket.AF_INET): ["10.0.0.1"], ("late", socket.AF_INET): ["10.0.0.2"]}
    names.late["late"] = threading.Event()
    resolver = Resolver(["late:9000", "good:9000"])
    for _ in range(3):
        assert await resolver.addresses() == ["10.0.0.1:9000"]
    assert names.asked.count("late") == 1
    names.late["late"].set()
    monkeypatch.setattr(module, "_WAIT_S", 10.0)
    assert await resolver.addresses() == ["10.0.0.2:9000", "10.0.0.1:9000"]
    await resolver.close()
