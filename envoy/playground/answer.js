// One answer of the transcript: its text as it comes, a bar a token, the marks of predictors that died, and its figures.

import { call, json } from "./calls.js";
import { Bars } from "./bars.js";
import { showCode } from "./code.js";
import { announce, button, make, milliseconds, percentile, showFailure } from "./dom.js";
import { hasMarkdown, markdown } from "./markdown.js";
import { traceLink } from "./settings.js";

// Tokens at least so likely have the first class, those below the last one the next.
const LIKELY = [0.9, 0.5, 0.2, 0.05];
const RECORD_TRIES_MS = [300, 700, 1500]; // A record is in the log some tenths of a second after its answer.

/** `request` is what was sent to Generate. */
export class Answer {
  constructor(request) {
    this.request = request;
    this.text = "";
    this.requestId = "";
    this.traceId = "";
    this.predictor = "";
    this.killed = false; // Its predictor, by the button.
    this.ended = false;
    this.tokens = 0;
    this.atFirst = 0; // Tokens of the first message, which are not part of the rate.
    this.firstAt = 0;
    this.begun = performance.now();
    this.lastAt = this.begun;
    this.bars = new Bars();
    this.marks = []; // Of predictors that died, each with the number of characters before it.
    this.shown = make("p", { className: "text" });
    if (request.prompt) this.shown.append(make("span", { className: "prompt" }, request.prompt));
    this.pausing = make("p", { className: "pausing", hidden: true });
    this.error = make("p", { className: "error", role: "alert", hidden: true });
    this.figures = make("div", { className: "facts" });
    this.element = make("div", { className: "answer streaming" });
    this.element.append(this.shown, this.pausing, this.error, this.bars.element, this.figures);
  }

  /** Shows the ids that the answer came with. */
  head(headers) {
    this.requestId = headers.get("x-request-id") ?? "";
    this.element.dataset.requestId = this.requestId;
    this.traceId = headers.get("x-trace-id") ?? "";
  }

  /** Adds a message of the stream. */
  add(chunk) {
    const now = performance.now();
    const gap = now - this.lastAt;
    const count = chunk.token_ids?.length ?? 0;
    const resumed = Boolean(chunk.predictor) && this.predictor !== "";
    if (resumed) this.mark(chunk.predictor, gap);
    this.predictor = chunk.predictor ?? this.predictor;
    this.append(chunk);
    this.bars.add(count, gap, resumed);
    this.lastAt = now;
    this.tokens += count;
    if (!this.firstAt) {
      this.firstAt = now;
      this.atFirst = this.tokens;
      this.figure("ttft", milliseconds(now - this.begun), "first token");
    } else if (now > this.firstAt) {
      this.figure("rate", (((this.tokens - this.atFirst) * 1000) / (now - this.firstAt)).toFixed(1), "tokens/s");
    }
    this.figure("tokens", String(this.tokens), "tokens");
    if (this.bars.gaps.length > 1) this.figure("p99", milliseconds(percentile(this.bars.gaps.slice(1), 0.99)), "gap p99");
    if (chunk.finish_reason) this.end(chunk.finish_reason === "length" ? "max tokens" : chunk.finish_reason, chunk.usage);
  }

  /** Appends a message's text, coloured by the probability of its least likely token where that is known. */
  append({ text = "", logprobs = [] }) {
    this.text += text;
    if (!logprobs.length) {
      this.shown.append(text);
      return;
    }
    const probability = Math.exp(Math.min(...logprobs));
    const place = LIKELY.findIndex((least) => probability >= least);
    const title = `${(100 * probability).toFixed(1)} %`;
    this.shown.append(make("span", { className: `token p${place < 0 ? LIKELY.length : place}`, title }, text));
  }

  /** Marks where another predictor has continued, and after how long. */
  mark(predictor, gap) {
    const what = `${this.predictor} ${this.killed ? "killed" : "lost"} · continued on ${predictor} after ${milliseconds(gap)}`;
    this.killed = false;
    this.pausing.hidden = true;
    const mark = make("span", { className: "mark" }, `⚡ ${what}`);
    this.marks.push({ mark, at: this.text.length });
    this.shown.append(mark);
    announce(what);
  }

  /** Shows the pause since its predictor was killed, unless it is over: until the mark there is nothing to see. */
  pause() {
    if (!this.killed || this.ended) return;
    this.pausing.textContent = `⚡ ${this.predictor} killed · waiting for another predictor…`;
    this.pausing.hidden = false;
    announce(this.pausing.textContent);
  }

  /** Sets one of the figures below the answer, with a word after or before it. */
  figure(name, value, label = "", before = "") {
    let shown = this.figures.querySelector(`[data-fact="${name}"]`);
    if (shown === null) {
      shown = make("span", { "data-fact": name }, before, make("b", {}), ` ${label}`);
      this.figures.append(shown);
    }
    shown.querySelector("b").textContent = value;
  }

  /** Ends the answer, once: Stop may come after the last message. The record adds what the stream lacks. */
  end(how, usage) {
    if (this.ended) return;
    this.ended = true;
    this.element.classList.remove("streaming");
    this.pausing.hidden = true;
    this.bars.label();
    this.showMarkdown();
    this.figure("finish", how, "", "ended by ");
    if (usage) this.figure("prompt", String(usage.prompt_tokens ?? 0), "tokens in");
    if (this.predictor) this.figure("predictor", this.predictor, "", "at ");
    this.figures.append(button("as code", () => showCode(this.request), { className: "link" }));
    if (this.traceId) this.figures.append(make("span", { "data-fact": "trace" }, "trace ", traceLink(this.traceId)));
    if (this.requestId) this.addRecord();
  }

  /** Shows a chat's answer as Markdown once it is whole; the marks stand behind the blocks that they were in. */
  showMarkdown() {
    if (!this.request.messages || this.request.logprobs || !hasMarkdown(this.text)) return;
    const marks = [...this.marks];
    const parts = markdown(this.text).flatMap(({ block, end }) => {
      const own = marks.splice(0, marks.filter(({ at }) => at < end).length);
      return [block, ...own.map(({ mark }) => mark)];
    });
    const shown = make("div", { className: "text markdown" }, ...parts, ...marks.map(({ mark }) => mark));
    this.shown.replaceWith(shown);
    this.shown = shown;
  }

  fail(error) {
    showFailure(this.error, error);
    this.end("an error");
  }

  /** Links the record once it is in the log, and shows how much of the prompt was cached. */
  async addRecord() {
    for (const wait of RECORD_TRIES_MS) {
      await new Promise((resolve) => setTimeout(resolve, wait));
      const asked = new URLSearchParams({ request_id: this.requestId, page_size: 1 });
      const answer = await call(`/headrace/v1/payloads?${asked}`, { quiet: true }).catch(() => null);
      const line = answer === null ? "" : await answer.text().catch(() => "");
      if (!line) continue;
      const record = JSON.parse(line.split("\n")[0]);
      this.figure("cached", String(record.usage?.cached_tokens ?? 0), "cached");
      const link = make("a", { href: `#requests/${record.record_id}` }, "record");
      this.figures.append(link);
      return;
    }
  }
}

/** The prompt as the model sees it, and its tokens. */
export async function renderedPrompt(request) {
  const { model, prompt, messages } = request;
  const asked = messages ? { model, messages, add_generation_prompt: true } : { model, prompt };
  const options = (value) => ({ method: "POST", body: JSON.stringify(value) });
  const { tokens, count, max_model_len: room } = await json("/tokenize", options(asked));
  const { prompt: text } = await json("/detokenize", options({ model, tokens }));
  return { text, count, room };
}
