"""What the predictors say of themselves while load is on them: sequences that run and wait, KV cache in use.

Read from their Prometheus pages, once a second; a page that does not answer is left out. Without pages (in containers
Locust has no way to the predictors) there is nothing.
"""

from __future__ import annotations

import http.client
import re
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

import gevent

from loadtest.options import AUTOMATIC

INTERVAL_S = 1.0
_TIMEOUT_S = 1.0
_KEPT = 900
_FIRST_PORT, _PORTS_APART, _PAGES = 9100, 10, 8
_SAMPLE = re.compile(
    r"^millrace_(sequences_running|sequences_waiting|kv_cache_utilization)(?:_ratio)?(?:\{[^}]*\})? (\S+)"
)


class State(NamedTuple):
    """Of one predictor; over its models, the cache of the fullest, 0 to 1."""

    running: float
    waiting: float
    cache: float


@dataclass(frozen=True)
class Reading:
    """Of all predictors in one second of the clock."""

    second: int
    states: dict[str, State]


def page_addresses(option: str) -> list[str]:
    """The pages of an option: a comma list, or those of this machine's stack."""
    if option.strip() == AUTOMATIC:
        ports = range(_FIRST_PORT, _FIRST_PORT + _PAGES * _PORTS_APART, _PORTS_APART)
        return [f"http://127.0.0.1:{port}/metrics" for port in ports]
    return [address.strip() for address in option.split(",") if address.strip()]


class PredictorPages:
    """Reads the pages while a test runs; `history` is bounded."""

    def __init__(self, addresses: list[str]) -> None:
        self._addresses = addresses
        self.history: deque[Reading] = deque(maxlen=_KEPT)

    def watch(self, second: int) -> None:
        """Reads every page once, side by side."""
        jobs = {address: gevent.spawn(_read, address) for address in self._addresses}
        gevent.joinall(list(jobs.values()), timeout=2 * _TIMEOUT_S)
        states = {urlsplit(address).netloc: job.value for address, job in jobs.items() if job.value is not None}
        if states:
            self.history.append(Reading(second, states))


def _read(address: str) -> State | None:
    url = urlsplit(address)
    connection = http.client.HTTPConnection(url.netloc, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", url.path or "/metrics")
        response = connection.getresponse()
        text = response.read().decode()
    except (OSError, http.client.HTTPException, UnicodeDecodeError):
        return None
    finally:
        connection.close()
    return parse_page(text) if response.status == http.client.OK else None


def parse_page(text: str) -> State:
    """The state that a page shows."""
    values: dict[str, list[float]] = {}
    for line in text.splitlines():
        if match := _SAMPLE.match(line):
            values.setdefault(match[1], []).append(float(match[2]))
    return State(
        sum(values.get("sequences_running", ())),
        sum(values.get("sequences_waiting", ())),
        max(values.get("kv_cache_utilization", ()), default=0.0),
    )
