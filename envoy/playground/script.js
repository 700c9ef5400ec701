// The playground: streams an answer token by token, and follows the payload log.
// Both come as newline-delimited JSON; what they say is only ever inserted as text.

const KEPT_RECORDS = 200;
const RECONNECT_MS = 2000;
const SHOWN_CHARACTERS = 300;
const USAGE_MS = 500; // A record is in the sums some tenths of a second after its answer.
const USAGE_TRIES = 10;

const byId = (id) => document.getElementById(id);

// ---------------------------------------------------------------- calls

// Where the gateway wants a key: kept for this tab alone.
const KEY = "key";
let asking = null;

/** Asks for a key, once for all calls that want one; whether there is one then. */
function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, byId("key").value.trim());
      dialog.close();
    };
    dialog.onclose = () => {
      asking = null;
      resolve(sessionStorage.getItem(KEY) !== null);
    };
    dialog.showModal();
  });
  return asking;
}

/** An answer that is not an error, with the error's own text where it is one. */
async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = key === null ? options.headers : { ...options.headers, authorization: `Bearer ${key}` };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  if (response.status === 401) {
    // Another call may have got a newer key meanwhile.
    if (key !== null && key === sessionStorage.getItem(KEY)) sessionStorage.removeItem(KEY);
    if (sessionStorage.getItem(KEY) !== null || (await askForKey())) return call(path, options);
  }
  const text = await response.text();
  let message = text;
  try {
    const { error } = JSON.parse(text);
    message = error?.message ?? error ?? text;
  } catch {
    // Not JSON: the text itself says what there is to say.
  }
  const hop = response.headers.get("x-failed-hop");
  throw new Error(`${response.status}${hop ? ` from the ${hop}` : ""}: ${message || response.statusText}`);
}

/** Each line of a streamed answer, parsed, as it arrives. */
async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      for (const part of parts) if (part) yield message(part);
    }
    if (rest) yield message(rest);
  } finally {
    // Ends the call where nobody reads on.
    await reader.cancel().catch(() => {});
  }
}

function message(line) {
  const value = JSON.parse(line);
  if (value.error) throw new Error(value.error);
  return value;
}

function show(element, error) {
  element.textContent = error ? error.message : "";
  element.hidden = !error;
}

// ---------------------------------------------------------------- traces

let tracePage = "";

function traceLink(traceId) {
  if (!tracePage || !traceId) return document.createTextNode(traceId || "–");
  const link = document.createElement("a");
  link.href = tracePage + encodeURIComponent(traceId);
  link.target = "_blank";
  link.rel = "noopener";
  link.textContent = traceId;
  return link;
}

async function readSettings() {
  const { trace_page: page, development } = await (await call("/playground/settings.json")).json();
  if (/^https?:\/\//.test(page)) tracePage = page;
  byId("kill").hidden = !["true", "1"].includes(development);
}

// ---------------------------------------------------------------- generation

let running = null;

async function listModels() {
  const { data } = await (await call("/v1/models")).json();
  byId("model").replaceChildren(...data.map((model) => new Option(model.id, model.id)));
}

/** What the form says; fields without a value are left to the model. */
function request() {
  const asked = { model: byId("model").value };
  const prompt = byId("prompt").value;
  if (byId("kind").value === "messages") asked.messages = [{ role: "user", content: prompt }];
  else asked.prompt = prompt;
  for (const field of byId("request").querySelectorAll("fieldset input")) {
    if (field.value === "") continue;
    if (field.name === "stop") asked.stop = [field.value];
    // A seed has 64 bits, more than a number of JavaScript keeps; protobuf's JSON takes a string.
    else asked[field.name] = field.type === "number" ? field.valueAsNumber : field.value;
  }
  return asked;
}

async function generate(event) {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  byId("generate").disabled = true;
  byId("stop").disabled = false;
  for (const id of ["ttft", "tokens", "rate", "finish", "request-id", "trace"]) byId(id).textContent = "–";
  byId("answer").textContent = "";
  show(byId("error"), null);
  try {
    await stream(running.signal);
  } catch (error) {
    if (error.name === "AbortError") byId("finish").textContent = "stopped by you";
    else show(byId("error"), error);
  } finally {
    running = null;
    pause = null;
    byId("generate").disabled = false;
    byId("stop").disabled = byId("kill").disabled = true;
    followUsage();
  }
}

// ---------------------------------------------------------------- what the key has used

const count = (number, unit) => `${number.toLocaleString("en")} ${unit}${number === 1 ? "" : "s"}`;

/** Shows what the key has used since the first of the month, nothing without a key; whether that is news. */
async function showUsage() {
  if (sessionStorage.getItem(KEY) === null) return false;
  const now = new Date();
  const since = new Date(Date.UTC(now.getUTCFullYear(), now.getUTCMonth()));
  const asked = new URLSearchParams({ own: "true", group: "", since: since.toISOString() });
  const { groups } = await (await call(`/millrace/v1/usage?${asked}`)).json();
  const { requests, prompt_tokens: prompt, completion_tokens: completion, seconds } = groups[0];
  const shown = byId("usage");
  const before = shown.textContent;
  const used = [count(Number(requests), "request"), count(Number(prompt) + Number(completion), "token")];
  shown.textContent = `This month: ${used.join(", ")}, ${seconds.toFixed(1)} s of engine`;
  shown.hidden = false;
  return shown.textContent !== before;
}

/** Shows the usage once the record of an answer that has ended is in it. */
async function followUsage() {
  for (let tries = 0; tries < USAGE_TRIES; tries++) {
    await new Promise((resolve) => setTimeout(resolve, USAGE_MS));
    // Where nothing is logged, there is nothing to show.
    if (await showUsage().catch(() => true)) return;
  }
}

// ---------------------------------------------------------------- the death of a predictor, in development mode

let pause = null; // Since the kill: the longest pause, and the mark before what came after it.

async function killPredictor() {
  byId("kill").disabled = true;
  show(byId("error"), null);
  try {
    await call("/millrace/v1/development/kill", {
      method: "POST",
      // A page of another origin cannot send this header.
      headers: { "content-type": "application/json", "x-millrace-development": "true" },
      body: JSON.stringify({ request_id: byId("request-id").textContent }),
    });
    if (!running) return;
    const mark = document.createElement("span");
    mark.className = "pause";
    mark.title = "The predictor was killed; what follows was made after it.";
    pause = { longest: 0, mark };
  } catch (error) {
    show(byId("error"), error);
  } finally {
    byId("kill").disabled = !running;
  }
}

/** Moves the mark to before a piece of the answer that came after a longer pause than any since the kill. */
function markPause(piece, milliseconds) {
  if (!pause || milliseconds <= pause.longest) return;
  pause.longest = milliseconds;
  pause.mark.dataset.pause = `${milliseconds.toFixed(0)} ms`;
  piece.before(pause.mark);
}

async function stream(signal) {
  const begun = performance.now();
  const response = await call("/millrace/v1/generate", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(request()),
    signal,
  });
  byId("request-id").textContent = response.headers.get("x-request-id") ?? "–";
  byId("trace").replaceChildren(traceLink(response.headers.get("x-trace-id")));
  const answer = byId("answer");
  let tokens = 0;
  let atFirst = 0; // Tokens of the first message, which are not part of the rate.
  let firstAt = 0;
  let lastAt = begun;
  let ended = false;
  byId("kill").disabled = false;
  for await (const chunk of lines(response)) {
    const now = performance.now();
    const atEnd = answer.scrollTop + answer.clientHeight >= answer.scrollHeight - 4;
    const piece = document.createTextNode(chunk.text ?? "");
    answer.append(piece);
    markPause(piece, now - lastAt);
    lastAt = now;
    if (atEnd) answer.scrollTop = answer.scrollHeight;
    tokens += chunk.token_ids?.length ?? 0;
    if (!firstAt) {
      firstAt = now;
      atFirst = tokens;
      byId("ttft").textContent = `${(now - begun).toFixed(0)} ms`;
    } else if (now > firstAt) {
      byId("rate").textContent = (((tokens - atFirst) * 1000) / (now - firstAt)).toFixed(1);
    }
    byId("tokens").textContent = tokens;
    if (chunk.finish_reason) {
      ended = true;
      byId("finish").textContent = chunk.finish_reason === "length" ? "max tokens" : chunk.finish_reason;
    }
  }
  if (!ended) throw new Error("the stream broke off before its end");
}

// ---------------------------------------------------------------- the payload log

let following = null;
let seen = new Set();

function filters() {
  const given = [...new FormData(byId("filters"))].filter(([, value]) => value !== "");
  return new URLSearchParams(given);
}

/** Shows the latest records and those that come, until the tab is left or the filters change. */
async function follow() {
  following?.abort();
  const mine = (following = new AbortController());
  byId("records").replaceChildren();
  seen = new Set();
  while (!mine.signal.aborted) {
    try {
      await followOnce(mine.signal);
    } catch (error) {
      if (mine.signal.aborted) return;
      show(byId("log-error"), error);
      byId("log-state").textContent = "Not following; trying again.";
    }
    await new Promise((resolve) => setTimeout(resolve, RECONNECT_MS));
  }
}

async function followOnce(signal) {
  const chosen = filters();
  // The tail first: a record that comes between the two calls is in the query's answer then.
  const tail = await call(`/millrace/v1/payloads:tail?${chosen}`, { signal });
  const latest = await call(`/millrace/v1/payloads?${chosen}&page_size=50`, { signal });
  show(byId("log-error"), null);
  const records = [];
  for await (const record of lines(latest)) records.push(record);
  for (const record of records.reverse()) addRecord(record);
  byId("log-state").textContent = "Following: new records appear at the top.";
  for await (const record of lines(tail)) addRecord(record);
  throw new Error("the log ended the call");
}

function addRecord(record) {
  if (seen.has(record.record_id)) return;
  seen.add(record.record_id);
  const time = document.createElement("time");
  time.dateTime = record.time;
  time.textContent = new Date(record.time).toLocaleTimeString();
  const row = document.createElement("tr");
  row.dataset.recordId = record.record_id;
  for (const content of [
    time,
    record.model ?? "",
    [record.status, record.message].filter(Boolean).join(": "),
    shortened(record.prompt),
    shortened(record.text),
    milliseconds(record.ttft_ms),
    milliseconds(record.duration_ms),
    traceLink(record.trace_id),
  ]) {
    const cell = document.createElement("td");
    cell.append(content);
    row.append(cell);
  }
  const rows = byId("records");
  rows.prepend(row);
  while (rows.children.length > KEPT_RECORDS) {
    seen.delete(rows.lastElementChild.dataset.recordId);
    rows.lastElementChild.remove();
  }
}

const shortened = (text = "") => (text.length > SHOWN_CHARACTERS ? `${text.slice(0, SHOWN_CHARACTERS)}…` : text);
const milliseconds = (value) => (value === undefined ? "–" : `${value.toFixed(0)} ms`);

// ---------------------------------------------------------------- tabs

const tabs = [...document.querySelectorAll('[role="tab"]')];

function select(tab) {
  for (const each of tabs) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", chosen);
    each.tabIndex = chosen ? 0 : -1;
    byId(each.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (tab.id === "tab-log") follow();
  else following?.abort();
}

for (const tab of tabs) {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
    next.focus();
    select(next);
  });
}

byId("request").addEventListener("submit", generate);
byId("stop").addEventListener("click", () => running?.abort());
byId("kill").addEventListener("click", killPredictor);
byId("filters").addEventListener("submit", (event) => {
  event.preventDefault();
  follow();
});

readSettings().catch(() => {}); // Without it the traces are shown and not linked.
listModels()
  .catch((error) => show(byId("error"), error))
  .then(showUsage)
  .catch(() => {});
