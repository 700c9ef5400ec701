"""The load test is started from Locust's page, as a browser does it, and its users meet no failure."""

import asyncio
import importlib.util
import json
import socket
import sys
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from tests.waiting import until

ROOT = Path(__file__).parents[2]

# Not importorskip: importing locust patches the process for gevent.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("locust") is None, reason="locust is missing: install the extra `loadtest`"
)


def fetch(url: str, form: dict[str, str] | None = None) -> str:
    data = urllib.parse.urlencode(form).encode() if form else None
    with urllib.request.urlopen(url, data, timeout=10) as answer:
        return answer.read().decode()


async def test_a_load_started_from_the_page_runs_without_failures(stack):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    page = f"http://127.0.0.1:{port}"
    locust = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py"),
        *("--web-host", "127.0.0.1", "--web-port", str(port), "--host", f"http://{stack.gateway}"),
        cwd=ROOT,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:

        async def page_is_up():
            try:
                return "Locust" in await asyncio.to_thread(fetch, page)
            except OSError:
                return False

        await until(page_is_up)
        form = {"user_count": "6", "spawn_rate": "6", "host": f"http://{stack.gateway}"}
        assert json.loads(await asyncio.to_thread(fetch, f"{page}/swarm", form))["success"]
        rows: dict[str, dict] = {}

        async def every_row_has_samples():
            stats = json.loads(await asyncio.to_thread(fetch, f"{page}/stats/requests"))["stats"]
            rows.update({row["name"]: row for row in stats})
            wanted = {"Generate", "Generate TTFT", "ModelInfer at the predictor"}
            return wanted <= rows.keys() and all(rows[name]["num_requests"] >= 5 for name in wanted)

        await until(every_row_has_samples, timeout_s=40)
        assert all(row["num_failures"] == 0 for row in rows.values())
        assert rows["Generate TTFT"]["avg_response_time"] < rows["Generate"]["avg_response_time"]
        assert json.loads(await asyncio.to_thread(fetch, f"{page}/stop", {"stop": "1"}))["success"]
    finally:
        locust.terminate()
        await asyncio.wait_for(locust.wait(), 20)
