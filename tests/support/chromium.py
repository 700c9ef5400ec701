"""Chromium, Debian's package, for the tests of pages; without it they are skipped."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, async_playwright, expect

from headrace_runner.settings import ROOT
from tests.waiting import HANG_S

SCREENSHOTS = ROOT / ".run" / "screenshots"
WAIT_MS = 1000 * HANG_S

_EXECUTABLE = shutil.which("chromium") or shutil.which("google-chrome")

needs_browser = pytest.mark.skipif(_EXECUTABLE is None, reason="no browser here (Debian's package chromium)")
expect.set_options(timeout=WAIT_MS)


@asynccontextmanager
async def started_browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=_EXECUTABLE)
        try:
            yield browser
        finally:
            await browser.close()
