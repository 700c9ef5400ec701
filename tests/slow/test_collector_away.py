"""The collector is stopped, then dies, under requests: none fails, memory stays, and lost spans are counted."""

import asyncio
import os
import signal

import psutil

from bench.otlp_receiver import receiver_process
from tests.prometheus import read_page
from tests.system.calls import generate
from tests.waiting import until

MODELS = "storyteller=models/storyteller"
ROUND, AT_ONCE = 400, 16
FLAT = 1.05
SERVICES = ("transformer", "predictor-0", "logger", "envoy")


async def load(gateway):
    """Sends requests, all of which must be answered."""
    room = asyncio.Semaphore(AT_ONCE)

    async def ask():
        async with room:
            return await generate(
                gateway, model="storyteller", prompt="Once upon a time", max_tokens=2, ignore_eos=True
            )

    answers = await asyncio.gather(*(ask() for _ in range(ROUND)))
    assert all(answer[-1].finish_reason == "length" for answer in answers)


def resident(stack):
    return {name: psutil.Process(stack.pid(name)).memory_info().rss for name in SERVICES}


async def lost(stack):
    """The spans that the transformer has dropped, from its page of metrics."""
    [(_, port, path)] = stack.metrics_pages["transformer"]
    samples = await asyncio.to_thread(read_page, port, path)
    return sum(
        sample.value
        for sample in samples
        if sample.name in ("otel_sdk_processor_span_processed_total", "otel_sdk_exporter_span_exported_total")
        and sample.labels.get("error_type")
    )


async def test_a_collector_that_is_stopped_and_dies_loses_only_spans(new_stack):
    with receiver_process() as collector:
        exporting = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
            "OTEL_EXPORTER_OTLP_TIMEOUT": "2",
            "OTEL_BSP_MAX_QUEUE_SIZE": "1024",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "64",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
        }
        stack = await new_stack(
            models=MODELS,
            otel_exporter_otlp_endpoint=collector.endpoint,
            environment=dict.fromkeys(("transformer", "predictor", "logger"), exporting),
        )
        await load(stack.gateway)
        assert collector.span_count() > 0
        assert await lost(stack) == 0

        os.kill(collector.process.pid, signal.SIGSTOP)
        await load(stack.gateway)
        collector.process.kill()
        await load(stack.gateway)
        await until(lambda: lost(stack))
        before = resident(stack)
        await load(stack.gateway)
        after = resident(stack)
        assert {name: after[name] for name in SERVICES if after[name] > FLAT * before[name]} == {}
        print(f"RSS: {before} → {after}; lost: {await lost(stack):.0f} spans")
