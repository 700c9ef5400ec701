"""The page at `/` in a real browser, headless: it streams, stops, tells errors and follows the log.

Screenshots are left in `.run/screenshots`. Without Chromium (Debian's package `chromium`) the tests are skipped.
"""

import re
import shutil

import pytest
import pytest_asyncio
from playwright.async_api import async_playwright, expect

from runner.settings import ROOT
from tests.system.calls import generate, rest
from tests.system.gated_stack import gated_stack
from tests.waiting import until

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SCREENSHOTS = ROOT / ".run" / "screenshots"
TOKENS = 6
HOSTILE = "<img src=x onerror=document.title='broken'>"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no browser here (Debian's package chromium)")


@pytest_asyncio.fixture(scope="module")
async def gated(tmp_path_factory):
    """A stack whose model makes a token for each call of the second value; each test uses up what it lets be made."""
    overrides = {"gateway_trace_page": "http://traces.example/trace/", "development": True}
    # The only predictor may take long to come back where the machine is busy.
    patient = {"TRANSFORMER_PREDICTOR_START_WAIT": "90"}
    async with gated_stack(tmp_path_factory.mktemp("gated"), overrides, transformer=patient) as (stack, let_be_made):
        yield stack, lambda: let_be_made(1)


@pytest_asyncio.fixture(scope="module")
async def browser():
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        await browser.close()


@pytest.fixture
async def open_page(browser):
    """Opens a gateway's page; fails the test where the page's script or policy complained."""
    complaints, contexts = [], []

    async def open_at(gateway):
        contexts.append(await browser.new_context(viewport={"width": 1000, "height": 900}))
        page = await contexts[-1].new_page()
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda message: complaints.append(message.text) if "Content Security" in message.text else None,
        )
        await page.goto(f"http://{gateway}/")
        await expect(page.locator("#model option")).not_to_have_count(0)
        return page

    yield open_at
    for context in contexts:
        await context.close()
    assert complaints == []


async def screenshot(page, name):
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme)
        path = SCREENSHOTS / f"playground-{name}-{scheme}.png"
        await page.screenshot(path=path, full_page=True)
        print(f"screenshot: {path}")


async def test_tokens_appear_one_by_one_as_the_model_makes_them(gated, open_page):
    stack, let_one_token_be_made = gated
    page = await open_page(stack.gateway)
    assert await page.locator("#model option").all_text_contents() == ["storyteller"]
    await page.fill("[name=max_tokens]", str(TOKENS))
    await page.fill("[name=temperature]", "0")
    await page.click("#generate")
    answer, texts = page.locator("#answer"), [""]
    for made in range(1, TOKENS + 1):
        let_one_token_be_made()
        # The model stands still: what is shown is what it has made, and no more will come.
        await expect(page.locator("#tokens")).to_have_text(str(made))
        texts.append(await answer.text_content())
        assert texts[-1].startswith(texts[-2])
    assert len(set(texts)) > TOKENS / 2
    await expect(page.locator("#finish")).to_have_text("max tokens")
    await expect(page.locator("#ttft")).to_have_text(re.compile(r"\d+ ms"))
    await expect(page.locator("#rate")).to_have_text(re.compile(r"[\d.]+"))
    trace = await page.text_content("#trace")
    assert await page.get_attribute("#trace a", "href") == f"http://traces.example/trace/{trace}"
    await screenshot(page, "answer")

    # The record of it is in the log, under the id and the trace that the page showed.
    await page.click("#tab-log")
    row = page.locator("#records tr", has_text=trace)
    await expect(row).to_contain_text("Once upon a time")
    await expect(row).to_contain_text(texts[-1].strip())
    await expect(row).to_contain_text("OK")

    # A request of somebody else's shows up by itself, and what it says is text.
    await expect(page.locator("#log-state")).to_contain_text("Following")
    let_one_token_be_made()
    await generate(stack.gateway, model="storyteller", prompt=HOSTILE, max_tokens=1)
    await expect(page.locator("#records tr").first).to_contain_text(HOSTILE)
    assert await page.locator("img").count() == 0
    assert await page.title() == "Millrace playground"
    await screenshot(page, "log")


async def test_stop_ends_the_generation_where_it_is_made(gated, open_page):
    stack, let_one_token_be_made = gated
    page = await open_page(stack.gateway)
    await page.fill("#prompt", "To be stopped")
    await page.click("#generate")
    let_one_token_be_made()
    await expect(page.locator("#tokens")).to_have_text("1")
    await page.click("#stop")
    await expect(page.locator("#finish")).to_have_text("stopped by you")
    await expect(page.locator("#generate")).to_be_enabled()
    await page.click("#tab-log")
    await page.fill("#filters [name=status]", "CANCELLED")
    await page.click("#filters button")
    await expect(page.locator("#records tr")).to_have_count(1)
    await expect(page.locator("#records tr")).to_contain_text("To be stopped")
    let_one_token_be_made()  # The step that the model was held in.


async def test_the_sentence_goes_on_when_its_predictor_is_killed(gated, open_page):
    stack, let_one_token_be_made = gated
    page = await open_page(stack.gateway)
    await page.fill("[name=max_tokens]", str(TOKENS))
    await page.fill("[name=temperature]", "0")
    answer, kill = page.locator("#answer"), page.locator("#kill")
    await expect(kill).to_be_disabled()

    async def generate_all(kill_at=None):
        await page.click("#generate")
        for made in range(1, TOKENS + 1):
            let_one_token_be_made()
            await expect(page.locator("#tokens")).to_have_text(str(made))
            if made == kill_at:
                await kill_and_wait()
        await expect(page.locator("#finish")).to_have_text("max tokens")
        return await answer.text_content()

    async def kill_and_wait():
        before = stack.pid("predictor-0")

        def is_another():
            try:
                return stack.pid("predictor-0") != before
            except ProcessLookupError:
                return False

        await expect(kill).to_be_enabled()
        await kill.click()
        await until(is_another)
        await stack.wait_ready(timeout_s=60)

    undisturbed = await generate_all()
    assert await page.locator(".pause").count() == 0
    assert await generate_all(kill_at=TOKENS // 2) == undisturbed
    await expect(page.locator(".pause")).to_have_attribute("data-pause", re.compile(r"\d+ ms"))
    await expect(page.locator("#error")).to_be_hidden()
    await expect(kill).to_be_disabled()
    await screenshot(page, "pause")


async def test_the_button_is_of_development_mode_alone(stack, open_page):
    page = await open_page(stack.gateway)
    await expect(page.locator("#generate")).to_be_enabled()
    settings = await page.evaluate("fetch('/playground/settings.json').then((answer) => answer.json())")
    assert settings["development"] == "false"
    await expect(page.locator("#kill")).to_be_hidden()
    await expect(page.locator("#usage")).to_be_hidden()


async def test_errors_are_told_whether_they_come_before_the_answer_or_within(gated, open_page):
    stack, let_one_token_be_made = gated
    page = await open_page(stack.gateway)
    error = page.locator("#error")
    await page.set_extra_http_headers({"x-timeout-ms": "soon"})
    await page.click("#generate")
    await expect(error).to_contain_text("400 from the gateway: ")
    await page.set_extra_http_headers({})
    await page.fill("[name=seed]", "9" * 30)
    await page.click("#generate")
    await expect(error).to_contain_text("400 from the transformer: Failed to parse seed field")
    await page.fill("[name=seed]", "")
    await page.fill("#prompt", "word " * 20_000)
    await page.click("#generate")
    await expect(error).to_contain_text("400 from the transformer: ")

    await page.fill("#prompt", "Once")
    await page.click("#generate")
    await expect(error).to_be_hidden()
    let_one_token_be_made()
    await expect(page.locator("#tokens")).to_have_text("1")
    await stack.kill("transformer")
    await expect(error).to_be_visible()
    await until(lambda: page.locator("#generate").is_enabled())


@pytest.mark.parametrize("role", ["user", "admin"])
async def test_it_asks_for_a_key_once_and_shows_what_that_has_used(browser, tmp_path, new_stack, role):
    key, other = "mr-" + "k" * 40, "mr-" + "o" * 40
    entries = f"[{{name: alice, key: {key}, role: {role}}}, {{name: bob, key: {other}}}]"
    (tmp_path / "keys.yaml").write_text(entries)
    stack = await new_stack(gateway_keys=str(tmp_path / "keys.yaml"), models="storyteller=models/storyteller")
    context = await browser.new_context()
    page = await context.new_page()
    page.set_default_timeout(15_000)
    request = {"model": "storyteller", "prompt": "A dog", "max_tokens": 3}
    answer = await rest(stack.gateway, "POST", "/v1/completions", request, authorization=f"Bearer {other}")
    assert answer.status == 200
    await page.goto(f"http://{stack.gateway}/")
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
    await expect(page.locator("#finish")).not_to_have_text("\u2013")
    await expect(usage).to_have_text(re.compile(r"^This month: 1 request, \d+ tokens, \d+\.\d s of engine$"))
    await screenshot(page, f"usage-{role}")
    await page.click("#tab-log")
    rows = page.locator("#records tr")
    await expect(rows.filter(has_text="Once upon a time")).to_have_count(1)
    if role == "user":
        await expect(rows).to_have_count(1)
    await context.close()
