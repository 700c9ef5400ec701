"""The tab "Streams" of Locust's page, and the same figures in its HTML report; times in milliseconds, rates a second.

Locust has a place for tabs of others (`extended_tabs`), whose content can be a table alone. The tab is therefore empty
there, and a script of ours, which the page gets beside its own, shows a section below while the tab is chosen. The
report contains the script, its style and the figures, so that the file stands alone.
"""

import json
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gevent
from flask import Blueprint, Response, jsonify, request, send_from_directory
from locust.runners import STATE_CLEANUP, STATE_RUNNING, STATE_SPAWNING, STATE_STOPPING, MasterRunner

from loadtest import figures
from loadtest.figures import PROCESSOR_FULL, Figures
from loadtest.gateway import GatewayError, parse_address
from loadtest.measures import chart_points
from loadtest.options import parse
from loadtest.session import WORKERS_DELAY_S, Session

_FOLDER = Path(__file__).parent
_END = "</body>"
_INDEX, _SWARM, _STATISTICS, _REPORT = "locust.index", "locust.swarm", "locust.request_stats", "locust.stats_report"
_STOP_POLL_S, _STOP_S = 0.05, 60.0

WINDOW_S = 10
_POINTS = 600  # Of a chart.
_MEASURES = (figures.TTFT, figures.SERVER_TTFT, figures.GAP, figures.WHOLE, figures.CANCEL)
_SHARES = (0.5, 0.9, 0.99)


def add_to(web_ui: Any, session: Session) -> None:
    """Adds the tab, its routes, and the check of the form to Locust's page."""
    web_ui.template_args["extended_tabs"] = [{"title": "Streams", "key": "streams"}]
    # The form shows its fields in the order of the JSON in the page.
    web_ui.app.jinja_env.policies["json.dumps_kwargs"] = {"sort_keys": False}
    blueprint = Blueprint("streams", __name__, url_prefix=f"{session.environment.parsed_options.web_base_path}/streams")

    @blueprint.route("/figures")
    @web_ui.auth_required_if_enabled
    def show_figures() -> Response:
        return jsonify(live(session))

    @blueprint.route("/records/<request_id>")
    @web_ui.auth_required_if_enabled
    def show_record(request_id: str) -> Response:
        """Of a request of this page alone: the load test's key may be allowed to read all records."""
        if request_id not in session.shown:
            return Response("not a request of this page", status=404, mimetype="text/plain")
        try:
            return jsonify(session.gateway.records(request_id=request_id))
        except GatewayError as error:
            return Response(str(error), status=502, mimetype="text/plain")

    @blueprint.route("/<any('panel.js', 'panel.css'):name>")
    def send_file(name: str) -> Response:
        return send_from_directory(_FOLDER, name)

    @web_ui.app.before_request
    def check_form() -> Response | None:
        """A malformed field is refused before users start."""
        if request.endpoint != _SWARM:
            return None
        try:
            parse(Namespace(**{**vars(session.environment.parsed_options), **request.form.to_dict()}))
            parse_address(request.form.get("host") or session.host)
        except ValueError as error:
            return jsonify({"success": False, "message": str(error), "host": session.environment.host})
        return None

    @web_ui.app.before_request
    def await_stop() -> None:
        """A page that has read that a test is about to stop asks no more, and would show that for ever."""
        if request.endpoint == _STATISTICS:
            with gevent.Timeout(_STOP_S, False):
                while session.environment.runner.state in (STATE_CLEANUP, STATE_STOPPING):
                    gevent.sleep(_STOP_POLL_S)

    @web_ui.app.after_request
    def add_section(response: Response) -> Response:
        if response.status_code == 200 and request.endpoint == _INDEX:
            links = '<link rel="stylesheet" href="./streams/panel.css"><script src="./streams/panel.js" defer></script>'
            response.set_data(response.get_data(as_text=True).replace(_END, links + _END))
        elif response.status_code == 200 and request.endpoint == _REPORT:
            response.set_data(with_section(response.get_data(as_text=True), session))
        return response

    web_ui.app.register_blueprint(blueprint)


def add_to_file(path: str | None, session: Session) -> None:
    """Adds the figures to the report that Locust has written, if it has."""
    if path and (file := Path(path)).is_file():
        file.write_text(with_section(file.read_text(encoding="utf-8"), session), encoding="utf-8")


def with_section(page: str, session: Session) -> str:
    """A report with the figures of the whole test at its end."""
    # Within a script element "<" could end it.
    figures = json.dumps(whole(session)).replace("<", "\\u003c")
    style, script = ((_FOLDER / name).read_text(encoding="utf-8") for name in ("panel.css", "panel.js"))
    section = f"<style>{style}</style><script>window.streamsFigures = {figures};</script><script>{script}</script>"
    head, end, tail = page.rpartition(_END)
    return f"{head}{section}{end}{tail}"


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


def rows(found: Figures, seconds: int) -> list[dict[str, Any]]:
    """One object a row: rates over `seconds`, quantiles."""
    return [
        {
            "row": row,
            **found.rates(seconds, row),
            **{measure.replace(" ", "_"): found.of(measure, row).quantiles(_SHARES) for measure in _MEASURES},
        }
        for row in found.rows
    ]


def _common(session: Session, records: str) -> dict[str, Any]:
    """`records`: the address of a request's records, without its id."""
    session.note_course()
    slowest = session.measures.total.slowest
    session.shown.extend(request.request_id for request in slowest if request.request_id not in session.shown)
    return {
        "objective": str(session.options.objective),
        "course": chart_points([point for _, point in sorted(session.course.items())], _POINTS),
        "predictors": _predictors(session),
        "slowest": [_linked(session, records, request) for request in slowest],
        "knee": session.knee,
        "failed_total": session.measures.total.count(figures.FAILED),
        "requests_total": session.measures.total.count(figures.REQUESTS),
    }


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
