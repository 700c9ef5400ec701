"""Errors that carry their status: the table of docs/interface.md's section on errors.

A service raises these; the server interceptor turns them into a gRPC status with `x-failed-hop` and `x-http-status` in
the trailing metadata, and the client interceptor turns such a status back into the same class, so that an error keeps
its meaning and its origin across any number of hops.
"""

import errno
import os
from collections.abc import Mapping
from typing import ClassVar

import grpc
from grpc import StatusCode

FAILED_HOP = "x-failed-hop"
HTTP_STATUS = "x-http-status"
RETRY_AFTER_MS = "retry-after-ms"
DRAINING = "x-headrace-draining"

# gRPC sends the text as a header, where a character beyond ASCII takes up to nine bytes and all
# headers together 8 KiB: a longer text would break the connection, and every call on it.
_MAX_MESSAGE_BYTES = 1024


# Errors of the machine, not of a setting: they may pass by themselves.
_FAULTS = {
    *(errno.EDQUOT, errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE),
    *(errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM),
    errno.EADDRINUSE,
}
_FAULT_TEXTS = (*map(os.strerror, _FAULTS), "out of memory")  # Of libraries that have errors of their own.
_SQLITE_FAULTS = ("BUSY", "CANTOPEN", "FULL", "IOERR", "LOCKED", "NOMEM", "READONLY")


class StartupError(Exception):
    """The process cannot start; the message is one line that says what to do."""

    @property
    def is_fault(self) -> bool:
        """Whether a later attempt may succeed: judged by the errors that led to it."""
        causes: list[BaseException] = [self]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
            causes.append(cause)
        return any(map(may_pass, causes))


class StartupFault(StartupError):  # noqa: N818
    """No setting is wrong: a later attempt may succeed."""


def may_pass(error: BaseException) -> bool:
    """Whether an error is of the machine, such as a full disk, and not of a setting."""
    if isinstance(error, StartupFault | MemoryError | TimeoutError | ConnectionError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FAULTS
    sqlite = getattr(error, "sqlite_errorname", "").removeprefix("SQLITE_")
    return sqlite.startswith(_SQLITE_FAULTS) or any(text in str(error) for text in _FAULT_TEXTS)


class HeadraceError(Exception):
    """A request's failure with the status that every protocol reports.

    `hop` names the hop that failed; None means the process that raises it. `param` names the field at fault, where it
    is one; it does not travel from hop to hop.
    """

    status: ClassVar[StatusCode] = StatusCode.INTERNAL
    http_status: ClassVar[int] = 500
    mark: ClassVar[str] = ""  # Metadata that distinguishes the class from another one with the same statuses.

    def __init__(
        self, message: str, *, hop: str | None = None, retry_after_ms: int | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        data = message.encode(errors="replace")
        if len(data) > _MAX_MESSAGE_BYTES:
            message = data[:_MAX_MESSAGE_BYTES].decode(errors="ignore") + "…"
        self.message = message
        self.hop = hop
        self.retry_after_ms = retry_after_ms
        self.param = param

    def trailing_metadata(self, this_hop: str) -> tuple[tuple[str, str], ...]:
        """Metadata that lets the next hop rebuild this error."""
        metadata = [(FAILED_HOP, self.hop or this_hop), (HTTP_STATUS, str(self.http_status))]
        if self.retry_after_ms is not None:
            metadata.append((RETRY_AFTER_MS, str(self.retry_after_ms)))
        if self.mark:
            metadata.append((self.mark, "true"))
        return tuple(metadata)


class InvalidRequestError(HeadraceError):
    """Bad parameter, dtype, shape or token id, prompt too long, endpoint the model does not support."""

    status = StatusCode.INVALID_ARGUMENT
    http_status = 400


class ContextLengthError(InvalidRequestError):
    """The prompt, or the output asked for, does not fit the model's context."""


class UnauthenticatedError(HeadraceError):
    """No key, or a wrong one."""

    status = StatusCode.UNAUTHENTICATED
    http_status = 401


class ForbiddenError(HeadraceError):
    """The caller is known but not allowed."""

    status = StatusCode.PERMISSION_DENIED
    http_status = 403


class NotFoundError(HeadraceError):
    """No such model, version or record."""

    status = StatusCode.NOT_FOUND
    http_status = 404


class NotImplementedMethodError(HeadraceError):
    """The protocol has the method; this server does not offer it."""

    status = StatusCode.UNIMPLEMENTED
    http_status = 501


class GoneError(HeadraceError):
    """What a request refers to is too old."""

    status = StatusCode.FAILED_PRECONDITION
    http_status = 410


class TooLargeError(HeadraceError):
    """A body or message beyond the limit."""

    status = StatusCode.RESOURCE_EXHAUSTED
    http_status = 413


class OverloadedError(HeadraceError):
    """A queue is full or a rate limit reached: try again after `retry_after_ms`."""

    status = StatusCode.RESOURCE_EXHAUSTED
    http_status = 429


class RequestFailedError(HeadraceError):
    """This request failed inside; other requests are not affected."""


class HopBrokenError(HeadraceError):
    """A hop died or broke the protocol."""

    status = StatusCode.UNAVAILABLE
    http_status = 502


class NotReadyError(HeadraceError):
    """Draining, still loading, or no replica."""

    status = StatusCode.UNAVAILABLE
    http_status = 503


class DrainingError(NotReadyError):
    """Handed back by a replica that is about to stop: another replica, or its successor, can take it at once."""

    mark = DRAINING


class OtherWeightsError(NotReadyError):
    """A stream that another replica began cannot resume here: the model has another fingerprint."""


class DeadlineError(HeadraceError):
    """The request's deadline passed."""

    status = StatusCode.DEADLINE_EXCEEDED
    http_status = 504


_CLASSES = HeadraceError.__subclasses__()  # In this order.
_BY_BOTH = {(error.status, error.http_status): error for error in _CLASSES}
# Where only the gRPC status is known, the commoner of two meanings.
_BY_STATUS = {error.status: error for error in reversed(_CLASSES)} | {StatusCode.RESOURCE_EXHAUSTED: OverloadedError}

# Envoy's own answers when a cluster has no host, and gRPC's when no server listens: the call reached no service.
_NO_REPLICA = (
    "no healthy upstream",
    "no_healthy_upstream",
    "failed to connect to all addresses",
    "DNS resolution failed",
)
# gRPC's own answer to a message beyond the limit, at either end.
_TOO_LARGE = "message larger than max"


def from_rpc_error(error: grpc.aio.AioRpcError, hop: str) -> HeadraceError:
    """The error that `hop` or a hop behind it reported, or the error for a broken connection."""
    metadata = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    code, message = error.code(), error.details() or error.code().name
    if FAILED_HOP not in metadata:
        # No service behind `hop` signed this: it is from a proxy or the transport.
        if any(text in message for text in _NO_REPLICA):
            return NotReadyError(f"no {hop} is ready", hop=hop)
        if code is StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in message:
            return TooLargeError(message, hop=hop)
        if code is StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError("the deadline passed", hop=hop)
        if code in (StatusCode.UNAVAILABLE, StatusCode.INTERNAL, StatusCode.UNKNOWN, StatusCode.CANCELLED):
            return HopBrokenError(f"the connection to the {hop} broke", hop=hop)
    return from_metadata(code, message, metadata, hop)


def from_metadata(code: StatusCode, message: str, metadata: Mapping[str, str], hop: str) -> HeadraceError:
    """The error of a gRPC status and its trailing metadata, which `hop` reported."""
    http_status = metadata.get(HTTP_STATUS, "")
    cls = _BY_BOTH.get((code, int(http_status))) if http_status.isdigit() else None
    cls = cls or _BY_STATUS.get(code, RequestFailedError)
    if cls is NotReadyError and metadata.get(DRAINING) == "true":
        cls = DrainingError
    retry_after = metadata.get(RETRY_AFTER_MS, "")
    return cls(
        message, hop=metadata.get(FAILED_HOP) or hop, retry_after_ms=int(retry_after) if retry_after.isdigit() else None
    )
