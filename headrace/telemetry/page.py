"""A service's Prometheus page: http://host:port/metrics, on a separate thread; what pickers read is also by itself.

It shows the instruments of this process, and the process metrics of Prometheus's client: memory, processor time, open
files, start time. If several processes serve one port, their parent's page shows the metrics of all of them, each with
the label `worker`.
"""

import logging
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from headrace.errors import StartupError
from headrace.telemetry import picking

logger = logging.getLogger(__name__)

_WORKER_TIMEOUT_S = 2.0
_JOIN_S = 1.0
# HTTP inside the stack, whatever proxy the environment names.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


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
        picked: WSGIApplication = make_wsgi_app(picking.REGISTERED) if registry is REGISTRY else whole

        def application(environment: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
            return (picked if environment["PATH_INFO"] == picking.PATH else whole)(environment, start)

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
