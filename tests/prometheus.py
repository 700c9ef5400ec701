"""A real Prometheus for the duration of a block: `async with running_prometheus(stack.metrics_pages, folder)`.

It runs with deploy/observability/prometheus.yaml and its alerts; the scrape jobs get the given pages instead of the
containers', and queries use its HTTP API. `read_page` reads a page without it. It needs Debian's package `prometheus`,
or a release's binary on the path.
"""

import asyncio
import math
import random
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

CONFIG = Path(__file__).resolve().parents[1] / "deploy" / "observability" / "prometheus.yaml"

_READY_S, _STOP_S, _POLL_S = 30.0, 10.0, 0.05
_QUERY_S = 30.0
_PORTS = range(32_100, 32_700)  # Below Linux's ephemeral ports, and above those of tests/support/free_ports.py.
_ATTEMPTS = 5

# Job → its pages, each a host, a port and a path; Stack.metrics_pages.
Pages = Mapping[str, Sequence[tuple[str, int, str]]]


class Series(NamedTuple):
    """One series of an answer; `finite` has only its finite values."""

    labels: dict[str, str]
    values: list[float]

    @property
    def last(self) -> float:
        return self.values[-1]

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values if math.isfinite(value)]


class Prometheus(NamedTuple):
    """A running Prometheus that scrapes its pages every `every_s`."""

    client: httpx2.AsyncClient
    page_count: int
    every_s: float

    async def query(self, expression: str) -> list[Series]:
        """An instant query; raises RuntimeError with Prometheus' message if it is refused."""
        answer = await self._ask("query", query=expression)
        return [Series(series["metric"], [float(series["value"][1])]) for series in answer["result"]]

    async def query_range(self, expression: str, start: float, end: float) -> list[Series]:
        """A range query between two Unix times, one value a second."""
        answer = await self._ask("query_range", query=expression, start=start, end=end, step=1)
        return [
            Series(series["metric"], [float(value) for _, value in series["values"]]) for series in answer["result"]
        ]

    async def targets(self) -> list[dict[str, Any]]:
        """The targets in the format of /api/v1/targets: `labels`, `health`, `lastError` and more."""
        return list((await self._ask("targets"))["activeTargets"])

    async def labels_of(self, metric: str) -> list[dict[str, str]]:
        """The label sets of a metric's series."""
        return [series.labels for series in await self.query(f"last_over_time({metric}[1h])")]

    async def scraped(self, succeeded: bool = False) -> None:
        """Returns after a scrape of every page that began from now on; raises TimeoutError.

        Without `succeeded` it may have failed: a busy machine does not answer each one in time.
        """
        started = time.time()
        count = f"count({'up == 1 and ' if succeeded else ''}timestamp(up) > {started:.3f})"
        async with asyncio.timeout(self.every_s + _READY_S):
            while sum(series.last for series in await self.query(count)) < self.page_count:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)

    async def _ask(self, what: str, **parameters: Any) -> dict[str, Any]:
        # By POST, because a query may exceed the length of a URL.
        method = "POST" if parameters else "GET"
        answer = (await self.client.request(method, f"/api/v1/{what}", data=parameters)).json()
        if answer["status"] != "success":
            raise RuntimeError(f"{answer['error']}: {parameters.get('query', what)}")
        data: dict[str, Any] = answer["data"]
        return data


@asynccontextmanager
async def running_prometheus(pages: Pages, folder: Path, every_s: float = 1.0) -> AsyncIterator[Prometheus]:
    """See the module; `folder` holds its files. Raises RuntimeError with its last line if it does not start."""
    config = folder / "prometheus.yaml"
    config.write_text(yaml.safe_dump(local_config(pages, every_s), sort_keys=False))
    process, address = await _start(config)
    try:
        async with httpx2.AsyncClient(base_url=f"http://{address}", timeout=_QUERY_S) as client:
            yield Prometheus(client, sum(map(len, pages.values())), every_s)
    finally:
        await _stop(process)


async def _start(config: Path) -> tuple[asyncio.subprocess.Process, str]:
    """A ready process and its address. Retries if another process takes the port."""
    for _ in range(_ATTEMPTS):
        address = f"127.0.0.1:{random.choice(_PORTS)}"
        with (config.parent / "prometheus.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={config.parent / 'data'}"),
                *(f"--web.listen-address={address}", "--log.level=warn"),
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + _READY_S
        async with httpx2.AsyncClient(timeout=_QUERY_S) as client:
            while process.returncode is None and time.monotonic() < deadline:
                with suppress(httpx2.HTTPError):
                    if (
                        await client.get(f"http://{address}/-/ready")
                    ).status_code == 200 and process.returncode is None:
                        return process, address
                await asyncio.sleep(_POLL_S)
        await _stop(process)
        output = (config.parent / "prometheus.log").read_text(errors="replace").strip()
        if "already in use" not in output:
            break
    raise RuntimeError(f"prometheus does not start: {output[-300:]}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def local_config(pages: Pages, every_s: float) -> dict[str, Any]:
    """The configuration of the containers' Prometheus, with other pages and another interval.

    Raises KeyError for a job without pages, or pages without a job: dashboards and alerts depend on the jobs' names.
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


def read_page(port: int, path: str = "/metrics") -> list[Sample]:
    """Every sample of a page on this machine, without the creation times of counters."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
