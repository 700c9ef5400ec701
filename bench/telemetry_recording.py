"""What telemetry tells of a real stack, recorded: one traced request, and the metrics of two minutes of load."""

from __future__ import annotations

import asyncio
import json
import math
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import httpx2

from bench.machine import machine
from bench.otlp_receiver import ReceiverProcess, receiver_process
from bench.prometheus import Prometheus
from bench.spans import Event, Span
from bench.streams import PROMPT
from bench.telemetry_figures import FIGURES, STEP_S
from millrace_protos import millrace_pb2, millrace_pb2_grpc
from runner.free_ports import start_stack
from runner.stack import Stack

_MODEL = "storyteller"
_MODELS = f"{_MODEL}=models/{_MODEL}"
_PATH = "/v1/chat/completions"
_PREDICTORS = 2
_TIMEOUT_S = 60.0
_POLL_S = 0.05
_PACE_MS = 20
_TOKENS = 40
_KILL_AFTER = 12  # Pieces of the answer.
_ATTEMPTS = 5

# Of the load: for how long it has gone on when the recording begins, requests a second, those of the surge, and when
# that and the kill are, in shares of the time.
_LEAD_S = 15.0
_RATE, _SURGE_RATE = 4.0, 14.0
_SURGE = (0.25, 0.35)
_KILL_AT = 0.6
_LEAVING, _HASTY = 0.15, 0.05  # Callers who leave early, and whose deadline is too short.


async def record_traces(resumed: bool) -> dict[str, Any]:
    """The spans of a streamed chat request; with `resumed` of another too whose predictor was killed meanwhile."""
    async with receiver_process() as receiver, _paced_stack(receiver.endpoint) as stack:
        traces = {"A streamed chat request": await _traced_request(stack, receiver, kill=False)}
        if resumed:
            traces["Its predictor killed in the middle"] = await _resumed_request(stack, receiver)
    return {
        "date": _now(),
        "machine": machine(),
        "pace_ms": _PACE_MS,
        "traces": {title: [span.as_json() for span in spans] for title, spans in traces.items()},
    }


@asynccontextmanager
async def _paced_stack(endpoint: str) -> AsyncIterator[Stack]:
    exporting = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    with tempfile.TemporaryDirectory() as folder:
        stack = await start_stack(
            Path(folder),
            {"models": _MODELS, "predictors": _PREDICTORS, "otel_exporter_otlp_endpoint": endpoint},
            commands={"predictor": (sys.executable, "-m", "bench.paced_predictor")},
            environment={
                "transformer": exporting,
                "logger": exporting,
                "predictor": exporting | {"PACE_MS": str(_PACE_MS), "PACE_SEED": "1"},
            },
            say=lambda line: None,
        )
        try:
            await _stream(stack, "0" * 31 + "1", None)  # What only the first request costs.
            yield stack
        finally:
            await stack.stop()


async def _resumed_request(stack: Stack, receiver: ReceiverProcess) -> list[Span]:
    for _ in range(_ATTEMPTS):
        spans = await _traced_request(stack, receiver, kill=True)
        if any(span.links for span in spans if span.name.endswith("ModelStreamInfer")):
            return spans
        await stack.wait_ready(_TIMEOUT_S)
    raise RuntimeError("no stream was resumed")


async def _traced_request(stack: Stack, receiver: ReceiverProcess, kill: bool) -> list[Span]:
    """All spans of one request, the caller's own and the payload log's among them."""
    trace_id = f"{random.getrandbits(128):032x}"
    caller = await _stream(stack, trace_id, _KILL_AFTER if kill else None)
    async with asyncio.timeout(_TIMEOUT_S):
        while True:
            spans = await receiver.spans(trace_id)
            if _is_whole(spans, caller):
                return [caller, *spans]
            await asyncio.sleep(_POLL_S)


def _is_whole(spans: list[Span], caller: Span) -> bool:
    """Whether a predictor's span leads up to the caller's, and the payload log's is there."""
    known = {span.span_id: span for span in spans}
    for span in spans:
        above = span
        while above.parent_id in known:
            above = known[above.parent_id]
        if span.service.endswith("predictor") and above.parent_id == caller.span_id:
            return any(span.name == "payload commit" for span in spans)
    return False


async def _stream(stack: Stack, trace_id: str, kill_after: int | None) -> Span:
    """One chat request as an OpenAI client makes it, told as its caller's span."""
    span_id = f"{random.getrandbits(64):016x}"
    body = {
        "model": _MODEL,
        "stream": True,
        "max_tokens": _TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "messages": [{"role": "user", "content": PROMPT}],
    }
    headers = {"traceparent": f"00-{trace_id}-{span_id}-01"}
    events: list[Event] = []
    pieces = 0
    async with httpx2.AsyncClient(base_url=f"http://{stack.gateway}", timeout=_TIMEOUT_S) as client:
        await client.get("/v2/health/live")  # The connection is there before the request.
        start_ns = time.time_ns()
        async with client.stream("POST", _PATH, json=body, headers=headers) as response:
            response.raise_for_status()
            async for text in response.aiter_lines():
                pieces += text.startswith("data: ")
                if pieces == 1 and not events:
                    events.append(Event("first piece", time.time_ns()))
                if pieces == kill_after and len(events) == 1:
                    name = await asyncio.to_thread(_busy_predictor, stack)
                    events.append(Event(f"{name} killed", time.time_ns()))
                    await stack.kill(name, signal.SIGKILL)
        end_ns = time.time_ns()
    return Span("client", f"POST {_PATH}", "CLIENT", trace_id, span_id, "", start_ns, end_ns, events=tuple(events))


def _busy_predictor(stack: Stack) -> str:
    """The predictor that runs a sequence, as its metrics say."""
    for replica, (host, port, path) in enumerate(stack.metrics_pages["predictor"]):
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=_TIMEOUT_S) as page:
            for line in page.read().decode().splitlines():
                if line.startswith("millrace_sequences_running{") and float(line.rpartition(" ")[2]) > 0:
                    return f"predictor-{replica}"
    return "predictor-0"


async def record_metrics(seconds: float) -> dict[str, Any]:
    """What Prometheus has of a stack under load: a surge, callers who leave, and one predictor killed."""
    with tempfile.TemporaryDirectory() as folder:
        stack = await start_stack(
            Path(folder) / "stack",
            {"models": _MODELS, "predictors": _PREDICTORS},
            environment={"predictor": {"PREDICTOR_MAX_RUNNING": "12", "PREDICTOR_KV_CACHE_MEMORY": "8MiB"}},
            say=lambda line: None,
        )
        try:
            async with Prometheus(stack.metrics_pages, Path(folder) / "prometheus", 1.0) as prometheus:
                begin = time.time() + _LEAD_S
                killed_s = await _load(stack, seconds)
                await prometheus.scraped()
                figures = {
                    name: [
                        {"labels": series.labels, "values": _values(series.points, begin, seconds)}
                        for series in await prometheus.query_range(expression, begin, begin + seconds, STEP_S)
                    ]
                    for name, expression in FIGURES.items()
                }
        finally:
            await stack.stop()
    return {
        "date": _now(),
        "machine": machine(),
        "seconds": seconds,
        "step_s": STEP_S,
        "marks": [{"at_s": round(killed_s, 1), "words": "a predictor is killed"}],
        "figures": figures,
    }


def written(told: dict[str, Any]) -> str:
    """JSON with a line for each series or span, so that a recording can be read and compared."""
    (key, groups), lines = next(item for item in told.items() if item[0] in ("figures", "traces")), []
    for name, rows in groups.items():
        each = ",\n   ".join(json.dumps(row) for row in rows)
        lines.append(f"  {json.dumps(name)}: [\n   {each}\n  ]" if rows else f"  {json.dumps(name)}: []")
    rest = json.dumps({name: value for name, value in told.items() if name != key}, indent=1).removesuffix("\n}")
    return f"{rest},\n {json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n }\n}\n"


def _values(points: list[tuple[float, float]], begin: float, seconds: float) -> list[float | None]:
    """A value each step, None where there is none."""
    values: list[float | None] = [None] * (round(seconds / STEP_S) + 1)
    for at, value in points:
        if math.isfinite(value):
            values[round((at - begin) / STEP_S)] = float(f"{value:.4g}")
    return values


async def _load(stack: Stack, seconds: float) -> float:
    """Requests at random, over gRPC and HTTP, for so long after the lead; how far into it a predictor was killed."""
    dice = random.Random(1)  # noqa: S311
    begun, killed_s = time.monotonic(), 0.0
    async with (
        grpc.aio.insecure_channel(stack.gateway) as channel,
        httpx2.AsyncClient(base_url=f"http://{stack.gateway}", timeout=_TIMEOUT_S) as client,
        asyncio.TaskGroup() as group,
    ):
        while (passed := time.monotonic() - begun - _LEAD_S) < seconds:
            if not killed_s and passed >= _KILL_AT * seconds:
                killed_s = passed
                group.create_task(stack.kill("predictor-0"))
            pieces = dice.randrange(5, 40) if dice.random() < _LEAVING else None
            timeout_s = 0.3 if dice.random() < _HASTY else _TIMEOUT_S
            tokens = dice.randrange(40, 240)
            # A caller gets what it gets; the figures say what that was.
            if dice.random() < 0.5:
                group.create_task(_quietly(_by_grpc(channel, tokens, timeout_s, pieces)))
            else:
                group.create_task(_quietly(_by_events(client, tokens, timeout_s, pieces)))
            surge = _SURGE[0] <= passed / seconds < _SURGE[1]
            await asyncio.sleep(dice.expovariate(_SURGE_RATE if surge else _RATE))
    return killed_s


async def _quietly(request: Any) -> None:
    with suppress(grpc.aio.AioRpcError, httpx2.HTTPError):
        await request


async def _by_grpc(channel: grpc.aio.Channel, tokens: int, timeout_s: float, leave_after: int | None) -> None:
    request = millrace_pb2.GenerateRequest(model=_MODEL, prompt=PROMPT, max_tokens=tokens, ignore_eos=True)
    call = millrace_pb2_grpc.TextGenerationStub(channel).Generate(request, timeout=timeout_s)
    pieces = 0
    async for _ in call:
        pieces += 1
        if pieces == leave_after:
            call.cancel()
            return


async def _by_events(client: httpx2.AsyncClient, tokens: int, timeout_s: float, leave_after: int | None) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    body = {"model": _MODEL, "stream": True, "max_tokens": tokens, "ignore_eos": True, "messages": messages}
    headers = {"x-timeout-ms": str(round(timeout_s * 1000))}
    pieces = 0
    async with client.stream("POST", _PATH, json=body, headers=headers) as response:
        async for text in response.aiter_lines():
            pieces += text.startswith("data: ")
            if pieces == leave_after:
                return


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
