"""Parses and writes bodies for another process.

`python -m headrace_transformer.processes.body_worker PARENT SECONDS BYTES NICE` starts one.

Standard input is a socket, over which one request after another comes, see body_processes.py for the format. It ends
with that, and where its parent does. Each request may use so much time of the processor, and all of them so much
memory, beyond which the process ends; one that a request has left large ends after its response. NICE is its nice
value. If the machine or the container has no memory left, the kernel ends this process before its parent.
"""

import gc
import logging
import os
import pickle
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

_LEFT_LARGE = 256 * 1024**2


def _main(connection: socket.socket, max_time_s: float) -> None:
    from headrace_transformer.processes.body_processes import (
        DONE,
        ERROR,
        LAST,
        REQUEST,
        RESPONSE,
        SMALL_BYTES,
        received,
    )

    while True:
        try:
            head, body = REQUEST.unpack(received(connection, REQUEST.size))
            request = received(connection, head)
            data = received(connection, body)
        except OSError:
            return
        signal.setitimer(signal.ITIMER_PROF, max_time_s)
        status, answer, contents = DONE, b"", b""
        try:
            work, arguments = pickle.loads(request)  # noqa: S301  # It is the parent's.
            result, contents = work(data, *arguments)
            answer = pickle.dumps(result, protocol=5)
        except Exception as error:
            status, answer, contents = ERROR, _as_pickle(error), b""
        work = arguments = result = None
        signal.setitimer(signal.ITIMER_PROF, 0)
        status |= LAST * _is_large()
        head = RESPONSE.pack(status, len(answer), len(contents)) + answer
        if len(contents) <= SMALL_BYTES:  # At once, so that the other side is woken once.
            head, contents = head + contents, b""
        connection.sendall(head)
        connection.sendall(contents)
        data = contents = b""


def _as_pickle(error: Exception) -> bytes:
    from headrace.errors import HeadraceError, RequestFailedError, TooLargeError
    from headrace_transformer.processes.body_processes import nested_too_deep

    if isinstance(error, (MemoryError, SystemError)):  # orjson raises the latter.
        error = TooLargeError("reading or writing the body takes too much memory")
    if isinstance(error, RecursionError):
        error = nested_too_deep()
    if not isinstance(error, HeadraceError):
        logging.getLogger(__name__).error("a body's work failed", exc_info=error)
        error = RequestFailedError("internal error")
    state: dict[str, Any] = {**error.__dict__}
    state.pop("__notes__", None)
    return pickle.dumps((type(error), state))


def lower_priority(niceness: int) -> None:
    """Lowers this process's priority, also that of its session where Linux schedules by session."""
    os.nice(niceness)
    with suppress(OSError), open("/proc/self/autogroup", "w") as group:
        group.write(str(niceness))


def _is_large() -> bool:
    # The most that it ever had is cheaper to ask for than what it has.
    if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 <= _LEFT_LARGE:
        return False
    with suppress(OSError), open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() > _LEFT_LARGE
    return False


if __name__ == "__main__":
    gc.disable()  # It would scan millions of new lists repeatedly; the memory left after a request is measured instead.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's, which takes memory for each core.
    from headrace.processes import end_with_parent
    from headrace_transformer.processes import body_processes  # noqa: F401  # The first call waits for what starts.

    end_with_parent(int(sys.argv[1]))
    lower_priority(int(sys.argv[4]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[3]), int(sys.argv[3])))
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with socket.socket(fileno=sys.stdin.fileno()) as requests:
        _main(requests, float(sys.argv[2]))
