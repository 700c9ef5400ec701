"""What a request may still do when predictors die under it: go on, go on alone, or nothing more.

A death says nothing of the request by itself: a machine may have failed, or a request beside it. So only deaths in a
row count, without a new token between them. After `limit` of them the next call runs alone on its replica; what dies
while it does is the request's own doing. What dies before its turn has come is not, though a request to which that
happens again and again is taken for guilty too: it may kill before its first step. Pure.
"""

from __future__ import annotations

from enum import Enum

_MOST_BEFORE_ITS_TURN = 4


class NextCall(Enum):
    """How the next call of a request may be made."""

    SHARED = "beside others"
    ALONE = "alone on its replica"
    NONE = "not at all"


class Deaths:
    """One request's."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row = 0
        self._runs_alone = False
        self._is_guilty = False

    def runs_alone(self) -> None:
        """From now on the call's predictor computes nothing else."""
        self._runs_alone = True

    def call_ended(self, died: bool) -> None:
        """The call ended without a new token, with the death of its predictor or otherwise."""
        self._in_a_row += died
        self._is_guilty |= died and self._runs_alone
        self._runs_alone = False

    def token(self) -> None:
        """A new token came: the deaths before it were not the request's doing."""
        self._in_a_row = 0
        self._runs_alone = False

    @property
    def next_call(self) -> NextCall:
        if self._in_a_row < self._limit:
            return NextCall.SHARED
        if self._is_guilty or self._in_a_row > self._limit + _MOST_BEFORE_ITS_TURN:
            return NextCall.NONE
        return NextCall.ALONE
