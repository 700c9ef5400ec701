"""The addresses behind the names of predictors, as the name servers have them now.

A name stands for all its IPv4 addresses or, where it has none, all its IPv6 addresses. A service (`_name._tcp.domain`)
stands for those of the hosts in its SRV records, with their ports. A name that is unknown has none. While the name
servers do not answer, a name keeps the addresses that it had.
"""

import asyncio
import logging
import socket
from collections.abc import Sequence
from functools import partial
from itertools import groupby

from headrace.endpoints import host_and_port, is_address, is_service
from headrace.threads import run_in_daemon_thread

logger = logging.getLogger(__name__)

_WAIT_S = 2.0
_UNKNOWN = (socket.EAI_NONAME, socket.EAI_NODATA, socket.EAI_ADDRFAMILY)


class Resolver:
    """Resolves host:port endpoints and services; owned by the event loop.

    There is one lookup of a name at a time, in a thread of its own: one that hangs delays no other work.
    """

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._endpoints = endpoints
        self._found: dict[str, dict[str, int]] = {}  # The rank of each address by endpoint.
        self._lookups: dict[str, asyncio.Task[None]] = {}
        self._failing: set[str] = set()  # Reported once, until they resolve again.

    async def addresses(self) -> list[str]:
        """Every address with its port, without repetition; within 2 s, the previous ones of a name that is late."""
        if self._endpoints:
            await asyncio.wait({self._lookup(endpoint) for endpoint in self._endpoints}, timeout=_WAIT_S)
        return list(dict.fromkeys(found for endpoint in self._endpoints for found in self._found.get(endpoint, ())))

    def rank(self, address: str) -> int:
        """The order of the priority of its record in a service, 0 for the lowest number; 0 for any other address."""
        return min((found[address] for found in self._found.values() if address in found), default=0)

    async def close(self) -> None:
        """Ends the lookups in progress."""
        lookups = tuple(self._lookups.values())
        for lookup in lookups:
            lookup.cancel()
        await asyncio.gather(*lookups, return_exceptions=True)

    def _lookup(self, endpoint: str) -> asyncio.Task[None]:
        if endpoint not in self._lookups:
            task = self._lookups[endpoint] = asyncio.create_task(self._look_up(endpoint), name=f"resolve-{endpoint}")
            task.add_done_callback(lambda _: self._lookups.pop(endpoint, None))
        return self._lookups[endpoint]

    async def _look_up(self, endpoint: str) -> None:
        try:
            if is_service(endpoint):
                self._found[endpoint] = await _resolve_service(endpoint)
            else:
                self._found[endpoint] = dict.fromkeys(await _resolve(endpoint), 0)
            self._failing.discard(endpoint)
        except OSError as error:
            if endpoint not in self._failing:
                logger.warning("the name in %s cannot be resolved now: %s", endpoint, error)
            self._failing.add(endpoint)


async def _resolve_service(service: str) -> dict[str, int]:
    """Every address of a service with its rank. Raises OSError if no name server answers within 5 s.

    The name servers and search domains are those of /etc/resolv.conf.
    """
    found: dict[str, int] = {}
    ranked = await run_in_daemon_thread(f"resolve-{service}", partial(_look_up_records, service))
    for rank, endpoints in enumerate(ranked):
        for endpoint in endpoints:
            for address in await _resolve(endpoint):
                found.setdefault(address, rank)
    return found


def _look_up_records(service: str) -> list[list[str]]:
    """The host:port of each SRV record (RFC 2782), those of one priority together, the lowest priority number first.

    Weights are not read: the transformer knows the load of each predictor. Empty where there is no such service.
    """
    # Only a stack with a service pays for the import.
    from dns.exception import DNSException
    from dns.resolver import NXDOMAIN, NoAnswer, Resolver

    try:
        answer = Resolver().resolve(service, "SRV", search=True)
    except (NXDOMAIN, NoAnswer):
        return []
    except DNSException as error:
        raise OSError(str(error)) from None
    records = sorted((record.priority, record.target.to_text(omit_final_dot=True), record.port) for record in answer)
    present = [record for record in records if record[1] != "."]  # "." means that the service is not offered.
    return [
        [f"{host}:{port}" for _, host, port in same_priority]
        for _, same_priority in groupby(present, lambda record: record[0])
    ]


async def _resolve(endpoint: str) -> list[str]:
    """Every address behind host:port; empty where the name is unknown. Raises OSError if no name server answers."""
    host, port = host_and_port(endpoint)
    if is_address(host):
        return [endpoint]
    for family, form in ((socket.AF_INET, "{}:{}"), (socket.AF_INET6, "[{}]:{}")):
        look_up = partial(socket.getaddrinfo, host, port, family=family, type=socket.SOCK_STREAM)
        try:
            found = await run_in_daemon_thread(f"resolve-{host}", look_up)
        except socket.gaierror as error:
            if error.errno in _UNKNOWN:
                continue
            raise
        except UnicodeError:  # A name that no resolver takes.
            continue
        return sorted({form.format(socket_address[0], port) for *_, socket_address in found})
    return []
