"""The page of metrics answers, a taken port is reported in one line, and the pages of several workers are one.

Spans leave past the proxy of the environment.
"""

import os
import socket
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from headrace.errors import StartupError
from headrace.telemetry.page import MetricsPage, WorkerPages
from tests.prometheus import read_page
from tests.support.otlp_receiver import OtlpReceiver


def read(port):
    return {(sample.name, *sorted(sample.labels.items())): sample.value for sample in read_page(port)}


@pytest.fixture
def pages():
    opened = []

    def open_page(registry, port=0):
        opened.append(MetricsPage("127.0.0.1", port, registry))
        return opened[-1]

    yield open_page
    for page in opened:
        page.close()
        assert not page._thread.is_alive()


def worker(calls):
    registry = CollectorRegistry()
    Counter("calls", "Calls.", ["method"], registry=registry).labels("Generate").inc(calls)
    Histogram("seconds", "Seconds.", buckets=[1, 2], registry=registry).observe(calls)
    return registry


def test_a_taken_port_is_reported_in_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port} cannot be listened on for the metrics page"):
            MetricsPage("127.0.0.1", port)


def test_the_pages_of_workers_are_joined_but_for_one_that_does_not_answer(pages, caplog):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        ports = {"0": pages(worker(3)).port, "1": pages(worker(1)).port, "2": closed.getsockname()[1]}
    registry = CollectorRegistry()
    registry.register(WorkerPages(lambda: ports))
    values = read(pages(registry).port)
    assert values["calls_total", ("method", "Generate"), ("worker", "0")] == 3
    assert values["calls_total", ("method", "Generate"), ("worker", "1")] == 1
    assert values["seconds_bucket", ("le", "1.0"), ("worker", "0")] == 0
    assert values["seconds_bucket", ("le", "1.0"), ("worker", "1")] == 1
    assert {dict(key[1:])["worker"] for key in values} == {"0", "1"}
    assert "the metrics of worker 2 cannot be read" in caplog.text


def test_a_service_exports_past_the_proxy_of_its_environment() -> None:
    source = """from headrace.telemetry.setup import set_up_telemetry
from opentelemetry import trace
flush = set_up_telemetry("exporting")
span = trace.get_tracer("test").start_span("one")
span.end()
flush()
print(f"{span.get_span_context().trace_id:032x}")"""
    with OtlpReceiver() as receiver:
        proxy = {"http_proxy": "http://127.0.0.1:1", "grpc_proxy": "http://127.0.0.1:1", "no_proxy": ""}
        environment = {**os.environ, **proxy, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
        command = (sys.executable, "-c", source)
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert [span.name for span in receiver.spans(ended.stdout.strip())] == ["one"]
