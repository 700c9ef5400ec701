"""Lists of endpoints in settings, and calls of them by HTTP.

An endpoint is host:port, with a name, an IPv4 address or an IPv6 address in brackets, or a service:
`_name._tcp.domain` without a port, as RFC 2782 has it, whose SRV records have the hosts and ports.
"""

import ipaddress
import re
import urllib.request

# HTTP inside the stack, whatever proxy the environment names.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

_ENDPOINT = re.compile(r"([A-Za-z0-9_]([A-Za-z0-9._-]{0,252}[A-Za-z0-9_.])?|\[[0-9A-Fa-f:.]+\]):([1-9][0-9]{0,4})")
_SERVICE = re.compile(
    r"_[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\._tcp\.[a-z0-9_]([a-z0-9._-]{0,180}[a-z0-9_.])?", re.IGNORECASE
)
_MAX_PORT = 65535
_STEPS_PORT = 4  # After the one of gRPC.


def parse_endpoints(text: str) -> tuple[str, ...]:
    """The items of a comma list in lower case, blanks and empty items left out.

    Raises ValueError with the first item that is malformed or there twice.
    """
    endpoints: list[str] = []
    for item in filter(None, map(str.strip, text.split(","))):
        endpoint = _checked(item).lower()
        if endpoint in endpoints:
            raise ValueError(f"{item!r} is there twice")
        endpoints.append(endpoint)
    return tuple(endpoints)


def host_and_port(endpoint: str) -> tuple[str, int]:
    """The parts of an endpoint, an IPv6 address without its brackets."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def steps_port(port: int) -> int:
    """The port of a predictor's generations; `port` is its port of gRPC."""
    return port + _STEPS_PORT


def is_service(endpoint: str) -> bool:
    """Whether an endpoint is a service, which has no port of its own."""
    return _SERVICE.fullmatch(endpoint) is not None


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _checked(item: str) -> str:
    if is_service(item):
        return item
    if (found := _ENDPOINT.fullmatch(item)) is None or int(found[3]) > _MAX_PORT:
        raise ValueError(f"{item!r} is not host:port")
    host = found[1]
    # A name's last part is never a number, so this is meant to be an address.
    if (host.startswith("[") or host.rpartition(".")[2].isdecimal()) and not is_address(host.strip("[]")):
        raise ValueError(f"{item!r} is not host:port: {host} is no address")
    return item
