"""A name of predictors stands for its present addresses, and keeps them while no name server answers."""

import socket
import threading

import pytest

from headrace_transformer.predictors.discovery import resolver as module
from headrace_transformer.predictors.discovery.resolver import Resolver


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
