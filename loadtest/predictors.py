"""What the predictors report while load is on them: sequences that run and wait, KV cache in use.

Read once a second from the gateway under test, so it is there wherever Locust runs. A predictor that is not ready is
left out, and so is a second in which the gateway did not answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from loadtest.gateway import Gateway, GatewayError

INTERVAL_S = 1.0
_KEPT = 900


class State(NamedTuple):
    """Of one predictor; over its models, the cache of the fullest, 0 to 1."""

    running: int
    waiting: int
    cache: float


@dataclass(frozen=True)
class Reading:
    """Of all predictors, by name, in one second of the clock."""

    second: int
    states: dict[str, State]


class PredictorHistory:
    """Readings of a test, oldest first; bounded."""

    def __init__(self) -> None:
        self.readings: deque[Reading] = deque(maxlen=_KEPT)

    def read(self, gateway: Gateway, second: int) -> None:
        """Adds what the gateway reports now."""
        try:
            states = states_of(gateway.predictors())
        except GatewayError:
            return
        if states:
            self.readings.append(Reading(second, states))


def states_of(predictors: Iterable[Mapping[str, Any]]) -> dict[str, State]:
    """The ready ones of `GET /headrace/v1/predictors`, by name."""
    return {one["name"]: _state(one["models"]) for one in predictors if one["ready"]}


def _state(models: list[dict[str, Any]]) -> State:
    return State(
        sum(model["running"] for model in models),
        sum(model["waiting"] for model in models),
        max((1 - model["cache_free"] for model in models), default=0.0),
    )
