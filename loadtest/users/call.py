"""One request as a user measures it.

Times are from the arrival: the moment at which the request should be sent, which under open load may be before it is.
Every message counts as it comes. A whole request is a row of Locust's table and part of "Aggregated"; first tokens,
gaps and cancels are rows of their own, which Locust's totals and charts do not contain.
"""

import time
import uuid

from loadtest import figures
from loadtest.figures import SlowRequest
from loadtest.session import Session

STREAM = "stream"
_LOCUST_ROWS = {figures.TTFT: "TTFT", figures.GAP: "gap", figures.CANCEL: "cancel latency"}


class CallFailedError(Exception):
    """The text that Locust lists under failures."""


class Call:
    """`arrival`: of time.perf_counter. `tokens`: those that came. `trace_id`, `server_ttft_ms`: of the metadata."""

    def __init__(self, session: Session, row: str, kind: str, arrival: float) -> None:
        self._session, self.row, self._kind, self._arrival = session, row, kind, arrival
        self._last: float | None = None
        self._over: float | None = None
        self.values: dict[str, float | None] = {}
        self.request_id = uuid.uuid4().hex
        self.trace_id = ""
        self.server_ttft_ms: float | None = None
        self.tokens = 0
        self.size = 0

    @property
    def started(self) -> bool:
        """Whether a token has come."""
        return self._last is not None

    def message(self, tokens: int, size: int, *, gap: bool = True) -> None:
        """A message with tokens has come, of `size` bytes; `gap`: the time since the last one is the server's."""
        now = time.perf_counter()
        current = self._session.measures.current()
        if self._last is None:
            self._measured(figures.TTFT, (now - self._arrival) * 1000)
            self._session.in_flight.add(self.request_id)
        elif gap:
            milliseconds = (now - self._last) * 1000
            self._measured(figures.GAP, milliseconds)
        self._last = now
        self.tokens += tokens
        self.size += size
        current.counts[self.row, figures.MESSAGES] += 1
        current.counts[self.row, figures.TOKENS] += tokens

    def more_tokens(self, tokens: int) -> None:
        """Tokens that came with messages that did not count them."""
        self.tokens += tokens
        self._session.measures.current().counts[self.row, figures.TOKENS] += tokens

    def over(self) -> None:
        """The request ends now, though its user goes on to ask about it."""
        self._over = time.perf_counter()
        self.forget()

    def cancelled(self, milliseconds: float) -> None:
        """How long the server worked on after the cancel."""
        self._measured(figures.CANCEL, milliseconds)

    def end(self, failure: CallFailedError | None) -> None:
        """The request is over: a row of Locust's table, and good or not."""
        self.forget()
        whole_ms = ((self._over or time.perf_counter()) - self._arrival) * 1000
        session, current = self._session, self._session.measures.current()
        self.values[figures.WHOLE] = whole_ms
        current.record(self.row, figures.WHOLE, whole_ms)
        if self.server_ttft_ms is not None:
            current.record(self.row, figures.SERVER_TTFT, self.server_ttft_ms)
        current.counts[self.row, figures.REQUESTS] += 1
        outcome = figures.FAILED if failure else figures.GOOD
        if failure or session.options.objective.met(self.values):
            current.counts[self.row, outcome] += 1
        current.note_slow(
            SlowRequest(
                self.row,
                self.request_id,
                self.trace_id,
                whole_ms,
                self.values.get(figures.TTFT),
                self.server_ttft_ms,
                self.values.get(figures.GAP),
                str(failure or ""),
            )
        )
        session.environment.events.request.fire(
            request_type=self._kind,
            name=self.row,
            response_time=whole_ms,
            response_length=self.size,
            exception=failure,
            context={},
        )

    def forget(self) -> None:
        """It no longer streams; also for a request that its user does not end."""
        self._session.in_flight.discard(self.request_id)

    def _measured(self, measure: str, milliseconds: float) -> None:
        self._session.measures.current().record(self.row, measure, milliseconds)
        # Locust's own row of it; `log_request` would also add it to the totals.
        self._session.environment.stats.get(f"{self.row} {_LOCUST_ROWS[measure]}", STREAM).log(milliseconds, 0)
        # Of gaps the longest decides.
        self.values[measure] = max(milliseconds, self.values.get(measure) or 0.0)
