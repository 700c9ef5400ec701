"""Converts records to verdicts and printed tables. Pure."""

from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

from bench.cases import HEADRACE, TARGETS, Target
from bench.statistics import estimate, paired_ratios

Record = Mapping[str, Any]


def series(record: Record, contender: str, figure: str) -> list[float]:
    """One figure of one contender, one value for each round; empty if it is absent."""
    return [one["figures"][contender][figure] for one in record["rounds"] if contender in one["figures"]]


def verdicts(records: Mapping[str, Record]) -> list[dict[str, Any]]:
    """Every target compared with the records; `met` is None without a measurement."""
    return [_verdict(target, records.get(target.case)) for target in TARGETS]


def _verdict(target: Target, record: Record | None) -> dict[str, Any]:
    verdict: dict[str, Any] = {**asdict(target), "met": None}
    if record is None:
        return {**verdict, "reason": "not measured"}
    for contender in filter(None, (HEADRACE, target.peer)):
        if not series(record, contender, record["measure"]):
            return {**verdict, "reason": f"{contender}: {record['absent'].get(contender, 'not measured')}"}
    values = series(record, HEADRACE, record["measure"])
    if target.peer:
        values = paired_ratios(values, series(record, target.peer, record["measure"]))
    found = estimate(values)
    return {**verdict, **asdict(found), "met": found.reaches(target.at_least, target.at_most)}


def case_table(name: str, record: Record) -> str:
    """A case's contenders with the medians of their figures."""
    lines = [f"\n{name}: {len(record['rounds'])} rounds"]
    for contender in record["contenders"]:
        figures = record["rounds"][0]["figures"][contender]
        medians = (f"{figure} {median(series(record, contender, figure)):.4g}" for figure in figures)
        lines.append(f"  {contender:<24}" + "  ".join(f"{text:<22}" for text in medians).rstrip())
    lines += [f"  {contender:<24}absent: {reason}" for contender, reason in record["absent"].items()]
    return "\n".join(lines)


def target_table(targets: list[dict[str, Any]]) -> str:
    """Each target with headrace's median, its interval, and whether that reaches the target."""
    lines = [f"\n{'case':<26}{'against':<24}{'target':<10}{'median':<10}{'95 % interval':<18}met"]
    for target in targets:
        bound = f">= {target['at_least']}" if target["at_least"] is not None else f"<= {target['at_most']}"
        start = f"{target['case']:<26}{target['peer'] or '-':<24}{bound:<10}"
        if target["met"] is None:
            lines.append(f"{start}{target['reason']}")
        else:
            interval = f"{target['low']:.3g} to {target['high']:.3g}"
            lines.append(f"{start}{target['median']:<10.3g}{interval:<18}{'yes' if target['met'] else 'NO'}")
    return "\n".join(lines)
