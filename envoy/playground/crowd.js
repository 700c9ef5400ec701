// The same request sixteen times at once, as the choices of one call: a batch at work, live.

import { events, keyOfTab, post } from "./calls.js";
import { make, milliseconds } from "./dom.js";
import { look, stack } from "./status.js";

export const MOST = 16; // OpenAI's API takes no more choices.
const TAIL = 90; // Characters of each answer that are shown.
const LOOK_MS = 500;

/** `element` shows all answers; `pause` is as of an Answer. */
export class Crowd {
  constructor(request) {
    const { logprobs, ...fields } = request;
    this.request = { ...fields, n: MOST, stream: true, max_tokens: fields.max_tokens ?? 200 };
    this.request.seed = Number(this.request.seed); // JSON's numbers; a longer seed than 53 bits is rounded.
    this.requestId = "";
    this.tokens = 0;
    this.cells = Array.from({ length: MOST }, () => make("li", {}, make("span", { className: "tail" })));
    this.texts = Array(MOST).fill("");
    this.line = make("p", { className: "crowd-line", "data-fact": "crowd" }, `${MOST} answers at once…`);
    this.element = make("div", { className: "answer" }, this.line, make("ol", { className: "crowd" }, ...this.cells));
  }

  /** Streams all of them to their end; `onBegin` is called when the first is there. */
  async run(signal, onBegin) {
    const begun = performance.now();
    // Each look counts against a key's limits.
    const looking = keyOfTab() === null ? setInterval(look, LOOK_MS) : 0;
    try {
      const path = this.request.messages ? "/v1/chat/completions" : "/v1/completions";
      const response = await post(path, this.request, { signal });
      this.requestId = response.headers.get("x-request-id") ?? "";
      let first = 0;
      for await (const { choices } of events(response)) {
        if (!first) {
          first = performance.now();
          onBegin();
        }
        for (const choice of choices) this.take(choice);
        this.summarise(first, first - begun);
      }
      this.summarise(first, first - begun, true);
    } finally {
      clearInterval(looking);
    }
  }

  take({ index, text, delta, finish_reason: reason }) {
    const piece = text ?? delta?.content ?? delta?.reasoning ?? "";
    if (piece) this.tokens += 1;
    this.texts[index] = (this.texts[index] + piece).slice(-TAIL);
    this.cells[index].firstChild.textContent = this.texts[index];
    if (reason) this.cells[index].className = "done";
  }

  /** One line for all: how fast together, and what the predictors run. */
  summarise(first, waited, isOver = false) {
    const rate = (this.tokens * 1000) / Math.max(1, performance.now() - first);
    const running = (stack.predictors ?? []).flatMap(({ name, models }) =>
      models.filter(({ running: some }) => some).map(({ running: some }) => `${some} in a batch at ${name}`),
    );
    const now = isOver ? "all have ended" : running.join(", ") || "…";
    const together = `${rate.toFixed(0)} tokens/s together, ${(rate / MOST).toFixed(1)} each`;
    this.line.textContent = `${MOST} answers at once · first token ${milliseconds(waited)} · ${together} · ${now}`;
  }

  pause() {
    this.line.textContent = "A predictor was killed: its answers continue at another one.";
  }
}

