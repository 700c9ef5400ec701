"""A real Prometheus reads every page of a real stack; every panel and every alert uses existing metrics."""

import asyncio
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
import pytest_asyncio
import yaml

from headrace_protos import headrace_pb2, headrace_pb2_grpc
from tests.dashboards import filled, metrics_of, queries
from tests.prometheus import CONFIG, Prometheus, running_prometheus
from tests.support.runner_stack import Stack
from tests.support.stacks import Stacks
from tests.system.calls import channel, generate, leave_http, rest

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy" / "observability" / "alerts.yaml"
ALERTS_TEST = ROOT / "deploy" / "observability" / "alerts_test.yaml"
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
LONG = {"model": "storyteller", "prompt": "Once upon a time", "max_tokens": 1000, "ignore_eos": True}
UNKNOWN_MODEL = "a-name-of-the-callers-own"
UNREACHABLE = "http://127.0.0.1:9"  # The discard port: no server listens.
EVERY_S, MIX_S = 0.5, 1.5

# Counters that are absent in a healthy stack, since nothing moves them; here are their names in the code.
HAS_NOT_HAPPENED = {"headrace_log_dropped_total": "headrace.log.dropped"}
# Series that Prometheus makes itself, only while alerts are active.
OWN = {"ALERTS"}
# Prometheus 3 would take OpenTelemetry's names, with dots, if a page offers them.
ACCEPT_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,*/*;q=0.1"
)

pytestmark = [
    pytest.mark.skipif(
        shutil.which("promtool") is None or shutil.which("prometheus") is None,
        reason="Prometheus is missing: install Debian's package `prometheus`",
    )
]


class Watched(NamedTuple):
    """A stack that had every kind of load between two Unix times, and its Prometheus."""

    stack: Stack
    prometheus: Prometheus
    begun: float
    ended: float


@pytest_asyncio.fixture(scope="module")
async def watched(stacks: Stacks, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watched]:
    # There is neither a collector nor a sink: lost and waiting data must be visible too.
    exporting = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": UNREACHABLE, "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    # A queue of one span: the second that ends while one is being exported is lost, however slow the machine.
    short_queue = {
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        "OTEL_BSP_MAX_QUEUE_SIZE": "1",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "1",
    }
    environment = {
        # On a busy machine a predictor restarts slowly.
        "transformer": exporting | short_queue | {"TRANSFORMER_PREDICTOR_START_WAIT": "120"},
        # Its long answers take seconds: a cancel or a death comes in the middle of them.
        "predictor": exporting | short_queue | {"SLOW_MS": "5"},
        "logger": exporting | {"LOGGER_SINKS": UNREACHABLE},
    }
    commands = {"predictor": (sys.executable, "-m", "tests.system.faulty_predictor")}
    async with stacks.use(environment=environment, commands=commands) as stack:
        folder = tmp_path_factory.mktemp("prometheus")
        async with running_prometheus(stack.metrics_pages, folder, EVERY_S) as prometheus:
            begun = time.time()
            await prometheus.scraped()
            await mixed_load(stack.gateway)
            await predictor_dies_in_the_middle(stack)
            await mixed_load(stack.gateway)
            await prometheus.scraped(succeeded=True)
            yield Watched(stack, prometheus, begun, time.time())


async def mixed_load(gateway: str) -> None:
    """Whole and streamed answers, over gRPC and HTTP, cancelled calls and a refused one."""
    end = time.monotonic() + MIX_S
    while time.monotonic() < end:
        body = {"model": "storyteller", "prompt": "Once", "max_tokens": 30, "ignore_eos": True}
        chat = {"model": "storyteller", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 10}
        await asyncio.gather(
            *(generate(gateway, **body) for _ in range(3)),
            *(rest(gateway, "POST", "/v1/completions", body | {"stream": stream}) for stream in (True, False)),
            rest(gateway, "POST", "/v1/chat/completions", chat | {"stream": True}),
            rest(gateway, "POST", "/v2/models/normalizer/generate", {"text_input": "date: 3 Mar 2021"}),
            rest(gateway, "POST", "/v1/completions", body | {"model": UNKNOWN_MODEL}),
            cancelled_by_grpc(gateway),
            asyncio.to_thread(cancelled_by_http, gateway),
        )


async def cancelled_by_grpc(gateway: str) -> None:
    async with channel(gateway) as open_channel:
        call = headrace_pb2_grpc.TextGenerationStub(open_channel).Generate(headrace_pb2.GenerateRequest(**LONG))
        for _ in range(3):
            await call.read()
        call.cancel()


def cancelled_by_http(gateway: str) -> None:
    leave_http(gateway, "/v1/completions", {**LONG, "stream": True})


async def predictor_dies_in_the_middle(stack: Stack) -> None:
    """Kills a predictor during a stream, which continues."""
    async with channel(stack.gateway) as open_channel:
        request = headrace_pb2.GenerateRequest(**LONG | {"max_tokens": 400})
        call = headrace_pb2_grpc.TextGenerationStub(open_channel).Generate(request, timeout=150)
        await call.read()
        await stack.kill("predictor-0")
        count = 0
        while (await call.read()) is not grpc.aio.EOF:
            count += 1
        assert count > 0


def promtool(*arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_accepts_configuration_and_rules_and_every_alert_is_tested():
    assert "SUCCESS" in promtool("check", "config", "--lint-fatal", str(CONFIG))
    assert f"{len(RULES)} rules found" in promtool("check", "rules", "--lint-fatal", str(ALERTS))
    assert "SUCCESS" in promtool("test", "rules", str(ALERTS_TEST))
    tests = ALERTS_TEST.read_text()
    for rule in RULES:
        if "alert" in rule:
            assert re.search(rf"\b{rule['alert']}\b", tests), rule["alert"]
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"].keys() == {"summary", "description"}


async def test_every_page_is_scraped_without_an_error(watched):
    targets = await watched.prometheus.targets()
    assert sorted(target["labels"]["job"] for target in targets) == sorted(watched.stack.metrics_pages)
    assert [(target["labels"]["job"], target["lastError"]) for target in targets if target["lastError"]] == []
    assert {target["health"] for target in targets} == {"up"}
    assert {series.last for series in await watched.prometheus.query("up")} == {1.0}


async def test_every_panel_has_data(watched):
    empty = []
    for query in queries():
        expression = filled(query.expression, rate_interval="10s", time_range="5m")
        found = await watched.prometheus.query_range(expression, watched.begun, watched.ended)
        if not any(series.finite for series in found):
            empty.append(query)
    assert not empty


async def test_every_metric_and_label_of_panels_and_alerts_exists(watched):
    expressions = [query.expression for query in queries()] + [rule["expr"] for rule in RULES]
    expressions = [expression.replace("instance:telemetry_lost:sum", "up") for expression in expressions]
    for metric in sorted(set().union(*map(metrics_of, expressions)) - OWN):
        series = await watched.prometheus.labels_of(metric)
        if metric in HAS_NOT_HAPPENED:
            assert in_the_code(HAS_NOT_HAPPENED[metric]), metric
            continue
        assert series, f"{metric} is nowhere"
        known = {"le"} | set().union(*series)
        named = {
            label
            for expression in expressions
            for matchers in re.findall(rf"\b{metric}\{{([^}}]*)\}}", expression)
            for label in re.findall(r"(\w+)(?:=~?|!=|!~)\"", matchers)
        }
        grouped = {
            label
            for expression in expressions
            if metrics_of(expression) == {metric}
            for labels in re.findall(r"\bby \(([^)]*)\)", expression)
            for label in re.split(r", ?", labels)
        }
        assert named | grouped <= known, metric


def in_the_code(name: str) -> bool:
    return any(
        f'"{name}"' in path.read_text() for folder in ("headrace", "services") for path in (ROOT / folder).rglob("*.py")
    )


async def test_the_metrics_show_what_happened(watched):
    """The load by protocol, its cancels, the predictor's death, and data that no receiver took."""

    async def highest(expression: str) -> dict[str, float]:
        """The highest values of an expression, by its labels."""
        found = await watched.prometheus.query_range(expression, watched.begun, watched.ended)
        return {" ".join(series.labels.values()): max(series.finite) for series in found if series.finite}

    model = 'gen_ai_request_model="storyteller"'
    outcomes = await highest(f"sum by (headrace_outcome, headrace_protocol) (headrace_streams_total{{{model}}})")
    assert {"completed grpc", "completed http", "cancelled grpc", "cancelled http"} <= outcomes.keys(), outcomes
    for protocol in ("grpc", "http"):
        first = f'gen_ai_server_time_to_first_token_seconds_bucket{{{model}, headrace_protocol="{protocol}"}}'
        (seconds,) = (await highest(f"histogram_quantile(0.95, sum by (le) (rate({first}[10s])))")).values()
        assert 0 < seconds < 60
    assert (await highest(f"sum(rate(headrace_tokens_total{{{model}}}[10s]))"))[""] > 1
    assert (await highest("sum(headrace_stream_resumed_total)"))[""] >= 1
    assert (await highest('sum(changes(process_start_time_seconds{job="predictor"}[5m]))'))[""] >= 1
    assert (await highest("sum(headrace_payload_committed_total)"))[""] >= 10
    assert (await highest("max(headrace_sink_lag_seconds)"))[""] > 0
    assert (await highest("sum(instance:telemetry_lost:sum)"))[""] > 0
    assert (await highest("sum(headrace_kv_cache_utilization_ratio)"))[""] > 0
    # A predictor that died during the scrapes is counted after its restart, and an alert fires.
    assert "firing" in await highest('sum by (alertstate) (ALERTS{alertname="PredictorRestarted"})')


async def test_no_label_has_text_of_a_caller(watched):
    assert await watched.prometheus.query(f'{{__name__=~".+", gen_ai_request_model="{UNKNOWN_MODEL}"}}') == []
    assert await watched.prometheus.query('headrace_streams_total{gen_ai_request_model="_OTHER"}')


async def test_names_are_the_same_for_a_prometheus_that_accepts_dots(watched):
    def page(host: str, port: int, path: str) -> str:
        request = urllib.request.Request(f"http://{host}:{port}{path}", headers={"accept": ACCEPT_3})
        with suppress(TimeoutError), urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()
        return ""

    for job, pages in watched.stack.metrics_pages.items():
        for where in pages:
            lines = [line for line in (await asyncio.to_thread(page, *where)).splitlines() if line[:1] not in ("#", "")]
            assert lines, job
            assert not [line for line in lines if not re.match(r"[a-zA-Z_:][\w:]*[ {]", line) or '{"' in line], job
