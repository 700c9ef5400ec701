"""A service's Prometheus page: http://host:port/metrics, on a separate thread; what pickers read is also by itself.

It shows the instruments of this process, and the process metrics of Prometheus's client: memory, processor time, open
files, start time. If several processes serve one port, their parent's page shows the metrics of all of them, each with
the label `worker`.

What an inference gateway's endpoint picker reads of each pod that it may choose has vLLM's names, beside our own.
Names, types and labels are those of the model server protocol that the pickers of Kubernetes' Gateway API inference
extension and of llm-d's router read (llm-d-router, docs/model-server-protocol.md). They have colons, which
OpenTelemetry's names must not have. A picker reports an error for each name that a page lacks, so all are there, except
what is not known. It reads twenty times a second, so these are also on a page of their own.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from headrace.endpoints import DIRECT
from headrace.errors import StartupError

PICKERS_PATH = "/metrics/picker"
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


logger = logging.getLogger(__name__)

_WORKER_TIMEOUT_S = 2.0
_JOIN_S = 1.0


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: a page is read every few seconds."""


class MetricsPage:
    """Listens as soon as it is constructed; port 0 takes a free one. Raises StartupError where the port is taken.

    With `shares_port` a successor of this process may listen there too.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry = REGISTRY, shares_port: bool = False) -> None:
        class Server(ThreadingWSGIServer):
            allow_reuse_port = shares_port
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        whole: WSGIApplication = make_wsgi_app(registry)
        picked: WSGIApplication = make_wsgi_app(REGISTERED) if registry is REGISTRY else whole

        def application(environment: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
            return (picked if environment["PATH_INFO"] == PICKERS_PATH else whole)(environment, start)

        try:
            self._server = make_server(host.strip("[]"), port, application, Server, handler_class=_SilentHandler)
        except OSError:
            taken = f"{host}:{port} cannot be listened on for the metrics page: is the port taken?"
            raise StartupError(taken) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics-page", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_S)


class WorkerPages(Collector):
    """The pages of several workers as one; `pages` gives the port of each, by its name."""

    def __init__(self, pages: Callable[[], Mapping[str, int]]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        """A worker that does not answer in time is left out."""
        families: dict[str, Metric] = {}
        for worker, port in self._pages().items():
            try:
                with DIRECT.open(f"http://127.0.0.1:{port}/metrics", timeout=_WORKER_TIMEOUT_S) as answer:
                    page = answer.read().decode()
            except (OSError, ValueError) as error:
                logger.warning("the metrics of worker %s cannot be read: %s", worker, error)
                continue
            for family in text_string_to_metric_families(page):
                like = Metric(family.name, family.documentation, family.type, family.unit)
                merged = families.setdefault(family.name, like)
                merged.samples += [
                    sample._replace(labels=sample.labels | {"worker": worker}) for sample in family.samples
                ]
        yield from families.values()
