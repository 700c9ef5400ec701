"""One request of a fuzz run, and its allowed outcomes.

A case is made from a seed and its number alone, so that each can be generated again. `must_fail` means
that the request is certainly wrong and must be refused. If it
is false the change may have left a valid request, which may be answered or refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

# Statuses by which a wrong request is refused, of the table in docs/interface.md.
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
    """One HTTP/1.1 request; with `web` the answer is that of gRPC-Web, with its status in the trailers."""

    path: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"
    web: bool = False


@dataclass(frozen=True)
class Case:
    """See the module; `what` names the change, for failure messages."""

    what: str
    call: GrpcCall | HttpCall
    must_fail: bool = True
    # A broken gRPC frame: gRPC itself answers it with INTERNAL, without a hop.
    broken_frame: bool = False


@dataclass(frozen=True)
class Outcome:
    """The answer: a gRPC status by name or an HTTP status, and the faults of its form."""

    status: str
    accepted: bool
    seconds: float
    message: str = ""
    faults: tuple[str, ...] = ()


Maker = Callable[[Random], Case]


def verdict(case: Case, outcome: Outcome) -> str | None:
    """The reason if the outcome is not allowed, else None."""
    if outcome.faults:
        return "; ".join(outcome.faults)
    if outcome.accepted:
        return "accepted, though it is wrong" if case.must_fail else None
    if case.broken_frame and outcome.status == "INTERNAL":
        return None
    if outcome.status in REFUSED_GRPC or (outcome.status.isdigit() and int(outcome.status) in REFUSED_HTTP):
        return None
    return "neither an answer nor a refusal"
