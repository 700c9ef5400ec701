"""Processes that parse and write large bodies, so that neither the event loop nor the interpreter lock waits for it.

A call for one names a function of a module, its arguments and a body. The function returns a small object, which is
pickled, and bytes, which come back as they are: receiving a result is cheap for any size. Bodies up to `SMALL_BYTES`
are parsed on the event loop instead, those of OpenAI's and Anthropic's interfaces if they have few objects.

Each process has a queue and a thread that waits for it: there is one for bodies up to `LARGE_BYTES`, so that a long
prompt does not wait for a tensor of 50 MB in JSON, one for larger ones, one for chat templates, and one for templates
that were slow. Each starts with its first call, see body_worker.py for what bounds their memory and time. One that ends
fails the call it has, and the next call starts another. What waits is bounded in bytes and in calls; callers have
turns, and one has half of the calls (headrace/threads.py) and of the bytes. Beyond that, OverloadedError. A wait
ends with the request's deadline. Where nothing waits, the event loop itself gives a small body to the process and takes
the result from it: waking a thread for either would make a short chat a tenth slower.
"""

import asyncio
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar, cast

from headrace.deadline import NO_DEADLINE, Deadline
from headrace.errors import HeadraceError, InvalidRequestError, OverloadedError, RequestFailedError, TooLargeError
from headrace.threads import FairThreads

SMALL_BYTES = 64 * 1024  # Parsed in a millisecond.
LARGE_BYTES = 4 * 1024 * 1024
BODIES, LARGE_BODIES, TEMPLATES, SLOW_TEMPLATES = "bodies", "large-bodies", "chat-templates", "slow-templates"
_MIB = 1024**2
# Of each process: CPU seconds for one call, bytes of memory, and its nice value.
_LIMITS = {
    BODIES: (5, 512 * _MIB, 5),
    LARGE_BODIES: (15, 1536 * _MIB, 5),
    TEMPLATES: (2, 512 * _MIB, 0),
    SLOW_TEMPLATES: (3, 512 * _MIB, 5),
}
_MAX_BYTES = 512 * _MIB
_MAX_WAITING = 256
_MAX_CHATS_WAITING = 4096
_RETRY_AFTER_MS = 1000
_PASSED = "the deadline passed while the body was read or written"
_WORKER = "headrace_transformer.processes.body_worker"
REQUEST, RESPONSE = struct.Struct("<QQ"), struct.Struct("<BQQ")  # Sizes of the pickle and of the bytes.
_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)  # A number: flags are slow to join.
DONE, ERROR = 0, 1
LAST = 2  # Added where the process ends after this.
# Exit codes of a process that exceeds its memory or time.
_BEYOND_LIMITS = (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)

T = TypeVar("T")
Work = Callable[..., tuple[T, bytes]]


class BodyProcesses:
    """Called by one event loop."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()  # Bytes, by caller.
        self._lanes = {name: _Lane(name, *limits) for name, limits in _LIMITS.items()}

    async def run(
        self,
        work: Work[T],
        arguments: tuple[Any, ...],
        body: bytes,
        deadline: Deadline = NO_DEADLINE,
        lane: str | None = None,
    ) -> tuple[T, bytes]:
        """The result or error of `work(body, *arguments)`; `work` is a module-level function with small arguments."""
        size = len(body)
        lane = lane or (LARGE_BODIES if size > LARGE_BYTES else BODIES)
        try:
            call = pickle.dumps((work, arguments))
        except RecursionError:
            raise nested_too_deep() from None
        async with deadline.scope(_PASSED):
            if len(call) + size <= SMALL_BYTES and self._lanes[lane].begin(call, body):
                result: tuple[T, bytes] = await self._lanes[lane].result()
            else:
                result = await asyncio.wrap_future(self._queued(lane, call, body))
        return result

    async def run_unless(
        self, is_small: bool, work: Work[T], arguments: tuple[Any, ...], body: bytes, deadline: Deadline
    ) -> tuple[T, bytes]:
        """As `run`; the work on a small body is done here, at once."""
        return work(body, *arguments) if is_small else await self.run(work, arguments, body, deadline)

    def _queued(self, lane: str, call: bytes, body: bytes) -> Future[Any]:
        from headrace.rpc.limits.admission import caller_of_call  # The caller has it; the processes start without it.

        caller, size = caller_of_call(), len(body)
        with self._lock:
            own, others = self._held[caller] + size, self._held.total() - self._held[caller]
            has_room = own + others <= self._max_bytes and (not caller or 2 * own <= self._max_bytes)
            self._held[caller] = own
        future = self._lanes[lane].submit(caller, call, body) if has_room else None

        def done(_: object) -> None:
            with self._lock:
                self._held[caller] -= size
                self._held += Counter()  # Without callers that hold nothing.

        if future is None:
            done(None)
            most = f"{self._lanes[lane].places}, and {self._max_bytes} bytes, half of one client"
            message = f"too many large bodies are being read or written: at most {most}"
            raise OverloadedError(message, retry_after_ms=_RETRY_AFTER_MS)
        future.add_done_callback(done)
        return future

    async def close(self) -> None:
        """Ends the processes; work that has not begun is dropped."""
        for lane in self._lanes.values():
            lane.close()


class _Lane:
    """One process at a time, and the thread that waits for it."""

    def __init__(self, name: str, max_time_s: int, max_memory: int, niceness: int) -> None:
        self._limits = (str(max_time_s), str(max_memory), str(niceness))
        self.places = _MAX_CHATS_WAITING if name == TEMPLATES else _MAX_WAITING
        self._thread = FairThreads(1, self.places, name)
        self._rest = ThreadPoolExecutor(1, f"{name}-rest")  # For what `begin` began; the other may wait for its end.
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._in_use = threading.Lock()  # Process and connection; held during a call.
        self._closed = False

    def submit(self, caller: str, request: bytes, body: bytes) -> Future[Any] | None:
        return self._thread.submit(caller, self._call, request, body, cost=1 + len(body) / SMALL_BYTES)

    def close(self) -> None:
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        self._thread.close(self._end_unused)

    def begin(self, request: bytes, body: bytes) -> bool:
        """Whether the process has the call now: it is there, and nobody waits for it. `result` must follow."""
        if not self._thread.is_idle or not self._in_use.acquire(blocking=False):
            return False
        with suppress(OSError):
            if self._connection is not None:
                self._connection.sendall(REQUEST.pack(len(request), len(body)) + request + body)
                return True
        self._in_use.release()
        return False

    async def result(self) -> Any:
        """The result of the call that `begin` began; a thread takes a large one, and one that is not awaited."""
        loop, connection, is_whole = asyncio.get_running_loop(), cast(socket.socket, self._connection), False
        readable = asyncio.Event()
        loop.add_reader(connection, readable.set)
        try:
            await readable.wait()
            with suppress(OSError):
                answer = connection.recv(SMALL_BYTES, _PEEK)
                if len(answer) >= RESPONSE.size and not answer[0] & LAST:
                    _, head, data = RESPONSE.unpack_from(answer)
                    is_whole = RESPONSE.size + head + data <= len(answer)
        finally:
            loop.remove_reader(connection)
            connection.setblocking(True)  # For threads; uvloop has changed it.
            future = None if is_whole else self._rest.submit(self._finish)
        return self._finish() if future is None else await asyncio.wrap_future(future)

    def _finish(self) -> Any:
        try:
            return self._received()
        finally:
            self._in_use.release()

    def _call(self, request: bytes, body: bytes) -> Any:
        with self._in_use:
            with suppress(OSError):  # Whoever receives finds the same.
                self._send(request, body)
            return self._received()

    def _send(self, request: bytes, body: bytes) -> None:
        connection = self._connected()
        head = REQUEST.pack(len(request), len(body)) + request
        try:
            connection.sendall(head)
        except OSError:  # It ended while it was idle.
            self._end()
            connection = self._connected()
            connection.sendall(head)
        connection.sendall(body)

    def _received(self) -> Any:
        try:
            if self._connection is None:
                raise OSError("closed")
            status, head, data = RESPONSE.unpack(received(self._connection, RESPONSE.size))
            answer, contents = received(self._connection, head), received(self._connection, data)
        except OSError:
            exit_code = self._end()
            if exit_code in _BEYOND_LIMITS:
                raise TooLargeError("reading or writing the body takes too much memory or time") from None
            raise RequestFailedError("the process that read or wrote the body ended") from None
        if status & LAST:
            self._end()
        if not status & ERROR:
            return pickle.loads(answer), contents  # noqa: S301  # It is this process's own.
        raise _error_of(*pickle.loads(answer))  # noqa: S301

    def _connected(self) -> socket.socket:
        if self._closed:
            raise OSError("closed")
        if self._connection is None or self._process is None or self._process.poll() is not None:
            self._end()
            self._connection, theirs = socket.socketpair()
            with theirs:
                command = (sys.executable, "-m", _WORKER, str(os.getpid()), *self._limits)
                # The allocator's settings of this process are for speed; that one gives back what a body took.
                environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
                # A session of its own, so that it does not get signals of this process's terminal.
                self._process = subprocess.Popen(
                    command, stdin=theirs.fileno(), env=environment, start_new_session=True
                )
            self._kill_if_closed()  # `close` may have come meanwhile, and not have seen the process.
        return self._connection

    def _kill_if_closed(self) -> None:
        if self._closed and self._process is not None:
            self._process.kill()

    def _end_unused(self) -> None:
        self._in_use.acquire(timeout=1)
        self._end()

    def _end(self) -> int | None:
        """Ends the process, if there is one; its exit code."""
        connection, process, self._connection, self._process = self._connection, self._process, None, None
        if connection is not None:
            connection.close()
        if process is None:
            return None
        # Closed by it, the connection may be gone before the exit code is there.
        try:
            return process.wait(1)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def received(connection: socket.socket, size: int) -> bytes:
    """Reads `size` bytes; raises OSError if they do not arrive. One call, without a copy or the interpreter lock."""
    data = connection.recv(size, socket.MSG_WAITALL) if size else b""
    while len(data) < size:  # A signal came between.
        more = connection.recv(size - len(data), socket.MSG_WAITALL)
        if not more:
            raise ConnectionResetError
        data += more
    return data


def nested_too_deep() -> InvalidRequestError:
    """The error for a body whose lists and objects are nested too deep."""
    return InvalidRequestError("the request is nested too deep")


def _error_of(cls: type[HeadraceError], state: dict[str, Any]) -> HeadraceError:
    """An error that another process raised: the classes' constructors differ, so only their attributes are set."""
    error = cls.__new__(cls)
    Exception.__init__(error, state["message"])
    error.__dict__.update(state)
    return error
