"""The tab "Streams" of Locust's page, and the same figures in its HTML report.

Locust has a place for tabs of others (`extended_tabs`), whose content can be a table alone. The tab is therefore empty
there, and a script of ours, which the page gets beside its own, shows a section below while the tab is chosen. The
report contains the script, its style and the figures, so that the file stands alone.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import gevent
from flask import Blueprint, Response, jsonify, request, send_from_directory
from locust.runners import STATE_CLEANUP, STATE_STOPPING

from loadtest.gateway import GatewayError, parse_address
from loadtest.options import parse
from loadtest.session import Session
from loadtest.streams_tab.figures_json import live, whole

_FOLDER = Path(__file__).parent
_END = "</body>"
_INDEX, _SWARM, _STATISTICS, _REPORT = "locust.index", "locust.swarm", "locust.request_stats", "locust.stats_report"
_STOP_POLL_S, _STOP_S = 0.05, 60.0


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
