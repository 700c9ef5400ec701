"""The load test is started from Locust's page by its form, and its users see no failure.

In a browser it is in tests/slow/test_knee.py.
"""

import asyncio
import importlib.util

import pytest
import pytest_asyncio

from tests.support.locust_page import check_report, fetch_json, locust_page
from tests.waiting import until

# Not importorskip: importing locust patches the process for gevent.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("locust") is None, reason="locust is missing: install the extra `loadtest`"
)


@pytest_asyncio.fixture
async def page(stack):
    async with locust_page(stack) as address:
        yield address


async def test_every_user_runs_without_failures_from_the_form(stack, page):
    await check_report(page, stack.gateway)


async def test_the_page_reads_that_a_load_has_stopped_and_not_that_it_is_about_to(stack):
    async with locust_page(stack, "--stop-timeout", "30") as page:
        form = {"user_count": "2", "spawn_rate": "2", "user_classes": "StreamUser", "output_tokens": "450"}
        assert (await fetch_json(f"{page}/swarm", form))["success"]

        async def state():
            return (await fetch_json(f"{page}/stats/requests"))["state"]

        await until(state, holds="running".__eq__)
        stop = asyncio.create_task(fetch_json(f"{page}/stop", {"stop": "1"}))  # Users finish their requests first.
        while (seen := await state()) == "running":
            pass
        assert seen == "stopped"
        assert (await stop)["success"]
