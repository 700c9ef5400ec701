"""Two pictures of what telemetry tells, each drawn from a recording of a real stack.

`record trace` makes a streamed chat request with a trace of its caller's, keeps every span of it in
bench/results/trace.json, and draws them as a waterfall, trace.svg; with --resume those of a second one too, whose
predictor is killed in the middle of the answer. `record metrics` loads a stack with two predictors for two minutes,
over gRPC and HTTP, with a surge, callers who leave and a predictor that is killed, keeps what Prometheus has of it in
stream_metrics.json, and draws stream_metrics.svg; it needs Debian's package `prometheus`.

`draw` draws both again from what is recorded, and needs no stack.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.spans import Span
from bench.telemetry_figures import draw_figures
from bench.waterfall import Trace, waterfall

RESULTS = Path(__file__).resolve().parent / "results"


def draw_traces(told: Mapping[str, Any]) -> str:
    """The picture of a recording (telemetry_recording.py)."""
    traces = told["traces"].items()
    return waterfall([Trace(title, tuple(Span.from_json(span) for span in spans)) for title, spans in traces])


# Name of a recording and of its picture → how it is drawn.
DRAWN: Mapping[str, Callable[[Mapping[str, Any]], str]] = {"trace": draw_traces, "stream_metrics": draw_figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the recordings and the pictures")
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="run a stack, keep what it tells, and draw it")
    record.add_argument("what", choices=("trace", "metrics", "all"), nargs="?", default="all")
    record.add_argument("--resume", action="store_true", help="trace: also a stream whose predictor is killed")
    record.add_argument("--seconds", type=float, default=120.0, help="metrics: of load")
    commands.add_parser("draw", help="draw what is recorded")
    arguments = parser.parse_args()
    if arguments.command == "record":
        asyncio.run(_record(arguments))
    for name, drawn in DRAWN.items():
        if (recording := arguments.folder / f"{name}.json").exists():
            picture = recording.with_suffix(".svg")
            picture.write_text(drawn(json.loads(recording.read_text())))
            print(picture)


async def _record(arguments: argparse.Namespace) -> None:
    # Only here: drawing needs nothing that a stack does.
    from bench.telemetry_recording import record_metrics, record_traces, written

    if arguments.what in ("trace", "all"):
        (arguments.folder / "trace.json").write_text(written(await record_traces(arguments.resume)))
    if arguments.what in ("metrics", "all"):
        (arguments.folder / "stream_metrics.json").write_text(written(await record_metrics(arguments.seconds)))


if __name__ == "__main__":
    main()
