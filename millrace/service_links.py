"""Kubernetes' service links: variables that every container of a namespace is given for each of its services.

A service named `predictor` brings `PREDICTOR_PORT=tcp://10.0.0.1:9000`, `PREDICTOR_SERVICE_HOST=10.0.0.1` and more,
which are no settings of ours although they begin, or are named, like some. Name and value together identify them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, MutableMapping

_PROTOCOL = "tcp|udp|sctp"
_URL = re.compile(rf"({_PROTOCOL})://(\[[0-9A-Fa-f:.]+\]|[0-9.]+):\d{{1,5}}")
_NUMBER = re.compile(r"\d{1,5}")
_NAMED_PORT = re.compile(rf"PORT_\d{{1,5}}_({_PROTOCOL.upper()})(?P<part>|_PROTO|_PORT|_ADDR)")
_SERVICE_PORT = re.compile(r"SERVICE_PORT(_[A-Z0-9_]+)?")


def drop_service_links(environment: MutableMapping[str, str], prefix: str) -> None:
    """Takes the links of services whose name begins like `prefix` (`PREDICTOR_`) out of an environment."""
    for name in links_of(environment, prefix):
        del environment[name]


def links_of(environment: Mapping[str, str], prefix: str) -> Iterable[str]:
    """Their names."""
    return [name for name, value in environment.items() if name.startswith(prefix) and _is_link(name, value, prefix)]


def _is_link(name: str, value: str, prefix: str) -> bool:
    # A service may be named `predictor-gpu`: then that much more stands before the fixed part.
    words = name.removeprefix(prefix).split("_")
    return any(_is_part("_".join(words[i:]), value) for i in range(len(words)))


def _is_part(part: str, value: str) -> bool:
    if part == "PORT":
        return bool(_URL.fullmatch(value))
    if part == "SERVICE_HOST":
        return _is_address(value)
    if _SERVICE_PORT.fullmatch(part):
        return bool(_NUMBER.fullmatch(value))
    named = _NAMED_PORT.fullmatch(part)
    if named is None:
        return False
    return {
        "": lambda: bool(_URL.fullmatch(value)),
        "_PROTO": lambda: value in _PROTOCOL.split("|"),
        "_PORT": lambda: bool(_NUMBER.fullmatch(value)),
        "_ADDR": lambda: _is_address(value),
    }[named["part"]]()


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True
