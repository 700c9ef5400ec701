"""The load test is started from Locust's page, by its form and in a browser, and its users see no failure.

A screenshot of the tab "Streams" is left in `.run/screenshots`. Without Chromium (Debian's package `chromium`)
that test is skipped.
"""

import asyncio
import importlib.util

import pytest
import pytest_asyncio

from tests.support.chromium import needs_browser
from tests.support.locust_page import check_report, fetch_json, load_in_browser, locust_page
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

        async def is_running():
            return await state() == "running"

        await until(is_running)
        stop = asyncio.create_task(fetch_json(f"{page}/stop", {"stop": "1"}))  # Users finish their requests first.
        while (seen := await state()) == "running":
            pass
        assert seen == "stopped"
        assert (await stop)["success"]


@pytest.mark.full  # Its data: the form above. Also in tests/slow/test_knee.py.
@needs_browser
async def test_a_browser_starts_watches_and_stops_a_load(page):
    report = await load_in_browser(page, "storyteller")
    assert "window.streamsFigures" in report
