"""The load test reads the predictors' state from the gateway only, and continues while that does not answer."""

import json
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from loadtest.gateway import Gateway, parse_address
from loadtest.predictors import PredictorHistory, Reading, State

LOAD = {"model": "m", "running": 4, "waiting": 1, "waiting_tokens": 8, "cache_free": 0.75}
PREDICTORS = {"predictors": [{"name": "predictor-0", "ready": True, "leaving": False, "models": [LOAD]}]}


@pytest.fixture
def server():
    """Sends each (status, body) of `answers` once, and records the requests' paths and keys."""
    requests, answers = [], deque()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append((self.path, self.headers["authorization"]))
            status, body = answers.popleft()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        httpd.requests, httpd.answers = requests, answers
        thread = Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield httpd
        httpd.shutdown()
        thread.join()


def test_a_second_without_an_answer_is_left_out(server):
    gateway = Gateway(parse_address(f"http://127.0.0.1:{server.server_port}"), "k")
    history = PredictorHistory()
    server.answers.extend([(200, PREDICTORS), (503, {"error": "no transformer"}), (200, {"predictors": []})])
    for second in (1, 2, 3):
        history.read(gateway, second)
    assert list(history.readings) == [Reading(1, {"predictor-0": State(4, 1, 0.25)})]
    assert server.requests == [("/headrace/v1/predictors", "Bearer k")] * 3
