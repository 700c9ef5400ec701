"""One request of a fuzz run, and what may come back.

A case is made from a seed and its number alone, so that any of them can be made again. `must_fail` says
that the request is wrong whatever the server thinks of it: then nothing but a refusal will do. Where it
is false the change may have left a request that is right: it may be answered or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

# Statuses by which a wrong request is refused, of INTERFACE.md's table.
REFUSED_GRPC = frozenset({"INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED"})
REFUSED_HTTP = frozenset({400, 403, 404, 413, 501})


@dataclass(frozen=True)
class GrpcCall:
    """Messages as bytes to one method, which need not be messages at all."""

    path: str
    messages: tuple[bytes, ...]
    authority: str = ""
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class HttpCall:
    """One HTTP/1.1 request; with `web` the answer is gRPC-Web's, whose status is in its trailers."""

    path: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"
    web: bool = False


@dataclass(frozen=True)
class Case:
    """See the module; `what` names the change for whoever reads a failure."""

    what: str
    call: GrpcCall | HttpCall
    must_fail: bool = True
    # A frame that is broken below the message: gRPC itself answers it, with INTERNAL and unsigned.
    broken_frame: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came back: a gRPC status by name or an HTTP status, and what was wrong with how it was told."""

    status: str
    accepted: bool
    seconds: float
    message: str = ""
    faults: tuple[str, ...] = ()


Maker = Callable[[Random], Case]


def verdict(case: Case, outcome: Outcome) -> str | None:
    """Why the outcome is not allowed, if it is not."""
    if outcome.faults:
        return "; ".join(outcome.faults)
    if outcome.accepted:
        return "accepted, though it is wrong" if case.must_fail else None
    if case.broken_frame and outcome.status == "INTERNAL":
        return None
    if outcome.status in REFUSED_GRPC or (outcome.status.isdigit() and int(outcome.status) in REFUSED_HTTP):
        return None
    return "neither an answer nor a refusal"
