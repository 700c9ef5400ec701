"""A real Prometheus for as long as a block: `async with Prometheus(stack.metrics_pages, folder) as prometheus: …`.

It runs with observability/prometheus.yaml and its alerts, of which the scrape jobs get the pages given instead of the
containers', and it is asked by its HTTP API. It needs Debian's package `prometheus`, or a release's binary on the path.
"""

from __future__ import annotations

import asyncio
import math
import random
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx2
import yaml

from millrace.errors import StartupError

CONFIG = Path(__file__).resolve().parents[1] / "observability" / "prometheus.yaml"

_HOST = "127.0.0.1"
_READY_S, _STOP_S, _POLL_S = 30.0, 10.0, 0.05
_QUERY_S = 30.0
# Below Linux's ephemeral ports, and above those of runner/free_ports.py.
_FIRST, _LAST = 32_100, 32_700
_ATTEMPTS = 5

# Job → its pages, each a host, a port and a path; Stack.metrics_pages.
Pages = Mapping[str, Sequence[tuple[str, int, str]]]


class Series(NamedTuple):
    """One series of an answer: `points` are pairs of a Unix time and a value."""

    labels: dict[str, str]
    points: list[tuple[float, float]]

    @property
    def last(self) -> float:
        return self.points[-1][1]

    @property
    def finite(self) -> list[float]:
        """The values that are numbers."""
        return [value for _, value in self.points if math.isfinite(value)]


class PrometheusError(Exception):
    """Prometheus refused a query; the text is its own."""


class Prometheus:
    """Scrapes `pages` every `every_s`; `folder` holds what it writes. StartupError where it cannot be had."""

    def __init__(self, pages: Pages, folder: Path, every_s: float = 1.0) -> None:
        self._pages = pages
        self._folder = folder
        self._every_s = every_s
        self._process: asyncio.subprocess.Process | None = None
        self._client: httpx2.AsyncClient | None = None
        self.address = ""

    async def query(self, expression: str, at: float | None = None) -> list[Series]:
        """An instant query; `at` is a Unix time, now where there is none."""
        answer = await self._ask("query", query=expression, time=time.time() if at is None else at)
        if answer["resultType"] == "scalar":
            return [Series({}, _points([answer["result"]]))]
        return [Series(series["metric"], _points([series["value"]])) for series in answer["result"]]

    async def query_range(self, expression: str, start: float, end: float, step_s: float = 1.0) -> list[Series]:
        """A range query between two Unix times."""
        answer = await self._ask("query_range", query=expression, start=start, end=end, step=step_s)
        return [Series(series["metric"], _points(series["values"])) for series in answer["result"]]

    async def targets(self) -> list[dict[str, Any]]:
        """What is scraped, as /api/v1/targets tells it: `labels`, `health`, `lastError` and more."""
        return list((await self._ask("targets", state="active"))["activeTargets"])

    async def labels_of(self, metric: str) -> list[dict[str, str]]:
        """The series of a metric, as their labels."""
        return [series.labels for series in await self.query(f"last_over_time({metric}[1h])")]

    async def scraped(self) -> None:
        """Returns once a scrape of every page that began from now on has ended, well or not; else TimeoutError."""
        begun, count = time.time(), sum(len(pages) for pages in self._pages.values())
        while sum(series.last for series in await self.query(f"count(timestamp(up) > {begun:.3f})")) < count:
            if time.time() > begun + self._every_s + _READY_S:
                raise TimeoutError(f"not every one of {count} pages was scraped")
            await asyncio.sleep(_POLL_S)

    async def __aenter__(self) -> Self:
        binary = shutil.which("prometheus")
        if binary is None:
            raise StartupError("prometheus is missing: install Debian's package `prometheus`")
        self._folder.mkdir(parents=True, exist_ok=True)
        config = self._folder / "prometheus.yaml"
        config.write_text(yaml.safe_dump(local_config(self._pages, self._every_s), sort_keys=False))
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                await self._start(binary, config)
                return self
            except BaseException as error:
                await self.__aexit__(None, None, None)
                if attempt == _ATTEMPTS or "already in use" not in str(error):
                    raise
        raise AssertionError("unreachable")

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.aclose()
        process, self._client, self._process = self._process, None, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _start(self, binary: str, config: Path) -> None:
        self.address = f"{_HOST}:{_free_port()}"
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                binary,
                f"--config.file={config}",
                f"--storage.tsdb.path={self._folder / 'data'}",
                f"--web.listen-address={self.address}",
                "--log.level=warn",
                stdout=log,
                stderr=log,
            )
        self._client = httpx2.AsyncClient(base_url=f"http://{self.address}", timeout=_QUERY_S)
        deadline = time.monotonic() + _READY_S
        while not await self._is_ready():
            if self._process.returncode is not None or time.monotonic() > deadline:
                lines = (self._folder / "prometheus.log").read_text(errors="replace").strip().splitlines()
                raise StartupError(f"prometheus does not start: {lines[-1] if lines else 'it says nothing'}")
            await asyncio.sleep(_POLL_S)

    async def _is_ready(self) -> bool:
        assert self._client is not None  # noqa: S101
        try:
            return (await self._client.get("/-/ready")).status_code == 200
        except httpx2.HTTPError:
            return False

    async def _ask(self, what: str, **parameters: Any) -> dict[str, Any]:
        if self._client is None:
            raise RuntimeError("it does not run: use it as a context manager")
        # By POST: a query may be longer than an address.
        asked = {name: str(value) for name, value in parameters.items()}
        if what == "targets":
            response = await self._client.get(f"/api/v1/{what}", params=asked)
        else:
            response = await self._client.post(f"/api/v1/{what}", data=asked)
        answer = response.json()
        if answer["status"] != "success":
            raise PrometheusError(f"{answer['error']}: {parameters.get('query', what)}")
        data: dict[str, Any] = answer["data"]
        return data


def local_config(pages: Pages, every_s: float) -> dict[str, Any]:
    """The configuration of the containers' Prometheus, with other pages and another interval.

    KeyError where a job has no pages, or pages no job: the jobs' names are what dashboards and alerts ask for.
    """
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    every = f"{round(every_s * 1000)}ms"
    config["global"] = {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every}
    config["rule_files"] = [str(CONFIG.parent / name) for name in config["rule_files"]]
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    if jobs != pages.keys():
        raise KeyError(f"jobs {sorted(jobs)} are not pages {sorted(pages)}")
    config["scrape_configs"] = [
        {
            "job_name": job,
            "metrics_path": path,
            "static_configs": [{"targets": [f"{host}:{port}" for host, port, where in of_job if where == path]}],
        }
        for job, of_job in pages.items()
        for path in {where for _, _, where in of_job}
    ]
    return config


def _points(values: Sequence[Sequence[Any]]) -> list[tuple[float, float]]:
    return [(float(at), float(value)) for at, value in values]


def _free_port() -> int:
    for _ in range(100 * _ATTEMPTS):
        port = random.randrange(_FIRST, _LAST)  # noqa: S311
        with socket.socket() as probe:
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
            return port
    raise StartupError(f"no free port between {_FIRST} and {_LAST}")
