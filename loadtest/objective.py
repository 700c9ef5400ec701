"""The objective of a load test: what a request must keep to, to count as good.

Written as in "TTFT <= 300 ms, gap <= 50 ms": measures with their greatest value, in ms or s. `TTFT` is the time to the
first token, `gap` the longest time between two messages of the stream, `whole` the whole request, `cancel` how long the
server worked on after a cancel. A measure that a request does not have, such as the gap of a tensor call, is kept. A
request that failed is never good.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

MEASURES = ("ttft", "gap", "whole", "cancel")
_TERM = re.compile(r"\s*(?P<measure>[a-z]+)\s*(<=|≤|<)\s*(?P<value>\d+(\.\d+)?)\s*(?P<unit>ms|s)\s*", re.IGNORECASE)
_MILLISECONDS = {"ms": 1.0, "s": 1000.0}


@dataclass(frozen=True)
class Objective:
    """Greatest values in milliseconds, by measure."""

    limits: Mapping[str, float]

    def met(self, values: Mapping[str, float | None]) -> bool:
        """Whether the values of a request (milliseconds, None where it has none) keep to every limit."""
        return all((value := values.get(measure)) is None or value <= limit for measure, limit in self.limits.items())

    def __str__(self) -> str:
        names = {"ttft": "TTFT"}
        return ", ".join(f"{names.get(measure, measure)} <= {limit:g} ms" for measure, limit in self.limits.items())


def parse_objective(text: str) -> Objective:
    """The objective of a text; of an empty one, which every request that succeeds meets. Raises ValueError."""
    limits: dict[str, float] = {}
    for term in text.split(",") if text.strip() else ():
        match = _TERM.fullmatch(term)
        if match is None or (measure := match["measure"].lower()) not in MEASURES:
            raise ValueError(
                f"objective: {term.strip()!r} is not like 'TTFT <= 300 ms' ({', '.join(MEASURES)}; ms or s)"
            )
        limits[measure] = float(match["value"]) * _MILLISECONDS[match["unit"].lower()]
    return Objective(limits)
