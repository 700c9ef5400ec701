"""Files and batches, as they are stored and as OpenAI's API shows them. Times are Unix seconds.

Source: OpenAI's API reference for the shapes and the states.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import orjson
from pydantic import BaseModel, ConfigDict

from headrace.clients import CLIENT, POLICY

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
FINAL: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})
_TIMES = get_args(Status)[1:]  # Of the first state, `created_at`.


def new_id(prefix: str) -> str:
    """An id; ids sort by the time at which they were made."""
    return f"{prefix}{time.time_ns() // 1_000_000:011x}{secrets.token_hex(6)}"


class LineError(BaseModel):
    """Why a batch failed, at a line of its file (from 1) where it is one."""

    model_config = ConfigDict(frozen=True)

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Result(NamedTuple):
    """The result of the line `number`. `body` is the JSON of an answer with a `status`, else there is an `error`."""

    number: int
    custom_id: str
    request_id: str
    status: int = 0
    body: bytes = b""
    error: dict[str, str] | None = None

    @property
    def is_error(self) -> bool:
        return not 200 <= self.status < 300

    def line(self, batch_id: str) -> bytes:
        """The line of the file of results."""
        response: dict[str, Any] | None = None
        if self.status:
            body = orjson.Fragment(self.body)
            response = {"status_code": self.status, "request_id": self.request_id, "body": body}
        line_id = f"{batch_id.replace('batch_', 'batch_req_')}-{self.number}"
        written = {"id": line_id, "custom_id": self.custom_id, "response": response, "error": self.error}
        return orjson.dumps(written, option=orjson.OPT_APPEND_NEWLINE)


class StoredFile(NamedTuple):
    """A file of a client."""

    id: str
    filename: str
    purpose: str
    size: int
    created_at: int
    expires_at: int

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class Batch(BaseModel):
    """The state of a batch. `client` and `policy` are those of the call that created it, `traceparent` its span.

    `times` has when each state began; `total`, `completed` and `failed` count lines.
    `closing_as` is the state in which a batch ends that is `finalizing`.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    client: str
    policy: str
    traceparent: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None = None
    created_at: int
    expires_at: int
    status: Status = "validating"
    times: dict[Status, int] = {}
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: tuple[LineError, ...] = ()
    closing_as: Status | None = None

    @property
    def output_file_id(self) -> str:
        """The id of the file with the results of lines that succeeded."""
        return f"file-{self.id.removeprefix('batch_')}-output"

    @property
    def error_file_id(self) -> str:
        """The id of the file with the results of all others."""
        return f"file-{self.id.removeprefix('batch_')}-error"

    @property
    def result_file_ids(self) -> tuple[str, str]:
        return self.output_file_id, self.error_file_id

    def with_results(self, results: Sequence[Result]) -> "Batch":
        """A copy that counts more results."""
        failed = sum(result.is_error for result in results)
        completed = len(results) - failed
        return self.model_copy(update={"completed": self.completed + completed, "failed": self.failed + failed})

    @property
    def is_final(self) -> bool:
        return self.status in FINAL

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """The client's identity, as the gateway passes it on."""
        return ((CLIENT, self.client), (POLICY, self.policy)) if self.client else ()

    def entered(self, status: Status, at: float, **changes: Any) -> "Batch":
        """A copy in another state, which began `at`."""
        return self.model_copy(update={**changes, "status": status, "times": {**self.times, status: int(at)}})

    def shown(self) -> dict[str, Any]:
        has_results = self.status in FINAL
        errors = [error.model_dump() for error in self.errors]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id if has_results and self.completed else None,
            "error_file_id": self.error_file_id if has_results and self.failed else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": self.times.get(status) for status in _TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }
