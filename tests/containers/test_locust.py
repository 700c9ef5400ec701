"""Locust in its container runs a load that the form of its page starts."""

import asyncio
import json
import urllib.parse
import urllib.request

from tests.containers.stack import FILES
from tests.waiting import until

ROWS = {"Generate", "Generate TTFT", "Generate gap", "chat/completions", "ModelInfer at the predictor"}
USERS = ("StreamUser", "ChatUser", "TensorUser")


def fetch(url: str, form: list[tuple[str, str]] | None = None) -> str:
    data = urllib.parse.urlencode(form).encode() if form else None
    with urllib.request.urlopen(url, data, timeout=60) as answer:
        return answer.read().decode()


def stats(page: str) -> dict:
    return json.loads(fetch(f"{page}/stats/requests"))


async def run_a_load(page: str) -> None:
    """Fills in the page's form, waits for samples of every row, and stops."""
    form = [("user_count", "4"), ("spawn_rate", "4"), ("host", "http://envoy:8080")]
    form += [("user_classes", user) for user in USERS]
    assert json.loads(fetch(f"{page}/swarm", form))["success"]
    rows: dict[str, dict] = {}

    async def every_row_has_samples():
        rows.update({row["name"]: row for row in (await asyncio.to_thread(stats, page))["stats"]})
        return rows.keys() >= ROWS and all(rows[name]["num_requests"] >= 5 for name in ROWS)

    figures: dict = {}

    async def every_figure_is_there():
        """Workers report a little later, and a reading of a predictor may be between two short requests."""
        figures.update(json.loads(await asyncio.to_thread(fetch, f"{page}/streams/figures")))
        streams = {row["row"] for row in figures["rows"]}
        return streams >= {"Generate", "chat/completions"} and any(point["running"] for point in figures["course"])

    await until(every_row_has_samples)
    await until(every_figure_is_there)
    assert json.loads(fetch(f"{page}/stop", [("stop", "1")]))["success"]
    assert {name: row["num_failures"] for name, row in rows.items()} == dict.fromkeys(rows, 0)
    assert figures["predictors"], "the gateway reports their state"


async def test_workers_share_the_load(stack):
    files = (*FILES, "deploy/compose/workers.yaml")
    with stack.timed("up with deploy/compose/workers.yaml"):
        stack.compose("up", "--wait", "--no-build", "locust", "locust-worker", files=files)
    try:
        await until(lambda: len(stats(stack.locust_page).get("workers", ())) == 2)
        await run_a_load(stack.locust_page)
    finally:
        stack.compose("up", "--wait", "--no-build", "--remove-orphans")


async def test_the_collector_has_spans_of_every_hop(stack):
    # Text does not pass the gateway's inner listener.
    hops = {"envoy-ingress", "headrace-transformer", "headrace-predictor"}
    services = f"{stack.jaeger_page}/api/services"
    await until(lambda: asyncio.to_thread(fetch, services), holds=lambda page: hops <= set(json.loads(page)["data"]))
