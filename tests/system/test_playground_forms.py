"""The playground before a stack as it starts by default, and before one that asks for keys."""

import re

import pytest
import pytest_asyncio
from playwright.async_api import expect

from tests.system.calls import rest
from tests.system.playground_page import AXE, PHONE, browser, figure, needs_browser, open_page, problems, screenshot

__all__ = ["browser", "open_page"]  # Fixtures.

KEYS = {
    "alice": ("user", "mr-" + "k" * 40),
    "carol": ("admin", "mr-" + "a" * 40),
    "bob": ("user", "mr-" + "o" * 40),
}

pytestmark = needs_browser


async def test_a_chat_has_turns_and_a_system_message_and_shows_what_the_model_sees(stack, open_page):
    page = await open_page(stack.gateway)
    await expect(page.locator("#kill")).to_be_hidden()  # It needs DEVELOPMENT=true,
    await expect(page.locator("#usage")).to_be_hidden()  # and this a key.
    await page.locator("[name=kind][value=messages]").check(force=True)
    await page.fill("#system", "Be brief.")
    await page.fill("[name=max_tokens]", "12")
    await page.check("#logprobs")
    for turn in (1, 2):
        await page.fill("#prompt", f"Tell me story {turn}.")
        await page.click("#generate")
        await expect(page.locator(".answer")).to_have_count(turn)
        await expect(figure(page, "finish")).to_be_visible()
    assert await page.locator(".answer .token").count() >= 12
    await page.locator("#rendered summary").click()
    rendered = page.locator("#rendered-text")
    await expect(rendered).to_have_text(
        re.compile(
            r"^<s><\|system\|>Be brief\.<\|user\|>Tell me story 1\.<\|assistant\|>.+</s><\|user\|>Tell me story 2\."
        )
    )
    await page.fill("#prompt", "And a third.")
    await expect(rendered).to_contain_text("<|user|>And a third.<|assistant|>")


async def test_sixteen_at_once_run_in_one_batch(stack, open_page):
    page = await open_page(stack.gateway)
    await page.fill("[name=max_tokens]", "20")
    await page.select_option("#pace", "20")
    await page.click("#crowd")
    await expect(page.locator("#state-load")).to_have_text("16 running · 0 waiting")
    await expect(page.locator("[data-fact=crowd]")).to_contain_text("16 in a batch at predictor-0")
    await expect(page.locator(".crowd .done")).to_have_count(16)
    await expect(page.locator("#generate")).to_be_enabled()


@pytest.mark.skipif(not AXE.exists(), reason="no axe-core here (npm package axe-core): accessibility is not checked")
async def test_axe_finds_nothing_in_the_dark_and_what_is_planted(stack, open_page):
    page = await open_page(stack.gateway, PHONE, "dark")
    await page.click("#drawer-toggle")
    assert await problems(page) == []
    await page.evaluate("document.querySelector('#drawer-close').textContent = ''")
    assert [problem.partition(" ")[0] for problem in await problems(page)] == ["button-name"]


@pytest_asyncio.fixture(scope="module")
async def keyed(tmp_path_factory, stacks):
    """A stack that asks for keys."""
    entries = ", ".join(f"{{name: {name}, key: {key}, role: {role}}}" for name, (role, key) in KEYS.items())
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(f"[{entries}]")
    async with stacks.use(gateway_keys=str(path), models="storyteller=models/storyteller") as stack:
        yield stack


@pytest.mark.parametrize("name", ["alice", "carol"])
async def test_it_asks_for_a_key_once_and_shows_what_that_has_used(browser, keyed, name):
    (role, key), (_, other) = KEYS[name], KEYS["bob"]
    context = await browser.new_context()
    page = await context.new_page()
    page.set_default_timeout(15_000)
    request = {"model": "storyteller", "prompt": "A dog", "max_tokens": 3}
    answer = await rest(keyed.gateway, "POST", "/v1/completions", request, authorization=f"Bearer {other}")
    assert answer.status == 200
    await page.goto(f"http://{keyed.gateway}/")
    dialog = page.locator("#key-dialog")
    for given in ("a-wrong-key-of-mine", key):
        await expect(dialog).to_be_visible()
        await page.fill("#key", given)
        await page.keyboard.press("Enter")
    await expect(page.locator("#model option")).not_to_have_count(0)
    await expect(dialog).to_be_hidden()
    usage = page.locator("#usage")
    await expect(usage).to_have_text("This month: 0 requests, 0 tokens, 0.0 s of engine")
    await page.click("#generate")
    await expect(figure(page, "finish")).to_have_text(re.compile("stop|max tokens"))
    await expect(usage).to_have_text(re.compile(r"^This month: 1 request, \d+ tokens, \d+\.\d s of engine$"))
    await screenshot(page, f"usage-{role}")
    await page.click("#tab-requests")
    rows = page.locator("#records tr")
    await expect(rows.filter(has_text="Once upon a time").first).to_be_visible()
    if role == "user":
        await expect(rows).to_have_count(1)
    else:
        await expect(rows.filter(has_text="A dog").first).to_be_visible()
    await context.close()
