"""`python -m tests.chaos --seconds 180 --seeds 1,2,3`: the fault suite, behind `make chaos`.

Each seed has a stack of its own; the same seed injects the same faults and sends the same requests, at times that the
machine decides. Writes the results as JSON, and exits with 1 if anything went wrong.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.chaos.run import Outcome, run_seed

_RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "chaos.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0, help="of load, for each seed")
    parser.add_argument("--seeds", default="1,2,3", help="comma list of whole numbers")
    parser.add_argument("--out", type=Path, help=f"where the figures go, such as {_RESULTS}")
    arguments = parser.parse_args()
    outcomes = []
    for seed in map(int, arguments.seeds.split(",")):
        outcomes.append(_run(seed, arguments.seconds))
        _print(outcomes[-1])
    if arguments.out is not None:
        report = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds_each": arguments.seconds,
            "seeds": [outcome.figures() for outcome in outcomes],
        }
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    failed = [str(outcome.seed) for outcome in outcomes if outcome.failures]
    if failed:
        print(f"FAILED; again: python -m tests.chaos --seconds {arguments.seconds:g} --seeds {','.join(failed)}")
    return bool(failed)


def _run(seed: int, seconds: float) -> Outcome:
    print(f"seed {seed}: {seconds:g} s", flush=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        outcome = asyncio.run(run_seed(seed, seconds, Path(folder)))
    print(f"seed {seed} took {time.monotonic() - begun:.0f} s")
    return outcome


def _print(outcome: Outcome) -> None:
    figures = outcome.figures()
    for name, value in figures.items():
        if name != "failures":
            of_each = isinstance(value, dict)
            print(f"  {name}: {', '.join(f'{what} {number}' for what, number in value.items()) if of_each else value}")
    for failure in figures["failures"]:
        print(f"  FAILURE {failure}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
