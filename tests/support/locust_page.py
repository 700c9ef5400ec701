"""Locust's page over a stack: the process, its JSON, and a load that a browser starts, watches and stops."""

import asyncio
import json
import re
import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from playwright.async_api import Page, expect

from headrace_runner.settings import ROOT
from tests.support.chromium import SCREENSHOTS, WAIT_MS, started_browser
from tests.support.locust_run import FILES
from tests.support.runner_stack import Stack
from tests.waiting import until

ROWS = {
    "Generate",
    "Generate TTFT",
    "Generate gap",
    "ModelStreamInfer TTFT",
    "chat/completions TTFT",
    "Cancelled Generate cancel latency",
    "Slowly read Generate TTFT",
    "ModelInfer at the predictor",
    "v2 infer",
}


def fetch(url: str, form: dict[str, str] | None = None) -> str:
    data = urllib.parse.urlencode(form).encode() if form else None
    with urllib.request.urlopen(url, data, timeout=60) as answer:
        text: str = answer.read().decode()
        return text


async def fetch_json(url: str, form: dict[str, str] | None = None) -> Any:
    return json.loads(await asyncio.to_thread(fetch, url, form))


@asynccontextmanager
async def locust_page(stack: Stack, *options: str) -> AsyncIterator[str]:
    """The address of a page whose form starts load on the stack."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    page = f"http://127.0.0.1:{port}"
    locust = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "locust", "-f", FILES, "--class-picker"),
        *("--web-host", "127.0.0.1", "--web-port", str(port), "--host", f"http://{stack.gateway}"),
        *options,
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
        yield page
    finally:
        locust.terminate()
        await locust.wait()


async def check_report(page: str, gateway: str) -> None:
    """Starts every user by the form, and checks that each row has samples, without failures, and the figures with them.

    The stack has the models `storyteller` and `normalizer`, and one predictor.
    """
    form = {"user_count": "11", "spawn_rate": "11", "host": f"http://{gateway}", "output_tokens": "16"}
    refused = await fetch_json(f"{page}/swarm", form | {"objective": "quick"})
    assert not refused["success"]
    assert "objective: 'quick' is not like" in refused["message"]
    assert (await fetch_json(f"{page}/swarm", form))["success"]
    rows: dict[str, dict[str, Any]] = {}

    async def every_row_has_samples() -> bool:
        stats = (await fetch_json(f"{page}/stats/requests"))["stats"]
        rows.update({row["name"]: row for row in stats})
        return rows.keys() >= ROWS and all(rows[name]["num_requests"] >= 2 for name in ROWS)

    await until(every_row_has_samples)
    assert all(row["num_failures"] == 0 for row in rows.values())
    assert rows["Generate TTFT"]["avg_response_time"] < rows["Generate"]["avg_response_time"]
    whole = [row for row in rows.values() if row["method"] in ("gRPC", "HTTP")]
    # Both values are from one answer of the page.
    assert rows["Aggregated"]["num_requests"] == sum(row["num_requests"] for row in whole)
    figures: dict[str, Any] = {}

    async def every_figure_is_there() -> bool:
        """A predictor's gauges are read once a second, so a reading may fall between two short requests."""
        figures.update(await fetch_json(f"{page}/streams/figures"))
        streams = {row["row"] for row in figures["rows"]}
        was_seen = all(any(point[gauge] for point in figures["course"]) for gauge in ("running", "cache"))
        return was_seen and streams >= {"Generate", "chat/completions"}

    await until(every_figure_is_there)
    assert {slow["row"] for slow in figures["slowest"]} <= {row["row"] for row in figures["rows"]}
    assert [predictor["name"] for predictor in figures["predictors"]] == ["predictor-0"]
    assert (await fetch_json(f"{page}/stop", {"stop": "1"}))["success"]


async def load_in_browser(address: str, model: str) -> str:
    """Chooses class and fields, starts, awaits the rows, follows a link to a record, stops; returns its report."""
    async with started_browser() as browser:
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(WAIT_MS)
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        await page.goto(address)
        await _start(page, model)
        await page.get_by_role("tab", name="Streams").click()
        section = page.locator("#streams")
        await expect(section.locator("tbody").first).to_contain_text("Generate")
        await expect(section.get_by_role("link", name="record").first).to_be_visible()
        first = section.locator("tbody tr").first.locator("td")
        await expect(first.nth(7)).to_have_text(re.compile(r"[\d.]+ / [\d.]+ / [\d.]+"))
        await expect(section).to_contain_text("running")
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        await page.screenshot(path=SCREENSHOTS / f"load-test-streams-{model}.png", full_page=True)
        async with page.expect_popup() as popup:
            await section.get_by_role("link", name="record").first.click()
        [record] = json.loads(await (await popup.value).inner_text("body"))
        assert record["model"] == model
        chart = section.locator("figure").filter(has_text="Tokens a second")
        await expect(chart.locator("svg text").nth(2)).to_have_text(re.compile(r"^\d+(\.\d+)?k?$"))  # The axis' end.
        await chart.locator("svg").hover()
        await expect(chart.locator(".key")).to_have_text(re.compile(r"^tokens \d"))
        await page.mouse.move(0, 0)
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await page.get_by_role("button", name="Stop").click()
        await expect(page.get_by_role("button", name="New")).to_be_visible()
        await page.get_by_role("tab", name="Streams").click()
        await expect(section.get_by_role("button", name="whole test")).to_have_attribute("aria-pressed", "true")
        await expect(section.locator("tbody").first).to_contain_text("Generate")
        await page.get_by_role("tab", name="Download Data").click()
        async with page.expect_popup() as popup:
            await page.get_by_role("link", name="Download Report").click()
        report = await popup.value
        await expect(report.locator("#streams table").first).to_contain_text("Generate")
        assert complaints == []
    return await asyncio.to_thread(fetch, f"{address}/stats/report?download=1")


async def _start(page: Page, model: str) -> None:
    """Four users of one class, with a model of the menu and an objective."""
    rows = page.get_by_role("row")
    await expect(rows.filter(has=page.locator("input:checked"))).to_have_text([re.compile(r"^ChatUser")])
    for name, checked in (("ChatUser", False), ("StreamUser", True)):
        box = rows.filter(has_text=re.compile(f"^{name}")).get_by_role("checkbox")
        await box.set_checked(checked)
    await page.locator("[name=userCount]").fill("4")
    await page.locator("[name=spawnRate]").fill("4")
    fields = await page.locator("form [name]").evaluate_all("fields => fields.map(({ name }) => name)")
    assert [name for name in fields if name in ("model", "outputTokens", "objective", "kneeSeconds")] == [
        *("model", "outputTokens", "objective", "kneeSeconds")
    ]
    await page.locator("[name=model]").select_option(model)
    await page.locator("[name=outputTokens]").fill("24")
    await page.locator("[name=objective]").fill("TTFT <= 5 s, gap <= 2 s")
    await page.get_by_role("button", name="Start").click()
