// The tab Play: sends the requests of the form and shows the answers; stops them, kills their predictor.

import { Answer } from "./answer.js";
import { Failure, lines, post } from "./calls.js";
import { announce, byId, button, make, showFailure } from "./dom.js";
import { fill, firstExample, isChat, listModels, model, requestOf, startForm } from "./form.js";
import { Crowd, MOST } from "./crowd.js";
import { settings } from "./settings.js";
import { look, onLook, stack } from "./status.js";
import { followUsage } from "./usage.js";

const TURNS = 100; // Exchanges that stay on the page.
const NEAR_END = 40; // Pixels.
const ENDLESS_ROUNDS = 30;
const ENDLESS_TOKENS = 800;
const PROMPT_ROOM = 200; // Tokens of the context that an endless answer leaves to its prompt.

let running = null; // The AbortController of what is generated now.
let shown = null; // The answer or the crowd of it.
let isAtEnd = true; // Whether the reader sees the end of the transcript.
let turns = []; // The messages of the chat so far, without the system's.
const transcript = byId("transcript");

function append(...elements) {
  const turn = make("article", { className: "turn" }, ...elements);
  byId("welcome").hidden = true;
  transcript.append(turn);
  while (transcript.querySelectorAll(".turn").length > TURNS) transcript.querySelector(".turn").remove();
  isAtEnd = true;
}

/** Follows what is added while the reader is at the end. */
function followEnd() {
  transcript.addEventListener("scroll", () => {
    isAtEnd = transcript.scrollTop + transcript.clientHeight >= transcript.scrollHeight - NEAR_END;
  });
  const toEnd = () => isAtEnd && transcript.scrollTo(0, transcript.scrollHeight);
  new MutationObserver(toEnd).observe(transcript, { childList: true, subtree: true, characterData: true });
}

/** Runs work that generates, one at a time; the buttons fit to it. */
async function generating(work) {
  if (running) return;
  if (!model()) {
    showFailure(byId("error"), new Failure("No model is ready.", 503));
    return;
  }
  running = new AbortController();
  showFailure(byId("error"), null);
  setRunning(true);
  try {
    await work(running.signal);
  } finally {
    running = shown = null;
    setRunning(false);
    look();
    followUsage();
  }
}

function setRunning(isRunning) {
  byId("generate").disabled = isRunning;
  byId("generate").hidden = isRunning;
  byId("stop").disabled = byId("stop").hidden = !isRunning;
  byId("kill").hidden = !settings.development;
  byId("kill").disabled = true;
  for (const each of byId("demos").querySelectorAll("button")) each.disabled = isRunning;
}

/** Streams the answer to a request; returns whether it came to its end. */
async function stream(request, signal, before = []) {
  const answer = (shown = new Answer(request));
  append(...before, answer.element);
  try {
    const response = await post("/headrace/v1/generate", request, { signal });
    answer.head(response.headers);
    byId("kill").disabled = false;
    for await (const chunk of lines(response)) answer.add(chunk);
    if (!answer.ended) throw new Failure("The stream broke off before its end.", 502);
    announce(answer.text);
    return answer;
  } catch (error) {
    if (error.name === "AbortError") answer.end("you");
    else fail(answer, error);
    return null;
  } finally {
    byId("kill").disabled = true;
  }
}

/** An error is shown with the form, and with the answer where that had begun. */
function fail(answer, error) {
  showFailure(byId("error"), error);
  answer.end(answer.tokens ? "an error" : "an error before the first token");
}

/** A chat shows what was asked; a completion begins with it. */
const askedOf = (text) => (isChat() ? [make("div", { className: "asked" }, text)] : []);

async function send(text, request = requestOf(text, turns)) {
  await generating(async (signal) => {
    const asked = askedOf(text);
    byId("prompt").value = "";
    const answer = await stream(request, signal, asked);
    if (!answer) byId("prompt").value ||= text;
    if (!request.messages) return;
    if (answer) turns.push({ role: "user", content: text }, { role: "assistant", content: answer.text });
    byId("new-chat").hidden = turns.length === 0;
  });
}

/** A story that goes on until it is stopped: what comes at a reader's pace leaves time to watch, and to kill. */
async function endless() {
  byId("pace").value = "20";
  const text = byId("prompt").value || firstExample();
  const room = stack.models?.find(({ id }) => id === model())?.max_model_len ?? ENDLESS_TOKENS;
  const most = Math.max(1, Math.min(ENDLESS_TOKENS, room - PROMPT_ROOM));
  await generating(async (signal) => {
    for (let round = 0; round < ENDLESS_ROUNDS && !signal.aborted; round++) {
      const request = { ...requestOf(text, []), max_tokens: most, ignore_eos: true };
      if ((await stream(request, signal, round ? [] : askedOf(text))) === null) return;
    }
  });
}

/** The same request sixteen times at once: their tokens are made in the same steps. */
async function crowd() {
  const text = byId("prompt").value || turns.findLast(({ role }) => role === "user")?.content || firstExample();
  await generating(async (signal) => {
    const many = (shown = new Crowd(requestOf(text, [])));
    append(many.element);
    try {
      await many.run(signal, () => (byId("kill").disabled = false));
    } catch (error) {
      if (error.name !== "AbortError") showFailure(byId("error"), error);
    }
  });
}

async function kill() {
  byId("kill").disabled = true;
  const answer = shown;
  try {
    // A page of another origin cannot send this header.
    const headers = { "x-headrace-development": "true" };
    answer.killed = true; // For the text of the next mark.
    await post("/headrace/v1/development/kill", { request_id: answer.requestId }, { headers });
    answer.pause();
  } catch (error) {
    answer.killed = false;
    showFailure(byId("error"), error);
  } finally {
    byId("kill").disabled = !running;
  }
}

/** Sends a request of the log again; returns why not, if it cannot. */
export function replay(request) {
  if (running) return "an answer is being generated";
  const why = fill(request);
  if (why) return why;
  turns = request.messages?.filter(({ role }) => role !== "system").slice(0, -1) ?? [];
  location.hash = "#play";
  send(byId("prompt").value, request);
  return "";
}

function newChat() {
  turns = [];
  transcript.querySelectorAll(".turn").forEach((turn) => turn.remove());
  byId("welcome").hidden = false;
  byId("new-chat").hidden = true;
  byId("prompt").focus();
}

/** Begins: the form's buttons, and the models as they become ready. */
export function startPlay() {
  startForm(() => turns);
  byId("request").addEventListener("submit", (event) => {
    event.preventDefault();
    if (byId("prompt").value.trim()) send(byId("prompt").value);
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("kill").addEventListener("click", kill);
  byId("new-chat").addEventListener("click", newChat);
  byId("demos").append(
    button("Endless, 20 tokens/s", endless, { className: "chip", id: "endless" }),
    button(`The same, ${MOST} at once`, crowd, { className: "chip", id: "crowd" }),
  );
  byId("begin").addEventListener("click", endless);
  byId("welcome-kill").hidden = !settings.development;
  byId("welcome-how").hidden = settings.development;
  onLook(listModels);
  followEnd();
  setRunning(false);
}
