"""The playground before a stack with default settings, and before one with keys."""

import asyncio
import re
from datetime import UTC, datetime

import pytest
import pytest_asyncio
from playwright.async_api import expect

from tests.support.chromium import WAIT_MS, needs_browser
from tests.system.calls import rest
from tests.system.playground_page import browser, figure, open_page, screenshot

__all__ = ["browser", "open_page"]  # Fixtures.

KEYS = {"alice": ("user", "hr-" + "k" * 40), "carol": ("admin", "hr-" + "a" * 40), "bob": ("user", "hr-" + "o" * 40)}

pytestmark = needs_browser


async def test_a_chat_has_turns_and_a_system_message_and_shows_the_models_prompt(stack, open_page):
    page = await open_page(stack.gateway)
    await expect(page.locator("#kill")).to_be_hidden()  # This needs DEVELOPMENT=true,
    await expect(page.locator("#usage")).to_be_hidden()  # and this a key.
    await page.locator("[name=kind][value=messages]").check(force=True)
    await page.fill("#system", "Be brief.")
    await page.fill("[name=max_tokens]", "12")
    await page.check("#logprobs")
    await page.select_option("#pace", "20")  # Tokens of one message are one mark.
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


async def test_sixteen_requests_at_once_run_in_one_batch(stack, open_page):
    page = await open_page(stack.gateway)
    await page.fill("[name=max_tokens]", "25")
    await page.select_option("#pace", "5")
    await page.fill("#prompt", "Tell me a story.")
    await page.click("#crowd")
    await expect(page.locator("#state-load")).to_have_text("16 running · 0 waiting")
    await expect(page.locator("[data-fact=crowd]")).to_contain_text("16 in a batch at predictor-0")
    await expect(page.locator(".crowd .done")).to_have_count(16)
    await expect(page.locator("#generate")).to_be_enabled()


async def test_failed_reads_leave_the_page_unchanged_and_no_call_open(stack, open_page):
    page = await open_page(stack.gateway)
    young = {"record_id": "young", "time": datetime.now(UTC).isoformat(), "model": "storyteller", "status": "OK"}
    answers = iter([young, None, young])  # The second read, for the gateway's line, fails.
    is_left = asyncio.Event()

    async def answer_young(route):
        record = next(answers, None)
        await (route.fulfill(status=503) if record is None else route.fulfill(json=record))

    async def answer_late(route):
        await is_left.wait()
        await route.fulfill(status=503)

    await page.route("**/payloads/young", answer_young)
    await page.route("**/payloads/late", answer_late)
    await page.route(re.compile(r"/payloads\?"), lambda route: route.fulfill(status=503))
    async with page.expect_event("requestfailed", lambda request: ":tail" in request.url):
        await page.click("#tab-requests")
    await page.clock.install()

    async def open_young():
        await page.evaluate("location.hash = '#requests/young'")
        await expect(page.locator("#record h2")).to_have_text("storyteller · OK")

    async def check_young():
        await expect(page.locator("#record h2")).to_have_text("storyteller · OK")
        await expect(page.locator("#record-error")).to_be_hidden()

    async with page.expect_response(lambda answer: answer.url.endswith("/young") and answer.status == 503):
        await open_young()
        await page.clock.fast_forward(2000)  # The next read is due.
    await check_young()
    async with page.expect_request("**/payloads/late"):
        await page.evaluate("location.hash = '#requests/late'")
    await open_young()
    async with page.expect_response("**/payloads/late"):
        is_left.set()
    await check_young()


async def test_an_answer_ends_once_and_the_waterfall_of_a_long_one_is_bounded(stack, open_page):
    page = await open_page(stack.gateway, is_ready=False)
    ended = await page.evaluate(
        """async () => { const { Answer } = await import("/playground/answer.js");
               const answer = new Answer({}); answer.end("stop"); answer.end("you");
               return answer.figures.innerHTML; }"""
    )
    assert (ended.count("<button"), "stop" in ended, "you" in ended) == (1, True, False)
    ticks = await page.evaluate(
        """async () => { const { waterfall } = await import("/playground/waterfall.js");
               const chunks = [...Array(1200).keys()].map(at => ({ offset_ms: at }));
               const record = { time: "2026-01-01T00:00:00Z", predictors: [{ predictor: "p", offset_ms: 0 }], chunks };
               return waterfall([record]).querySelectorAll("i").length; }"""
    )
    assert ticks == 400  # Every third.


async def test_a_waterfall_shows_each_death_and_the_silence_at_the_end_of_a_broken_answer(stack, open_page):
    page = await open_page(stack.gateway, is_ready=False)
    rows = await page.evaluate(
        """async () => { const { waterfall } = await import("/playground/waterfall.js");
               const at = (offset_ms) => ({ offset_ms, token_ids: [1] });
               const parts = [["a", 10], ["b", 200], ["a", 5000]];
               const predictors = parts.map(([predictor, offset_ms]) => ({ predictor, offset_ms }));
               const record = { time: "2026-01-01T00:00:00Z", status: "CANCELLED", duration_ms: 9000, predictors,
                                chunks: [at(10), at(50), at(200), at(300), at(5000), at(5100)] };
               return [...waterfall([record]).children].map(row => [row.dataset.span, row.lastChild.textContent]); }"""
    )
    assert rows == [
        ["work", "40 ms from 10 ms · 2 tokens"],
        ["pause", "150 ms from 50 ms · a lost, b continues"],
        ["work", "100 ms from 200 ms · 2 tokens"],
        ["pause", "4700 ms from 300 ms · b lost, a continues"],
        ["work", "100 ms from 5000 ms · 2 tokens"],
        ["pause", "3900 ms from 5100 ms · no further token until the call ended"],
    ]


async def test_markdown_of_an_answer_is_shown_and_brings_no_html(stack, open_page):
    page = await open_page(stack.gateway, is_ready=False)
    html = await page.evaluate(
        """async (texts) => { const { markdown, hasMarkdown } = await import("/playground/markdown.js");
               const html = text => markdown(text).map(({ block }) => block.outerHTML).join("");
               return texts.map(text => hasMarkdown(text) ? html(text) : null); }""",
        list(MARKDOWN),
    )
    assert dict(zip(MARKDOWN, html, strict=True)) == MARKDOWN
    # An answer shows it once it is whole; the mark of a kill stands behind its block.
    shown = await page.evaluate(
        """async () => { const { Answer } = await import("/playground/answer.js");
               const answer = new Answer({ messages: [] });
               answer.append({ text: "# A\\n\\n**b" }); answer.predictor = "p"; answer.mark("q", 5);
               answer.append({ text: "**\\n\\nend" }); answer.end("stop");
               return [...answer.shown.children].map(({ tagName }) => tagName); }"""
    )
    assert shown == ["H3", "P", "SPAN", "P"]
    slow = await page.evaluate(
        """async () => { const { markdown } = await import("/playground/markdown.js");
               const began = performance.now();
               for (const piece of ["*a ", "[", "`", "**", "| ", "- \\n", "[a](", "_ _"]) markdown(piece.repeat(20000));
               return performance.now() - began; }"""
    )
    assert slow < 20_000


MARKDOWN = {
    "Just a line.\nAnd 2 * 3 * 4 of another, with a_b_c.": None,
    "# A *b*": "<h3>A <em>b</em></h3>",
    "- a\n- **b**": "<ul><li>a</li><li><strong>b</strong></li></ul>",
    "3. c\n4. d": '<ol start="3"><li>c</li><li>d</li></ol>',
    "```py\n<b>`x`</b>\n```\nafter": (
        '<pre class="code" tabindex="0"><code>&lt;b&gt;`x`&lt;/b&gt;</code></pre><p>after</p>'
    ),
    "`<i>` and [l](https://a.example/?x=1)": (
        '<p><code>&lt;i&gt;</code> and <a href="https://a.example/?x=1" rel="noreferrer" target="_blank">l</a></p>'
    ),
    "**a** [x](javascript:alert(1)) <img src=x onerror=alert(1)>": (
        "<p><strong>a</strong> [x](javascript:alert(1)) &lt;img src=x onerror=alert(1)&gt;</p>"
    ),
    "| a | b |\n|---|---|\n| 1 | 2 |": (
        "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table>"
    ),
}


@pytest_asyncio.fixture(scope="module")
async def keyed(tmp_path_factory, stacks):
    """A stack with keys."""
    entries = ", ".join(f"{{name: {name}, key: {key}, role: {role}}}" for name, (role, key) in KEYS.items())
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(f"[{entries}]")
    async with stacks.use(gateway_keys=str(path), models="storyteller=models/storyteller") as stack:
        yield stack


@pytest.mark.parametrize("name", ["alice", pytest.param("carol", marks=pytest.mark.full)])
async def test_the_page_asks_for_a_key_once_and_shows_its_usage(browser, keyed, name):
    (role, key), (_, other) = KEYS[name], KEYS["bob"]
    context = await browser.new_context()
    page = await context.new_page()
    page.set_default_timeout(WAIT_MS)
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
    await page.fill("#prompt", "Once upon a time")
    await page.click("#generate")
    await expect(figure(page, "finish")).to_have_text(re.compile("stop|max tokens"))
    await expect(usage).to_have_text(re.compile(r"^This month: 1 request, \d+ tokens, \d+\.\d s of engine$"))
    await screenshot(page, f"usage-{role}")
    await page.click("#tab-requests")
    rows = page.locator("#records tr")
    await expect(rows.filter(has_text="Once upon a time").first.locator("[data-label=Client]")).to_have_text(name)
    if role == "user":
        await expect(rows).to_have_count(1)
    else:
        await expect(rows.filter(has_text="A dog").first).to_be_visible()
    await context.close()
