"""Refuses imports of model libraries, sockets and processes while it is entered, in every thread of this process.

A finder sees imports, an audit hook sees Python's sockets and processes. gRPC's sockets are not Python's: its servers
and channels are patched.
asyncio's pair of sockets to itself is neither bound nor connected, and xdist's workers talk through pipes.
"""

import sys
from types import TracebackType
from typing import Any

import grpc._channel
import grpc._server
import grpc.aio._channel
import grpc.aio._server

LIBRARIES = frozenset({"torch", "transformers", "safetensors", "numba"})
EVENTS = frozenset(
    {
        "socket.bind",
        "socket.connect",
        "subprocess.Popen",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.exec",
        "os.system",
    }
)
_GRPC = (grpc._server._Server, grpc._channel.Channel, grpc.aio._server.Server, grpc.aio._channel.Channel)


class NotUnitError(RuntimeError):
    """An action that is forbidden in unit tests."""


class Guard:
    """Reentrant; not for several sessions at once. `take` returns the refusals since the last call of it."""

    def __init__(self) -> None:
        self._depth = 0
        self._refused: list[str] = []
        self._originals: list[Any] = []
        sys.addaudithook(self._audit)
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._originals = [each.__init__ for each in _GRPC]
            for each in _GRPC:
                each.__init__ = self._refuse_grpc

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            for each, original in zip(_GRPC, self._originals, strict=True):
                each.__init__ = original

    def take(self) -> list[str]:
        refused, self._refused = self._refused, []
        return refused

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """The method of a module finder; this one finds none."""
        if self._depth and name.partition(".")[0] in LIBRARIES:
            self._refuse(f"import {name}")

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._depth and event in EVENTS:
            self._refuse(f"{event} {arguments[0] if event == 'subprocess.Popen' else arguments[1:]}")

    def _refuse_grpc(self, *_: Any, **__: Any) -> None:
        self._refuse("a gRPC server or channel")

    def _refuse(self, what: str) -> None:
        self._refused.append(what)
        raise NotUnitError(f"{what}: a test in tests/unit must not; move it to tests/model or tests/process")


guard = Guard()
