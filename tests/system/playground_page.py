"""The playground in a real browser, headless, for the tests of its page.

Without Chromium (Debian's package `chromium`) these tests are skipped. `problems` needs axe-core, which `make` installs
into `.tools` where there is npm.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, expect

from headrace_runner.settings import ROOT
from tests.support.chromium import SCREENSHOTS, WAIT_MS, started_browser
from tests.support.runner_stack import Stack

AXE = ROOT / ".tools" / "node_modules" / "axe-core" / "axe.min.js"
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
TABS = ("play", "requests", "models", "connect")

OpenPage = Callable[..., Awaitable[Page]]


@pytest_asyncio.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with started_browser() as browser:
        yield browser


@pytest_asyncio.fixture
async def open_page(browser: Browser) -> AsyncIterator[OpenPage]:
    """Opens a gateway's page; fails the test if the page's scripts or policy reported an error.

    Calls to `refused`, a pattern of addresses, get 503 until `page.unroute`.
    """
    complaints: list[str] = []
    contexts = []

    async def open_at(
        gateway: str, viewport: Any = WIDE, scheme: Any = "light", is_ready: bool = True, refused: str = ""
    ) -> Page:
        allowed = ["clipboard-read", "clipboard-write"]
        contexts.append(await browser.new_context(viewport=viewport, color_scheme=scheme, permissions=allowed))
        page = await contexts[-1].new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console", lambda message: complaints.append(message.text) if "Content Security" in message.text else None
        )
        if refused:
            await page.route(refused, lambda route: route.fulfill(status=503))
        await page.goto(f"http://{gateway}/")
        if is_ready:
            await expect(page.locator("#model option")).not_to_have_count(0)
            await expect(page.locator("#model-card")).to_contain_text("context")
        return page

    yield open_at
    for context in contexts:
        await context.close()
    assert complaints == []


def figure(page: Page, name: str) -> Locator:
    """A figure below the newest answer."""
    return page.locator(".answer").last.locator(f'[data-fact="{name}"] > :first-child')


def answer_text(page: Page) -> Locator:
    return page.locator(".answer .text").last


async def screenshot(page: Page, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        path = SCREENSHOTS / f"playground-{name}-{scheme}.png"
        await page.screenshot(path=path)
        print(f"screenshot: {path}")


async def problems(page: Page) -> list[str]:
    """Serious and critical findings of axe on the page."""
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(AXE.read_text())
    found = await page.evaluate("axe.run().then(({ violations }) => violations)")
    return [
        f"{rule['id']} ({rule['impact']}): {[node['html'][:160] for node in rule['nodes']]}"
        for rule in found
        if rule["impact"] in ("serious", "critical")
    ]


async def check_accessibility(page: Page, where: str) -> None:
    """Fails if axe finds a problem; does nothing if axe is not installed."""
    if AXE.exists():
        assert await problems(page) == [], where


async def is_served(stack: Stack) -> bool:
    """Whether the gateway of a starting stack accepts connections."""
    host, _, port = stack.gateway.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    return True


async def own_text(page: Page) -> str:
    """The text of the newest answer, without its prompt and its marks."""
    text: str = await answer_text(page).evaluate(
        """text => [...text.childNodes].filter(node => !node.matches?.(".prompt, .mark"))
               .map(node => node.textContent).join("")"""
    )
    return text


async def copied_code(page: Page, language: str) -> str:
    """The text that the dialog with the code copies to the clipboard."""
    await page.locator(f"#code input[value={language}]").check(force=True)
    await page.click("#code button")
    await expect(page.locator("#code button")).to_have_text("Copied")
    text: str = await page.evaluate("navigator.clipboard.readText()")
    return text


async def output_of(*command: str) -> str:
    """The output of a command that must succeed within a minute."""
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()
