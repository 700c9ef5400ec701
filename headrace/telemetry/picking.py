"""What an inference gateway's endpoint picker reads of each pod that it may choose: vLLM's names, beside our own.

Names, types and labels are those of the model server protocol that the pickers of Kubernetes' Gateway API inference
extension and of llm-d's router read (llm-d-router, docs/model-server-protocol.md). They have colons, which
OpenTelemetry's names must not have. A picker reports an error for each name that a page lacks, so all are there, except
what is not known. It reads twenty times a second, so these are also on a page of their own.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PATH = "/metrics/picker"
REGISTERED = CollectorRegistry()


class PickableLoad(NamedTuple):
    """A model's requests, the share of its KV cache in use (None: not known), and its engine's description."""

    running: int
    waiting: int
    cache_usage: float | None = None
    description: Mapping[str, str] = {}


class PickerMetrics(Collector):
    """`loads` has the models that are served, `adapters` the loaded ones; both are called by the page's threads."""

    def __init__(
        self,
        loads: Callable[[], Mapping[str, PickableLoad]],
        adapters: Callable[[], Collection[str]] = tuple,
        max_adapters: int = 0,
    ) -> None:
        self._loads, self._adapters, self._max_adapters = loads, adapters, max_adapters
        for registry in (REGISTRY, REGISTERED):
            registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        running = _gauge("num_requests_running", "Requests that are computed.", "model_name")
        waiting = _gauge("num_requests_waiting", "Requests that wait for a place.", "model_name")
        usage = _gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", "model_name")
        cache = _gauge("cache_config_info", "The KV cache's size.", "model_name", "block_size", "num_gpu_blocks")
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        adapters = _gauge("lora_requests_info", "Adapters that are loaded; the value is the time.", *labels)
        for model, load in self._loads().items():
            running.add_metric((model,), load.running)
            waiting.add_metric((model,), load.waiting)
            if load.cache_usage is not None:
                usage.add_metric((model,), load.cache_usage)
            if size := load.description.get("cache_blocks"):
                cache.add_metric((model, load.description["block_tokens"], size), 1)
        # An adapter that is loaded waits for nothing.
        adapters.add_metric((str(self._max_adapters), ",".join(sorted(self._adapters())), ""), time.time())
        yield from (running, waiting, usage, cache, adapters)


def _gauge(name: str, description: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"vllm:{name}", description, labels=labels)
