"""Users that do not read to the end, or read slowly."""

# ruff: noqa: S311  (random numbers here are not secrets)
from __future__ import annotations

import random
import time

import gevent

from loadtest.gateway import GatewayError
from loadtest.users.call import Call, CallFailedError
from loadtest.users.streams import GenerateUser

_READS_AT_MOST = 8
_LONG_ANSWER = 512
_PAUSE_S = 0.2
_RECORD_WAIT_S = 5.0
_RECORD_POLL_S = 0.3


class CancelUser(GenerateUser):
    """Cancels a long answer after some messages.

    The cancel's row is how much longer the server worked than this user listened, by the payload log: there is none
    where the log cannot be read.
    """

    row = "Cancelled Generate"

    def request(self, arrival: float, prompt: str, max_tokens: int) -> None:
        reads = random.randint(1, _READS_AT_MOST)
        with self.measured(arrival) as call:
            sent = time.perf_counter()
            stream = self.opened(call, prompt, max(max_tokens, _LONG_ANSWER))
            try:
                for response in stream:
                    if response.token_ids:
                        call.message(len(response.token_ids), response.ByteSize())
                        reads -= 1
                    if not reads:
                        break
            finally:
                stream.cancel()
                listened_ms = (time.perf_counter() - sent) * 1000
                call.over()
            if not call.started:
                raise CallFailedError("the stream ended without tokens")
            if (worked_ms := self._duration_of(call)) is not None:
                call.cancelled(max(0.0, worked_ms - listened_ms))

    def _duration_of(self, call: Call) -> float | None:
        """How long the server worked, in milliseconds; None if the log does not have it in time."""
        deadline = time.perf_counter() + _RECORD_WAIT_S
        while time.perf_counter() < deadline:
            gevent.sleep(_RECORD_POLL_S)
            try:
                records = self.session.gateway.records(request_id=call.request_id)
            except GatewayError:
                return None
            if records:
                return float(records[0]["duration_ms"])
        return None


class SlowReaderUser(GenerateUser):
    """Waits after each message before it reads the next one. Its gaps are its own, so it has no row for them."""

    row = "Slowly read Generate"

    def request(self, arrival: float, prompt: str, max_tokens: int) -> None:
        with self.measured(arrival) as call:
            stream = self.opened(call, prompt, max_tokens)
            finished = False
            try:
                for response in stream:
                    if response.token_ids:
                        call.message(len(response.token_ids), response.ByteSize(), gap=False)
                    finished = response.HasField("finish_reason")
                    if not finished:
                        gevent.sleep(_PAUSE_S)
            finally:
                stream.cancel()
            if not finished:
                raise CallFailedError("the stream ended without finish_reason")
