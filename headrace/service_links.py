"""Kubernetes' service links: variables that every container of a namespace is given for each of its services.

A service named `predictor` brings `PREDICTOR_PORT=tcp://10.0.0.1:9000`, `PREDICTOR_SERVICE_HOST=10.0.0.1` and more,
which are no settings of ours although they begin, or are named, like some. Name and value together identify them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import MutableMapping


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True


_NUMBER = r"\d{1,5}"
_PROTOCOL = "tcp|udp|sctp"
_URL = rf"({_PROTOCOL})://(\[[0-9A-Fa-f:.]+\]|[0-9.]+):{_NUMBER}"
_NAMED_PORT = rf"PORT_{_NUMBER}_({_PROTOCOL.upper()})"
# The end of a link's name, and the test of its value. A service named `predictor-gpu` has a longer name before the end.
_LINKS = tuple(
    (re.compile(rf"(.*_)?({end})").fullmatch, is_value)
    for end, is_value in (
        (rf"PORT|{_NAMED_PORT}", re.compile(_URL).fullmatch),
        (rf"{_NAMED_PORT}_PROTO", re.compile(_PROTOCOL).fullmatch),
        (rf"{_NAMED_PORT}_PORT|SERVICE_PORT(_[A-Z0-9_]+)?", re.compile(_NUMBER).fullmatch),
        (rf"{_NAMED_PORT}_ADDR|SERVICE_HOST", _is_address),
    )
)


def drop_service_links(environment: MutableMapping[str, str], prefix: str) -> None:
    """Takes the links of services whose name begins like `prefix` (`PREDICTOR_`) out of an environment."""
    for variable, value in list(environment.items()):
        rest = variable.removeprefix(prefix)
        if rest != variable and any(is_name(rest) and is_value(value) for is_name, is_value in _LINKS):
            del environment[variable]
