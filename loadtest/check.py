"""`--check`: the exit code of a run without the page says whether the objective was met."""

from __future__ import annotations

import logging
from typing import Any

from locust.runners import WorkerRunner

from loadtest import figures
from loadtest.session import session_of

_log = logging.getLogger(__name__)


def verdicts(total: figures.Figures, least_share: float) -> dict[str, tuple[bool, str]]:
    """Row → whether enough of its requests were good, and the figures in words."""
    result = {}
    for row in total.rows:
        requests = total.count(figures.REQUESTS, [row])
        share = total.good_share([row]) or 0.0
        words = [f"{100 * share:.1f} % of {requests} requests good, {total.count(figures.FAILED, [row])} failed"]
        for measure in (figures.TTFT, figures.GAP, figures.WHOLE, figures.CANCEL):
            quantiles = total.of(measure, [row]).quantiles((0.5, 0.99))
            if quantiles:
                words.append(f"{measure} p50 {quantiles['p50']:.1f} ms, p99 {quantiles['p99']:.1f} ms")
        result[row] = (requests > 0 and share >= least_share, "; ".join(words))
    return result


def set_exit_code(environment: Any, **_: Any) -> None:
    """At the end of a run with `--check`: 1 unless every row has requests and enough of them were good."""
    if not environment.parsed_options.check or isinstance(environment.runner, WorkerRunner):
        return
    session = session_of(environment)
    found = verdicts(session.measures.total, session.options.good_share)
    for row, (held, words) in found.items():
        _log.info("%s %s: %s", "held  " if held else "BROKEN", row, words)
    if not found:
        _log.error("no request was measured")
    environment.process_exit_code = 0 if found and all(held for held, _ in found.values()) else 1
