"""Compares the engine with its peers: `make bench`, or `python -m bench.engine --help`.

Each contender is one process on the same core, with the same weights, loaded and warmed up before the first round. In a
round every contender runs once, alone, with the same fresh random prompts, in a new random order; so the figures of a
round are pairs. Ratios are those of pairs (bench/statistics.py). Cases that are not measured keep their records in
the results file.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from bench.cases import CASES, GENERATE, PROMPT_IDS, Case
from bench.contenders import CONTENDERS, ROOT
from bench.report import case_table, target_table, verdicts
from bench.runs import machine
from bench.worker_process import ENVIRONMENT, ContenderError, WorkerProcess

_STATE = ROOT / ".run" / "bench"


def main() -> None:
    options = _parse_options()
    chosen = [case for case in CASES if not options.only or any(case.name.startswith(name) for name in options.only)]
    if not chosen:
        raise SystemExit(f"no case begins with {' or '.join(options.only)}; there are: {', '.join(_names())}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    (_STATE / "logs").mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "bench.architectures", str(_STATE / "models")], cwd=ROOT, check=True)
    absent = {name: reason for name in options.contenders if (reason := CONTENDERS[name].install())}
    try:
        _measure_all(chosen, options, absent)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(target_table(json.loads(options.out.read_text())["targets"]))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"cases: {', '.join(_names())}\ncontenders: {', '.join(CONTENDERS)}",
    )
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds of each case (default 9)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="CASE", help="cases that begin with this; repeatable"
    )
    parser.add_argument(
        "--contenders",
        type=lambda text: text.split(","),
        default=list(CONTENDERS),
        metavar="A,B",
        help="only these (default all); the record then has no others",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "bench" / "results" / "engine.json",
        help="results (default bench/results/engine.json)",
    )
    parser.add_argument(
        "--core", type=int, default=max(os.sched_getaffinity(0)), help="where all work (default the last)"
    )
    options = parser.parse_args()
    unknown = set(options.contenders) - CONTENDERS.keys()
    if unknown or options.rounds < 1:
        parser.error(f"no such contender: {', '.join(unknown)}" if unknown else "--rounds must be at least 1")
    return options


def _names() -> list[str]:
    return [case.name for case in CASES]


def _measure_all(chosen: list[Case], options: argparse.Namespace, absent: dict[str, str]) -> None:
    for model, group in groupby(chosen, key=lambda case: case.model):
        cases = list(group)
        names = [n for n in options.contenders if any(n in case.contenders for case in cases)]
        unavailable = {name: absent[name] for name in names if name in absent}
        with ExitStack() as stack:
            workers: dict[str, WorkerProcess] = {}
            for name in names:
                if name in unavailable:
                    continue
                log = _STATE / "logs" / f"{model}-{name}.log"
                folder = _STATE / "models" / model
                try:
                    workers[name] = WorkerProcess(CONTENDERS[name], folder, log, options.core)
                    stack.callback(workers[name].stop)
                except ContenderError as error:
                    unavailable[name] = str(error)
            for case in cases:
                reasons = {name: reason for name, reason in unavailable.items() if name in case.contenders}
                entered = {name: worker for name, worker in workers.items() if name in case.contenders}
                record = _measure(case, entered, options.rounds, reasons)
                _save(options.out, case, record)
                print(case_table(case.name, record), flush=True)


def _measure(case: Case, workers: dict[str, WorkerProcess], rounds: int, absent: dict[str, str]) -> dict[str, Any]:
    """One case's record. A contender that fails in any round is absent in all."""
    draw = random.Random(f"{case.name} {rounds}")  # noqa: S311  # The same prompts at every run.
    entered = dict(workers)
    agreement = _warm_up(case, entered, absent, _load(case, draw))
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine() | {"environment": ENVIRONMENT},
        "model": case.model,
        "callers": case.callers,
        "prompt_tokens": case.prompt_tokens,
        "new_tokens": case.new_tokens,
        "batches": case.batches,
        "measure": case.measure,
        "contenders": {name: worker.ready for name, worker in entered.items()},
        "first_ids_as_generate": agreement,
        "absent": absent,
        "rounds": [],
    }
    for _ in range(rounds):
        load = _load(case, draw)
        order = draw.sample(sorted(entered), len(entered))
        figures = {}
        for name in order:
            try:
                figures[name] = _figures(entered[name].ask(case.command, **load))
            except ContenderError as error:
                absent[name] = str(error)
                del entered[name]
        record["rounds"].append({"order": order, "figures": figures})
    for one in record["rounds"]:
        one["figures"] = {name: figures for name, figures in one["figures"].items() if name in entered}
    record["contenders"] = {name: ready for name, ready in record["contenders"].items() if name in entered}
    return record


def _warm_up(
    case: Case, entered: dict[str, WorkerProcess], absent: dict[str, str], load: Mapping[str, Any]
) -> dict[str, float]:
    """Runs each contender once; returns the shares of prompts whose first id equals that of `generate`."""
    first_ids = {}
    for name, worker in list(entered.items()):
        try:
            answer = worker.ask(case.command, **load)
        except ContenderError as error:
            absent[name] = str(error)
            del entered[name]
        else:
            first_ids[name] = [ids[0] for ids in answer.get("output_ids", [])]
    reference = first_ids.get(GENERATE)
    if not reference:
        return {}
    return {
        name: sum(a == b for a, b in zip(ids, reference, strict=True)) / len(reference)
        for name, ids in first_ids.items()
    }


def _load(case: Case, draw: random.Random) -> dict[str, Any]:
    """A command's arguments: fresh prompts, so that no cache of an earlier round helps."""
    batches = [
        [draw.choices(PROMPT_IDS, k=case.prompt_tokens) for _ in range(case.callers)] for _ in range(case.batches)
    ]
    return {"batches": batches, "new_tokens": case.new_tokens}


def _figures(answer: Mapping[str, Any]) -> dict[str, float]:
    """The recorded figures of a worker's answer. `cpu_share` below 1 means that other processes used the core."""
    if "tokens" not in answer:
        return dict(answer)
    return {
        "tokens_per_s": answer["tokens"] / answer["seconds"],
        "ttft_ms": median(answer["first_token_s"]) * 1e3,
        "cpu_share": answer["cpu_seconds"] / answer["seconds"],
        "seconds": answer["seconds"],
    }


def _save(path: Path, case: Case, record: dict[str, Any]) -> None:
    """Replaces the case's record in the results."""
    records = json.loads(path.read_text())["cases"] if path.exists() else {}
    records[case.name] = record
    records = {name: records[name] for name in _names() if name in records}
    path.write_text(json.dumps({"cases": records, "targets": verdicts(records)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
