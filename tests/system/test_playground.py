"""The playground: it can be opened before the stack is ready, streams, and stops; its predictor is killed, the
record has the pause, and the call's code gives the same text; errors come with advice.

Of the four screens (wide or a phone, light or dark) `make test` takes one; FULL=1 all. Findings of axe fail a test
where axe is installed. Screenshots are left in `.run/screenshots`.
"""

import asyncio
import json
import re
from itertools import pairwise

import pytest
import pytest_asyncio
from playwright.async_api import expect

from headrace_runner.settings import ROOT
from tests.support.chromium import needs_browser
from tests.support.free_ports import free_settings
from tests.support.runner_stack import Stack
from tests.system.calls import generate
from tests.system.playground_page import (
    PHONE,
    TABS,
    WIDE,
    browser,
    check_accessibility,
    copied_code,
    figure,
    is_served,
    open_page,
    output_of,
    own_text,
    screenshot,
)
from tests.waiting import until

__all__ = ["browser", "open_page"]  # Fixtures.

MODEL = "acme/storyteller"
TOKENS, PACE = 30, 20
CLIENTS_PYTHON = ROOT / ".venv-clients" / "bin" / "python"
MARK = re.compile(r"⚡ (predictor-\d) killed · continued on (predictor-\d) after [\d.]+ m?s")
LONG_SEED = str(2**53 + 1)  # A number of JavaScript would round it.
HOSTILE = "<img src=x onerror=document.title='broken'>"

pytestmark = needs_browser


@pytest_asyncio.fixture(scope="module")
async def demo(tmp_path_factory):
    """A stack that is starting: two predictors, development mode."""
    folder = tmp_path_factory.mktemp("demo")
    overrides = {"models": f"{MODEL}=models/storyteller", "predictors": 2, "development": True}
    settings = free_settings(folder, **overrides, gateway_trace_page="http://traces.example/trace/")
    stack = Stack(settings)
    await stack.start()
    try:
        yield stack
    finally:
        await stack.stop()


async def test_a_page_that_was_opened_too_early_recovers(demo, open_page):
    await until(lambda: is_served(demo))
    # However soon the stack is ready, the page's first requests fail.
    page = await open_page(demo.gateway, is_ready=False, refused="**/v2/health/ready")
    await expect(page.locator("#state")).to_have_text(re.compile("loading|not reachable"))
    await expect(page.locator("#trouble")).to_contain_text(re.compile("starting|Not ready yet|does not answer"))
    await page.unroute("**/v2/health/ready")
    await expect(page.locator("#state")).to_have_text("ready")
    await expect(page.locator("#trouble")).to_be_hidden()
    await expect(page.locator("#state-models")).to_have_text("1 model")
    await expect(page.locator("#model option")).to_have_text(MODEL)


async def test_tokens_appear_one_by_one_and_their_record_in_the_log(demo, open_page):
    await demo.wait_ready()
    page = await open_page(demo.gateway)
    await expect(page.locator("[name=kind][value=messages]")).to_be_checked()
    await page.locator("[name=kind][value=prompt]").check(force=True)
    await page.fill("#prompt", "Once upon a time")
    await page.fill("[name=max_tokens]", "6")
    await page.select_option("#pace", "20")
    await page.evaluate(
        """() => { window.texts = []; new MutationObserver(() =>
               texts.push(document.querySelector(".answer .text")?.textContent ?? "")
           ).observe(document.querySelector("#transcript"), { subtree: true, childList: true }); }"""
    )
    await page.click("#generate")
    await expect(figure(page, "finish")).to_have_text("max tokens")
    await expect(page.locator("#prompt")).to_have_value("")
    texts = list(dict.fromkeys(await page.evaluate("texts")))
    assert len(texts) > 4
    assert all(after.startswith(before) for before, after in pairwise(texts))
    await expect(page.locator(".answer .bars rect")).to_have_count(6)
    await expect(figure(page, "tokens")).to_have_text("6")
    await expect(figure(page, "ttft")).to_have_text(re.compile(r"\d+ ms"))
    trace = page.locator("[data-fact=trace] a")
    trace_id = await trace.text_content()
    assert await trace.get_attribute("href") == f"http://traces.example/trace/{trace_id}"

    # Its record is in the log, with the trace that the page showed.
    await page.click("#tab-requests")
    row = page.locator("#records tr", has_text=(await own_text(page)).strip()).first
    await expect(row).to_contain_text("Once upon a time")
    await expect(row.locator("[data-label=Status]")).to_have_text("OK")
    await expect(row.locator("[data-label=Tokens]")).to_have_text(re.compile(r"^\d+ in, 6 out$"))
    await row.click()
    await expect(page.locator("#record")).to_contain_text(trace_id)
    await page.click("text=All requests")

    # Another client's request appears without a reload, and its contents are text.
    await expect(page.locator("#log-state")).to_contain_text("Following")
    await generate(demo.gateway, model=MODEL, prompt=HOSTILE, max_tokens=1)
    await expect(page.locator("#records tr").first).to_contain_text(HOSTILE)
    assert await page.locator("img").count() == 0
    assert await page.title() == "Headrace playground"


async def test_stop_ends_the_generation_in_the_engine(demo, open_page):
    await demo.wait_ready()
    page = await open_page(demo.gateway)
    await page.fill("#prompt", "To be stopped")
    await page.select_option("#pace", "5")
    await page.click("#generate")
    await expect(figure(page, "tokens")).to_have_text(re.compile(r"\d"))
    await page.click("#stop")
    await expect(figure(page, "finish")).to_have_text("you")
    await expect(page.locator("#generate")).to_be_enabled()
    await page.click("#tab-requests")
    await page.select_option("#filters [name=status]", "CANCELLED")
    row = page.locator("#records tr", has_text="To be stopped")
    await expect(row).to_have_count(1)
    await expect(page.locator("#records tr")).to_have_count(1)
    await expect(row.locator("[data-label=Status]")).to_have_text("CANCELLED by the caller")
    await row.click()
    await expect(page.locator("#record")).to_contain_text("cancelled by the caller")
    await expect(page.locator("#record .error")).to_have_count(0)


async def kill_its_predictor(page):
    """Kills the predictor with the button, a third into the answer; returns the names in the mark."""
    await expect(figure(page, "tokens")).to_have_text(re.compile(r"^([89]|[1-9]\d)$"))
    await page.click("#kill")
    mark = page.locator(".answer").last.locator(".mark")
    await expect(mark).to_have_count(1)
    await expect(page.locator(".answer").last.locator(".bars .late")).to_have_count(1)
    return MARK.fullmatch(await mark.text_content()).groups()


@pytest.mark.parametrize(
    ("name", "viewport", "scheme", "kind"),
    [
        ("wide-light", WIDE, "light", "messages"),
        pytest.param("wide-dark", WIDE, "dark", "prompt", marks=pytest.mark.full),
        pytest.param("phone-light", PHONE, "light", "prompt", marks=pytest.mark.full),
        pytest.param("phone-dark", PHONE, "dark", "messages", marks=pytest.mark.full),
    ],
)
async def test_a_slow_story_survives_its_predictor_and_its_code_repeats_it(
    demo, open_page, name, viewport, scheme, kind
):
    await demo.wait_ready()
    page = await open_page(demo.gateway, viewport, scheme)
    await expect(page.locator("#state-predictors")).to_have_text("2 predictors")
    if viewport is PHONE:
        await page.click("#drawer-toggle")
    await page.fill("[name=max_tokens]", str(TOKENS))
    if viewport is PHONE:
        await page.keyboard.press("Escape")
        await expect(page.locator("#drawer")).to_be_hidden()
    await page.locator(f"[name=kind][value={kind}]").check(force=True)
    await page.select_option("#pace", str(PACE))
    await page.fill("#prompt", "Tell me a story about a fox.")
    await page.keyboard.press("Enter")
    killed, survivor = await kill_its_predictor(page)
    assert killed != survivor
    await expect(figure(page, "finish")).to_have_text("max tokens")
    assert float(await figure(page, "rate").text_content()) <= PACE + 1
    assert await figure(page, "predictor").text_content() == survivor
    text = await own_text(page)
    await screenshot(page, f"demo-{name}")
    await page.emulate_media(color_scheme=scheme)
    await check_accessibility(page, "play")
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    await page.click(".answer button:text('as code')")
    python, curl = await copied_code(page, "Python"), await copied_code(page, "curl")
    await check_accessibility(page, "code")
    await page.click("#code-dialog .close")
    commands = [("bash", "-c", curl)]
    if CLIENTS_PYTHON.exists():  # With OpenAI's client.
        commands.append((str(CLIENTS_PYTHON), "-c", python))
    lines, *texts = await asyncio.gather(*(output_of(*command) for command in commands))
    assert "".join(json.loads(line).get("text", "") for line in lines.splitlines()) == text
    assert set(texts) <= {text}

    await page.click(".answer a:text('record')")
    spans = page.locator("#record [data-span]")
    await expect(page.locator("#record [data-span=pause]")).to_contain_text(f"{killed} lost, {survivor} continues")
    await expect(page.locator("#record [data-span=work]")).to_have_count(2)
    await expect(spans.first).to_contain_text("gateway")
    await expect(page.locator("#record .bars .late")).to_have_count(1)
    await screenshot(page, f"record-{name}")
    await page.emulate_media(color_scheme=scheme)
    await check_accessibility(page, "record")
    for tab in TABS[1:]:
        await page.click(f"#tab-{tab}")
        await expect(
            page.locator({"requests": "#records tr", "models": "#models dl", "connect": "#clients pre"}[tab]).first
        ).to_be_visible()
        await check_accessibility(page, tab)
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), tab


async def test_a_record_is_replayed_and_deleted(demo, open_page):
    await demo.wait_ready()
    page = await open_page(demo.gateway)
    await page.fill("[name=max_tokens]", "5")
    await page.fill("[name=seed]", LONG_SEED)
    await page.fill("#prompt", "Tell me a story.")
    await page.click("#generate")
    await page.click(".answer a:text('record')")
    await expect(page.locator("#record")).to_contain_text(f'"seed": "{LONG_SEED}"')
    await page.click("#record button:text('Replay')")
    await expect(page.locator("[name=seed]")).to_have_value(LONG_SEED)
    await expect(page.locator(".answer")).to_have_count(2)
    await expect(figure(page, "finish")).to_have_text("max tokens")
    assert (
        len({await each.evaluate("one => one.textContent") for each in await page.locator(".answer .text").all()}) == 1
    )
    record = page.locator(".answer").last.locator("a:text('record')")
    record_id = (await record.get_attribute("href")).removeprefix("#requests/")
    await record.click()
    await page.click("#record button:text('Delete')")
    await page.click("#record button:text('Delete it for good?')")
    await expect(page.locator("#records tr").first).to_be_visible()
    await expect(page.locator(f"#records [data-record-id='{record_id}']")).to_have_count(0)


async def test_a_model_is_unloaded_and_loaded_again(demo, open_page):
    await demo.wait_ready()
    page = await open_page(demo.gateway)
    await page.click("#tab-models")
    card = page.locator(f"[data-model='{MODEL}']")
    await expect(card).to_contain_text("2 of 2 predictors")
    await expect(card).to_contain_text("paged")
    await card.locator("button:text-is('Unload')").click()
    await expect(card).to_contain_text("unavailable")
    await expect(page.locator("#trouble")).to_contain_text("No text model is loaded")
    await card.locator("button:text-is('Load')").click()
    await expect(card).to_contain_text("2 of 2 predictors")


async def test_errors_before_and_within_the_answer_have_advice(demo, open_page):
    await demo.wait_ready()
    page = await open_page(demo.gateway)
    error = page.locator("#error")
    await page.set_extra_http_headers({"x-timeout-ms": "soon"})
    await page.fill("#prompt", "Once")
    await page.click("#generate")
    await expect(error).to_contain_text("400 from the gateway: ")
    await expect(error.locator(".advice")).to_have_text("Correct the request: the message names the cause.")
    await page.set_extra_http_headers({})
    await page.fill("[name=seed]", "9" * 30)
    await page.click("#generate")
    await expect(error).to_contain_text("400 from the transformer: Failed to parse seed field")
    await page.fill("[name=seed]", "")
    await page.fill("#prompt", "word " * 20_000)
    await page.click("#generate")
    await expect(error).to_contain_text("400 from the transformer: ")

    await page.fill("#prompt", "Once")
    await page.select_option("#pace", "5")
    await page.click("#generate")
    await expect(error).to_be_hidden()
    await expect(figure(page, "tokens")).to_have_text(re.compile(r"\d"))
    await demo.kill("transformer")
    await expect(error).to_be_visible()
    await expect(error.locator(".advice")).to_contain_text("Send it again")
    await expect(page.locator("#generate")).to_be_enabled()
