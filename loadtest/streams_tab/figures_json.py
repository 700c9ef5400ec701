"""The figures as the tab and the HTML report draw them; times in milliseconds, rates a second."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from locust.runners import STATE_RUNNING, STATE_SPAWNING, MasterRunner

from loadtest import figures
from loadtest.figures import PROCESSOR_FULL, Figures
from loadtest.measures import chart_points
from loadtest.session import WORKERS_DELAY_S, Session

WINDOW_S = 10
_POINTS = 600  # Of a chart.
_MEASURES = (figures.TTFT, figures.SERVER_TTFT, figures.GAP, figures.WHOLE, figures.CANCEL)
_SHARES = (0.5, 0.9, 0.99)


def live(session: Session) -> dict[str, Any]:
    """Of the last seconds, and of the whole test so far, with its course."""
    delay = WORKERS_DELAY_S if isinstance(session.environment.runner, MasterRunner) else 0
    latest = session.measures.latest(WINDOW_S, delay)
    # The page shows records itself, also where the browser cannot call the gateway.
    return {
        **_common(session, "./streams/records/"),
        "window_s": WINDOW_S,
        "rows": rows(latest, _elapsed(session, WINDOW_S)),
        "whole": {"window_s": _lasted(session), "rows": rows(session.measures.total, _lasted(session))},
        "runs": session.environment.runner.state in (STATE_RUNNING, STATE_SPAWNING),
        "full": _full(latest),
    }


def whole(session: Session) -> dict[str, Any]:
    """Of the whole test, for the report."""
    total, lasted = session.measures.total, _lasted(session)
    gateway = (session.environment.parsed_options.links or session.gateway.address.url).rstrip("/")
    records = f"{gateway}/headrace/v1/payloads?request_id="
    return {**_common(session, records), "window_s": lasted, "rows": rows(total, lasted), "full": _full(total)}


def rows(found: Figures, seconds: float) -> list[dict[str, Any]]:
    """One object a row: rates over `seconds`, quantiles."""
    result = []
    for row in found.rows:
        share = found.good_share([row])
        result.append(
            {
                "row": row,
                "requests": found.count(figures.REQUESTS, [row]) / seconds,
                "failed": found.count(figures.FAILED, [row]) / seconds,
                "goodput": found.count(figures.GOOD, [row]) / seconds,
                "good_percent": None if share is None else 100 * share,
                "tokens": found.count(figures.TOKENS, [row]) / seconds,
                "messages": found.count(figures.MESSAGES, [row]) / seconds,
                **{measure.replace(" ", "_"): found.of(measure, [row]).quantiles(_SHARES) for measure in _MEASURES},
            }
        )
    return result


def _common(session: Session, records: str) -> dict[str, Any]:
    """`records`: the address of a request's records, without its id."""
    slowest = session.measures.total.slowest
    session.shown.extend(request.request_id for request in slowest if request.request_id not in session.shown)
    return {
        "objective": str(session.options.objective),
        "course": _course(session),
        "predictors": _predictors(session),
        "slowest": [_linked(session, records, request) for request in slowest],
        "knee": session.knee,
        "failed_total": session.measures.total.count(figures.FAILED),
        "requests_total": session.measures.total.count(figures.REQUESTS),
    }


def _course(session: Session) -> list[dict[str, Any]]:
    session.note_course()
    return chart_points([point for _, point in sorted(session.course.items())], _POINTS)


def _predictors(session: Session) -> list[dict[str, Any]]:
    latest = session.predictors[-1][1] if session.predictors else {}
    return [{"name": name, **state._asdict()} for name, state in latest.items()]


def _linked(session: Session, records: str, request: figures.SlowRequest) -> dict[str, Any]:
    """With links to its record and its trace."""
    trace = session.trace_page + request.trace_id if session.trace_page and request.trace_id else ""
    return {**asdict(request), "record": records + request.request_id, "trace": trace}


def _lasted(session: Session) -> int:
    """The seconds of the whole test."""
    session.note_course()
    return max(session.course) - min(session.course) + 1 if session.course else 1


def _elapsed(session: Session, window_s: int) -> int:
    """Of the window, the seconds since the first figures."""
    seconds = session.measures.seconds
    return max(1, min(window_s, int(time.time()) - next(iter(seconds)))) if seconds else window_s


def _full(found: Figures) -> bool:
    return found.processor >= PROCESSOR_FULL
