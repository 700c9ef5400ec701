// The tab Requests: the log as it grows, with filters; a row opens its record.

import { call, lines } from "./calls.js";
import { byId, make, milliseconds, showFailure } from "./dom.js";
import { onLook, stack } from "./status.js";

const KEPT_RECORDS = 200;
const FIRST_PAGE = 50;
const RECONNECT_MS = 2000;
const SHOWN_CHARACTERS = 200;

let following = null;
let seen = new Set();

/** The filters that are set, as the query's fields. */
function filters() {
  const given = [...new FormData(byId("filters"))].filter(([, value]) => value !== "");
  return new URLSearchParams(given);
}

/** Shows the latest records and those that come, until `stopFollowing` or other filters. */
export async function follow() {
  following?.abort();
  const mine = (following = new AbortController());
  byId("records").replaceChildren();
  seen = new Set();
  while (!mine.signal.aborted) {
    try {
      await followOnce(mine.signal);
    } catch (error) {
      if (mine.signal.aborted) return;
      showFailure(byId("log-error"), error);
      byId("log-state").textContent = "Not following; trying again.";
    }
    await new Promise((resolve) => setTimeout(resolve, RECONNECT_MS));
  }
}

export const stopFollowing = () => following?.abort();

async function followOnce(signal) {
  const chosen = filters();
  // The tail first: a record that comes between the two calls is in the query's answer then.
  const tail = await call(`/headrace/v1/payloads:tail?${chosen}`, { signal });
  try {
    const latest = await call(`/headrace/v1/payloads?${chosen}&page_size=${FIRST_PAGE}`, { signal });
    showFailure(byId("log-error"), null);
    const records = [];
    for await (const record of lines(latest)) records.push(record);
    for (const record of records.reverse()) addRecord(record);
    byId("log-state").textContent = "Following: new requests appear at the top.";
    for await (const record of lines(tail)) addRecord(record);
  } finally {
    // Without a reader nothing else ends the call; a body that `lines` has taken refuses this and is ended there.
    await tail.body.cancel().catch(() => {});
  }
  throw new Error("The log ended the call.");
}

function addRecord(record) {
  if (seen.has(record.record_id)) return;
  seen.add(record.record_id);
  const time = make("time", { dateTime: record.time }, new Date(record.time).toLocaleTimeString());
  const row = make("tr", { "data-record-id": record.record_id });
  for (const [label, content] of [
    ["Time", make("a", { href: `#requests/${record.record_id}` }, time)],
    ["Model", record.model ?? ""],
    ["Client", record.client ?? ""],
    ["Status", statusOf(record)],
    ["Prompt", shortened(lastMessage(record.prompt))],
    ["Answer", shortened(record.text)],
    ["Tokens", tokensOf(record)],
    ["First token", milliseconds(record.ttft_ms)],
    ["Took", milliseconds(record.duration_ms)],
    ["Resumes", record.resumes ? `⚡ ${record.resumes}` : ""],
  ]) {
    row.append(make("td", { "data-label": label }, content));
  }
  // The link is what the keyboard reaches.
  row.onclick = (event) => event.target.closest("a") || (location.hash = `#requests/${record.record_id}`);
  const rows = byId("records");
  rows.prepend(row);
  while (rows.children.length > KEPT_RECORDS) {
    seen.delete(rows.lastElementChild.dataset.recordId);
    rows.lastElementChild.remove();
  }
}

/** A caller that left is no error. */
function statusOf({ status, message, failed_hop: hop }) {
  if (status === "OK") return make("span", { className: "good" }, status);
  if (status === "CANCELLED" && !hop) return make("span", { className: "quiet" }, "CANCELLED by the caller");
  return make("span", { className: "bad" }, [status, message].filter(Boolean).join(": "));
}

const tokensOf = ({ usage }) => (usage ? `${usage.prompt_tokens ?? 0} in, ${usage.completion_tokens ?? 0} out` : "");

const shortened = (text = "") => (text.length > SHOWN_CHARACTERS ? `${text.slice(0, SHOWN_CHARACTERS)}…` : text);

/** Of a conversation, which a record keeps as JSON, its last message. */
export function lastMessage(prompt = "") {
  return conversation(prompt)?.at(-1)?.content ?? prompt;
}

/** The messages that a record's prompt is, if it is a conversation. */
export function conversation(prompt = "") {
  if (!prompt.startsWith("[{")) return null;
  try {
    const messages = JSON.parse(prompt);
    return messages.every(({ role, content }) => typeof role === "string" && typeof content === "string") ? messages : null;
  } catch {
    return null;
  }
}

/** Begins: menus that follow the models of the stack. */
export function startRequests() {
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("change", follow);
  onLook(() => {
    const select = byId("filters").elements.model;
    const names = (stack.models ?? []).map(({ id }) => id);
    if (select.options.length === names.length + 1) return;
    const before = select.value;
    select.replaceChildren(new Option("any", ""), ...names.map((name) => new Option(name, name)));
    select.value = names.includes(before) ? before : "";
  });
}
