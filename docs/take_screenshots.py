"""Takes the pictures of docs/playground.md in headless Chromium: `make screenshots`, `python -m docs.take_screenshots`.

It starts a stack of its own with two predictors, clicks as a reader would, and kills a predictor.
"""

import asyncio
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

from playwright.async_api import Browser, Page, async_playwright, expect

from tests.support.free_ports import start_stack

FOLDER = Path(__file__).with_name("images")
WIDE, PHONE = (1280, 800), (390, 844)
STORY = "Tell me a story about a fox and a kite."
KILL_AFTER = re.compile(r"^[3-6]\d$")  # Tokens.
_WAIT_MS = 60_000


async def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("Chromium is needed: Debian's package chromium")
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        stack = await start_stack(Path(folder), {"predictors": 2, "development": True})
        try:
            async with async_playwright() as playwright:
                browser = await playwright.chromium.launch(executable_path=chromium)
                await take_all(browser, stack.gateway)
                await browser.close()
        finally:
            await stack.stop()


async def take_all(browser: Browser, gateway: str) -> None:
    page = await opened(browser, gateway, WIDE, "light")
    await survived_story(page)
    await take(page, "play-wide-light")
    await page.click(".answer a:text('record')")
    await expect(page.locator("#record [data-span]").first).to_contain_text("gateway")
    await take(page, "record-wide-light")

    page = await opened(browser, gateway, WIDE, "dark")
    await page.fill("#prompt", STORY)
    await page.select_option("#pace", "20")
    await page.click("#crowd")
    await expect(page.locator("[data-fact=crowd]")).to_contain_text("in a batch", timeout=_WAIT_MS)
    await take(page, "crowd-wide-dark")

    page = await opened(browser, gateway, PHONE, "dark")
    await survived_story(page)
    await take(page, "play-phone-dark")
    page = await opened(browser, gateway, PHONE, "light")
    await page.click("#drawer-toggle")
    await take(page, "settings-phone-light")


async def opened(browser: Browser, gateway: str, size: tuple[int, int], scheme: Literal["light", "dark"]) -> Page:
    viewport: Any = dict(zip(("width", "height"), size, strict=True))
    page = await browser.new_page(viewport=viewport, color_scheme=scheme)
    await page.goto(f"http://{gateway}/")
    await expect(page.locator("#state-predictors")).to_have_text("2 predictors", timeout=_WAIT_MS)
    await expect(page.locator("#state")).to_have_text("ready", timeout=_WAIT_MS)
    await page.locator("[name=kind][value=messages]").check(force=True)
    return page


async def survived_story(page: Page) -> None:
    """A story at a reader's pace whose predictor is killed by the button."""
    await page.select_option("#pace", "20")
    await page.fill("#prompt", STORY)
    await page.click("#generate")
    tokens = page.locator("[data-fact=tokens] b")
    await expect(tokens).to_have_text(KILL_AFTER, timeout=_WAIT_MS)
    await page.click("#kill")
    await expect(page.locator(".answer a:text('record')")).to_be_visible(timeout=_WAIT_MS)
    await expect(page.locator(".mark")).to_have_count(1)
    await expect(page.locator("#trouble")).to_be_hidden(timeout=_WAIT_MS)


async def take(page: Page, name: str) -> None:
    path = FOLDER / f"playground-{name}.png"
    await page.screenshot(path=path)
    sys.stdout.write(f"{path}: {path.stat().st_size // 1024} KiB\n")


if __name__ == "__main__":
    asyncio.run(main())
