"""Whether the memory of any process grows: half an hour of tensor calls through the stack as `make up` starts it.

The cases of the transport benchmark take turns, 16 callers each: 262 KB and 2.4 MB echoed, 64 bytes, streams of 64
messages, the same through a model with a processor. The resident memory of each process is read between two turns. The
first minutes, in which allocators and caches fill, are not counted; `growth_mb_a_minute` is the slope of a line through
all later readings, by least squares.

`python -m bench.memory` writes bench/results/memory.json; half an hour.
"""

import asyncio
import time
from collections import Counter, defaultdict
from itertools import cycle
from typing import Any

import numpy as np
import psutil
import uvloop

from bench.processes import roles
from bench.runs import machine, parser, write
from bench.tensor_client import clients
from bench.transport_servers import CONTENDERS, HEADRACE, SERVERS

_TURNS = [(name, case) for name in (HEADRACE, "headrace-processor") for case in ("tok", "img", "tiny", "stream")]
_TURN_S = 7.0
_CLIENT_PROCESSES = 2


def main() -> None:
    options = parser(__doc__, "memory")
    options.add_argument("--minutes", type=float, default=30.0)
    options.add_argument("--warm-up", type=float, default=5.0, help="minutes of them that are not counted")
    arguments = options.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        readings, answers, failures = loop.run(_measure(60 * arguments.minutes))
    report = {
        "machine": machine(),
        "minutes": arguments.minutes,
        "answers": dict(answers),
        "failures": dict(failures),
        "processes": {role: _report(found, 60 * arguments.warm_up) for role, found in sorted(readings.items())},
    }
    write(arguments.out, report)
    print(f"answers {dict(answers)}, failures {dict(failures)}")
    for role, figures in report["processes"].items():
        print(f"{role:28}", "  ".join(f"{name} {value}" for name, value in figures.items()))


async def _measure(seconds: float) -> tuple[dict[str, list[tuple[float, float]]], Counter[str], Counter[str]]:
    """Each process's memory, in MB, by the seconds since the start; answers by case; failures by reason."""
    readings: dict[str, list[tuple[float, float]]] = defaultdict(list)
    answers: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    async with SERVERS[HEADRACE]() as server, clients(_CLIENT_PROCESSES) as load_clients:
        began = time.monotonic()
        for name, case in cycle(_TURNS):
            if (now := time.monotonic() - began) >= seconds:
                return readings, answers, failures
            for pid, role in roles(server.roots).items():
                readings[role].append((now, psutil.Process(pid).memory_info().rss / 2**20))
            begin = time.monotonic()
            load = await load_clients.measure(CONTENDERS[name].target(server, case), case, begin, begin + _TURN_S)
            answers[f"{name} {case}"] += len(load.took_s)
            failures.update(load.failures)
    raise AssertionError("cycle does not end")


def _report(readings: list[tuple[float, float]], warm_up_s: float) -> dict[str, Any]:
    counted = [(at, size) for at, size in readings if at >= warm_up_s] or readings
    times, sizes = np.array(counted).T
    slope = np.polyfit(times / 60, sizes, 1)[0] if len(counted) > 1 else 0.0
    quarter = max(1, len(sizes) // 4)
    return {
        "first_quarter_mb": round(float(np.median(sizes[:quarter])), 1),
        "last_quarter_mb": round(float(np.median(sizes[-quarter:])), 1),
        "most_mb": round(float(sizes.max()), 1),
        "growth_mb_a_minute": round(float(slope), 3),
    }


if __name__ == "__main__":
    main()
