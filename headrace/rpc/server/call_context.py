"""The context of a call: its method, the request's id, the metadata, the deadline.

`CALL_ID` and the client are set by the gateway, which overwrites or removes the values that a caller sent.
"""

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from headrace.clients import Client, account, account_of_batches, client_of
from headrace.deadline import NO_DEADLINE, Deadline
from headrace.errors import ForbiddenError, InvalidRequestError
from headrace.rpc import Context
from headrace.rpc.limits.admission import call_metadata
from headrace.telemetry.identity import REQUEST_ID_METADATA, protocol_of, set_request_id

MAX_REQUEST_ID = 256
CALL_ID = "x-headrace-call-id"
IDEMPOTENCY_KEY = "idempotency-key"
BACKGROUND = "x-headrace-batch"  # The batch of a request that is part of one.
# Calls of `Development` and `PredictorDevelopment`, services for demonstrations, need this header. A page of another
# origin cannot send it without asking the gateway first, which allows it no origin for them (envoy/envoy.yaml).
DEVELOPMENT = ("x-headrace-development", "true")
_TIMEOUT_MS = "x-timeout-ms"
_FIRST_TOKEN_TIMEOUT_MS = "x-first-token-timeout-ms"  # noqa: S105
_MAX_TIMEOUT_MS = 99_999_999  # gRPC's own limit of digits in a timeout.


class ServedModel(NamedTuple):
    """A model that answers, and its version; "" is the newest."""

    model: str
    version: str = ""

    def __str__(self) -> str:
        return f"{self.model}:{self.version}" if self.version else self.model


@dataclass(frozen=True)
class CallContext:
    """`protocol` is the method called, `request_id` the caller's or the gateway's, `arrived` a time of the monotonic
    clock.

    `routed` has the models that routes chose, by the names in the requests: the one that answers, then the fallbacks.
    """

    protocol: str
    request_id: str
    metadata: Sequence[tuple[str, str | bytes]] = ()
    deadline: Deadline = NO_DEADLINE
    arrived: float = field(default_factory=time.monotonic, compare=False)
    routed: dict[str, Sequence[ServedModel]] = field(default_factory=dict, compare=False)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the arrival."""
        return time.monotonic() - self.arrived

    @cached_property
    def client(self) -> Client:
        return client_of(self.metadata)

    @cached_property
    def first_token(self) -> Deadline:
        """The deadline of the answer's beginning, `x-first-token-timeout-ms` after the arrival.

        It includes every wait for a predictor. Raises InvalidRequestError where it is malformed.
        """
        timeout_s = first_token_timeout_s(self.metadata)
        if timeout_s is None:
            return NO_DEADLINE
        return Deadline(self.arrived + timeout_s, f"no token within {1000 * timeout_s:.0f} ms")

    @cached_property
    def beginning(self) -> Deadline:
        """When an answer must have begun: `first_token`, or the call's own deadline if that is sooner."""
        return min(self.deadline, self.first_token, key=lambda deadline: deadline.at)

    @property
    def caller_protocol(self) -> str:
        """The protocol between caller and gateway, as `protocol_of`."""
        return protocol_of(self.metadata)

    @cached_property
    def account(self) -> Client:
        """On whose account the work is where clients compete for an engine: its client's, or that of its batches."""
        return account_of_batches(self.client.name) if self.is_background else account(self.client, self.metadata)

    @cached_property
    def is_background(self) -> bool:
        """Whether nobody waits for the answer, so that the request comes after all others."""
        return bool(self.header(BACKGROUND))

    def header(self, name: str) -> str:
        """The metadata's value by a name, several values joined by commas as in HTTP; "" for none."""
        return _header(self.metadata, name)

    def with_id(self, request_id: str) -> "CallContext":
        """A copy with the id that the request itself has, if any; sets it for later spans and log lines of the task."""
        return replace(self, request_id=_known(request_id)) if request_id else self


def call_context(context: Context, protocol: str, request_id: str = "") -> CallContext:
    """The context of a call that arrives now; spans and log lines of the task have its request's id from now on.

    The id is `request_id`, the caller's own, else the gateway's, else a new one.
    """
    metadata = call_metadata(context)
    known = _known(request_id or _header(metadata, REQUEST_ID_METADATA) or str(uuid.uuid4()))
    return CallContext(protocol, known, metadata, deadline_of(context))


def _header(metadata: Sequence[tuple[str, str | bytes]], name: str) -> str:
    return ", ".join([value for key, value in metadata if key == name and isinstance(value, str)])


def _known(request_id: str) -> str:
    """The id as it is kept; later spans and log lines of the task have it."""
    kept = request_id[:MAX_REQUEST_ID]
    set_request_id(kept)
    return kept


def check_request_id(given: str) -> None:
    """Refuses a caller's own id that is too long to be kept: raises InvalidRequestError."""
    if len(given) > MAX_REQUEST_ID:
        raise InvalidRequestError(f"the request id has {len(given)} characters, at most {MAX_REQUEST_ID} are allowed")


def deadline_of(context: Context) -> Deadline:
    """A call's gRPC deadline, or that of the REST header `x-timeout-ms`, which the gateway has checked; the sooner."""
    left_s = context.time_remaining()
    for key, value in call_metadata(context):
        if key == _TIMEOUT_MS and isinstance(value, str) and value.isdecimal():
            return Deadline.after(int(value) / 1000 if left_s is None else min(left_s, int(value) / 1000))
    return Deadline.after(left_s)


def first_token_timeout_s(metadata: Iterable[tuple[str, str | bytes]] | None) -> float | None:
    """The time that a caller allows until its first token: `x-first-token-timeout-ms`. Raises InvalidRequestError."""
    text = dict(metadata or ()).get(_FIRST_TOKEN_TIMEOUT_MS)
    if not isinstance(text, str):
        return None
    if not (text.isascii() and text.isdecimal() and 1 <= len(text) <= 9 and 1 <= int(text) <= _MAX_TIMEOUT_MS):
        raise InvalidRequestError(
            f"{_FIRST_TOKEN_TIMEOUT_MS} must be a whole number of milliseconds from 1 to {_MAX_TIMEOUT_MS}"
        )
    return int(text) / 1000


def check_development(context: Context) -> None:
    """Raises ForbiddenError if the call lacks the header `DEVELOPMENT`."""
    if DEVELOPMENT not in call_metadata(context):
        raise ForbiddenError(f"the call needs the header {DEVELOPMENT[0]}: {DEVELOPMENT[1]}")
