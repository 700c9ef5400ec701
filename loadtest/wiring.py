"""Connects the load test to Locust's events: options, sessions, what workers report, exit code, page."""

import logging
from typing import Any

import gevent
from locust import events
from locust.runners import WorkerRunner

from loadtest import options, streams_tab
from loadtest.figures import verdicts
from loadtest.gateway import GatewayError, parse_address
from loadtest.session import Session, session_of

_log = logging.getLogger(__name__)

_REPORTED = "headrace"
_connected: dict[str, Any] = {"environment": None}


@events.init_command_line_parser.add_listener
def _add_options(parser: Any) -> None:
    """Locust makes its parser anew each time it shows its form; then the stack's models are known."""
    environment = _connected["environment"]
    models: list[str] = []
    if environment is not None and environment.web_ui is not None:
        session: Session = session_of(environment)
        try:
            models = session.gateway.models()
        except (GatewayError, ValueError) as error:
            _log.info("the stack's models are unknown: %s", error)
        given = environment.parsed_options.model
        models += [] if given in (*models, options.AUTOMATIC) else [given]
    options.add_fields(parser, models)


@events.init.add_listener
def _begin(environment: Any, **_: Any) -> None:
    # The event loop's time is that of before the imports: --run-time would be shorter by as much.
    gevent.get_hub().loop.update_now()
    try:
        session = session_of(environment)
        parse_address(session.host)
    except ValueError as error:
        raise SystemExit(f"load test: {error}") from None
    _connected["environment"] = environment
    if isinstance(environment.runner, WorkerRunner):

        def report(client_id: str, data: dict[str, Any]) -> None:
            data[_REPORTED] = session.measures.drain()

        environment.events.report_to_master.add_listener(report)
    else:

        def absorb(client_id: str, data: dict[str, Any]) -> None:
            session.measures.absorb(data.get(_REPORTED, []))

        environment.events.worker_report.add_listener(absorb)
    if environment.web_ui is not None:
        streams_tab.add_to(environment.web_ui, session)


@events.test_start.add_listener
def _start(environment: Any, **_: Any) -> None:
    try:
        session_of(environment).start()
    except ValueError as error:
        _log.error("load test: %s", error)


@events.test_stop.add_listener
def _stop(environment: Any, **_: Any) -> None:
    session_of(environment).stop()


@events.reset_stats.add_listener
def _reset() -> None:
    session_of(_connected["environment"]).measures.reset()


@events.quit.add_listener
def _add_to_report(exit_code: int) -> None:
    """Locust has written its HTML report by now."""
    environment = _connected["environment"]
    if environment is not None and not isinstance(environment.runner, WorkerRunner):
        streams_tab.add_to_file(environment.parsed_options.html_file, session_of(environment))


@events.quitting.add_listener
def _set_exit_code(environment: Any, **_: Any) -> None:
    """At the end of a run with `--check`: 1 unless every row has requests and enough of them were good."""
    if not environment.parsed_options.check or isinstance(environment.runner, WorkerRunner):
        return
    session = session_of(environment)
    found = verdicts(session.measures.total, session.options.good_percent)
    for row, (held, words) in found.items():
        _log.info("%s %s: %s", "held  " if held else "BROKEN", row, words)
    if not found:
        _log.error("no request was measured")
    environment.process_exit_code = 0 if found and all(held for held, _ in found.values()) else 1
