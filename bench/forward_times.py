"""Counters of a predictor's forward passes in a file that another process can read: steps, and nanoseconds.

The wall time and the processor time of the engine's thread; with one thread the latter is all that the passes cost.
"""

import mmap
import struct
import time
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "FORWARD_TIMES"  # The file's path, in the predictor's environment.
_LAYOUT = struct.Struct("=QQQ")


class ForwardTimes(NamedTuple):
    """Totals since the start."""

    steps: int
    wall_s: float
    cpu_s: float


def read(path: Path) -> ForwardTimes:
    steps, wall_ns, cpu_ns = _LAYOUT.unpack(path.read_bytes())
    return ForwardTimes(steps, wall_ns / 1e9, cpu_ns / 1e9)


def timed(runner: type[Any], path: Path) -> type[Any]:
    """A class of runners that counts in a file."""
    path.write_bytes(bytes(_LAYOUT.size))
    with path.open("r+b") as file:
        counters = mmap.mmap(file.fileno(), _LAYOUT.size)

    class TimedRunner(runner):  # type: ignore[misc]
        def run(self, rows: Any) -> Any:
            wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
            logits = super().run(rows)
            steps, wall_before_ns, cpu_before_ns = _LAYOUT.unpack_from(counters)
            wall_ns = wall_before_ns + time.perf_counter_ns() - wall_ns
            _LAYOUT.pack_into(counters, 0, steps + 1, wall_ns, cpu_before_ns + time.thread_time_ns() - cpu_ns)
            return logits

    return TimedRunner
