"""How long a generation would take from its arrival to its last token, by those of its model that have just ended.

The predictors know their queues. They know neither what a call has waited before it came to them nor what its answer
waits on its way back, which under overload is most of it: they took what was late in the end, and each answer that is
late by a little has had all of its work done for nothing. Here everything counts. By Little's law those in flight over
the rate of their ends is how long the next one takes, if it is served after them. Where answers begin soon nobody
waits for a place: then the rate is that of the demand and says nothing, and whom one refused would leave a place empty.

Refusals cost what answers could have: a millisecond of the machine each. Callers who come back at once, whatever
`retry-after` says, would use up the cores with them. So beyond a rate each refusal is held back a little.

Pure; seconds come from the caller.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_ENOUGH = 16  # Ends.
_MOST = 64
_WINDOW_S = 10.0
_MARGIN = 1.5  # Answers of one length differ by so much, and a place is as well used by one with time to spare.
_WAITED = 0.25  # Of the whole, until the first token: so much and more is a queue.
_WEIGHT = 0.1  # Of one first token in the mean.
_REFUSALS_PER_S = 100.0
_LONGEST_HOLD_S = 1.0
_SHARE_OF_LEFT = 0.25  # What a caller may lose of its time by being held back.


@dataclass
class LoadEstimate:
    """Of one model."""

    in_flight: int = 0
    _ends: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST))
    _first_token_s: float = 0.0  # From the arrival, on the average.

    def began(self) -> None:
        """Notes that a generation has been taken."""
        self.in_flight += 1

    def first_token(self, waited_s: float) -> None:
        """Notes that an answer has begun so long after its request's arrival."""
        self._first_token_s += _WEIGHT * (waited_s - self._first_token_s)

    def ended(self, now: float, in_time: bool = True) -> None:
        """Notes that a generation has ended; `in_time` unless a predictor refused it or its deadline passed.

        Those are no measure of what can be served: a crowd whose deadlines pass all at once would look like a crowd
        that is served at once, and the next one would be taken whole and be late as a whole.
        """
        self.in_flight -= 1
        if in_time:
            self._ends.append(now)

    def retry_after_s(self, left_s: float, now: float) -> float | None:
        """None for a generation that would be done in so many seconds, as far as anybody knows; else when to come
        again."""
        ends = self._ends
        while ends and now - ends[0] > _WINDOW_S:
            ends.popleft()
        if len(ends) < _ENOUGH:
            return None
        interval_s = (now - ends[0]) / (len(ends) - 1)
        takes_s = interval_s * (self.in_flight + 1)
        if _MARGIN * takes_s <= left_s or self._first_token_s < _WAITED * takes_s:
            return None
        return max(interval_s, _MARGIN * takes_s - left_s)


class RefusalPace:
    """When refusals are sent: at once, a second's worth of them even in one moment, and beyond that at a rate."""

    def __init__(self) -> None:
        self._due = 0.0

    def hold_s(self, left_s: float, now: float) -> float:
        """How long to hold back a refusal whose caller's deadline has so many seconds left."""
        due = max(self._due, now - 1.0) + 1 / _REFUSALS_PER_S
        self._due = min(due, now + _LONGEST_HOLD_S)
        return max(0.0, min(due - now, _LONGEST_HOLD_S, _SHARE_OF_LEFT * left_s))
