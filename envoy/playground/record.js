// One record: its waterfall, each chunk's gap, parameters, the gateway's view; replay and delete.

import { call, json, lines } from "./calls.js";
import { Bars } from "./bars.js";
import { showCode } from "./code.js";
import { button, byId, bytes, definitions, make, milliseconds, percentile, showFailure } from "./dom.js";
import { replay } from "./play.js";
import { conversation } from "./requests.js";
import { traceLink } from "./settings.js";
import { waterfall } from "./waterfall.js";

const OF_TRACE = 32; // Records of one trace that are drawn.
const CONFIRM_MS = 4000;
const YOUNG_MS = 600_000; // A long answer's record has the time of its begin.
const GATEWAY_MS = 1200;
// Fields of Generate that a record keeps among its parameters.
const FIELDS = [
  ...["max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"],
  ...["repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "hedge", "priority", "pace"],
];

let shownId = "";

/** Shows the record with this id. */
export async function openRecord(recordId) {
  shownId = recordId;
  const detail = byId("record");
  showFailure(byId("record-error"), null);
  detail.replaceChildren(make("p", {}, "Reading the record…"));
  try {
    const record = await json(`/headrace/v1/payloads/${encodeURIComponent(recordId)}`);
    const trace = await ofTrace(record);
    if (shownId !== recordId) return;
    detail.replaceChildren(...partsOf(record, trace));
    detail.querySelector("h2").focus();
    if (!record.gateway) await addGateway(record).catch(() => {}); // Without it the record stays as it is shown.
  } catch (error) {
    if (shownId !== recordId) return;
    detail.replaceChildren();
    showFailure(byId("record-error"), error);
  }
}

/** The gateway's line comes after the record of an answer that has just ended: the record is shown again with it. */
async function addGateway({ record_id: id, time }) {
  if (Date.now() - Date.parse(time) > YOUNG_MS) return;
  await new Promise((resolve) => setTimeout(resolve, GATEWAY_MS));
  const record = await json(`/headrace/v1/payloads/${encodeURIComponent(id)}`);
  const trace = await ofTrace(record);
  if (shownId !== id || !record.gateway) return;
  byId("record").replaceChildren(...partsOf(record, trace));
  if (document.activeElement === document.body) byId("record").querySelector("h2").focus(); // What had the focus is gone.
}

/** The records of the same trace, oldest first; the record alone where it has none. */
async function ofTrace(record) {
  if (!record.trace_id) return [record];
  const asked = new URLSearchParams({ trace_id: record.trace_id, page_size: OF_TRACE });
  const records = [];
  for await (const each of lines(await call(`/headrace/v1/payloads?${asked}`))) records.unshift(each);
  return records.some(({ record_id: id }) => id === record.record_id) ? records : [record];
}

function partsOf(record, trace) {
  const { usage = {}, gateway } = record;
  const others = trace.length > 1 ? ` with ${trace.length} requests` : "";
  const request = requestOf(record);
  return [
    make("h2", { tabIndex: -1 }, `${record.model || "no model"} · ${record.status}${record.finish_reason ? ` · ${record.finish_reason}` : ""}`),
    make("p", { className: "quiet" }, `${new Date(record.time).toLocaleString()} · ${record.protocol ?? "the gateway alone"}`),
    actions(record, request),
    ...outcome(record),
    section("Trace", waterfall(trace), make("p", { className: "quiet" }, `trace${others} `, traceLink(record.trace_id))),
    ...(record.chunks?.length ? [section("Chunks", ...chunks(record))] : []),
    section("Prompt", ...promptOf(record)),
    section("Answer", make("pre", { className: "text", tabIndex: 0 }, record.text ?? "")),
    section("Figures", definitions([
      ["First token", milliseconds(record.ttft_ms)],
      ["Took", milliseconds(record.duration_ms)],
      ["Engine", record.engine_ms === undefined ? "" : milliseconds(record.engine_ms)],
      ["Tokens in / cached / out", `${usage.prompt_tokens ?? 0} / ${usage.cached_tokens ?? 0} / ${usage.completion_tokens ?? 0}`],
      ["Resumed", record.resumes ? `${record.resumes} times` : ""],
      ["Client", record.client],
      ["Request", record.request_id],
      ["Record", record.record_id],
      ["Weights", record.fingerprint],
      ["Served by", record.served_model],
    ])),
    section("Parameters", make("pre", { className: "code", tabIndex: 0 }, pretty(record.parameters))),
    ...(gateway ? [section("The gateway's view", gatewayOf(gateway))] : []),
  ];
}

/** How a request ended that got no whole answer: by its caller, or by an error of a hop. */
function outcome({ status, message, failed_hop: hop }) {
  if (status === "CANCELLED" && !hop) return [make("p", { className: "quiet" }, "cancelled by the caller")];
  if (!message) return [];
  return [make("p", { className: "error" }, hop ? `${hop}: ${message}` : message)];
}

const section = (title, ...contents) => make("section", {}, make("h3", {}, title), ...contents);

function chunks(record) {
  const bars = new Bars();
  const starts = (record.predictors ?? []).slice(1).map(({ offset_ms: at }) => at);
  let before = 0;
  for (const { offset_ms: at, token_ids: ids = [] } of record.chunks) {
    bars.add(Math.max(1, ids.length), at - before, starts.some((start) => Math.abs(start - at) < 0.5));
    before = at;
  }
  bars.label();
  const gaps = bars.gaps.slice(1);
  const summary = gaps.length
    ? `gap median ${milliseconds(percentile(gaps, 0.5))}, p99 ${milliseconds(percentile(gaps, 0.99))}, longest ${milliseconds(Math.max(...gaps))}`
    : "one chunk";
  return [bars.element, make("p", { className: "quiet" }, `${record.chunks.length} chunks · ${summary}`)];
}

function promptOf(record) {
  const messages = conversation(record.prompt);
  if (messages === null) return [make("pre", { className: "text", tabIndex: 0 }, record.prompt ?? "")];
  return messages.map(({ role, content }) => make("p", { className: "text" }, make("b", {}, `${role} `), content));
}

function gatewayOf(gateway) {
  return definitions([
    ["Path", gateway.path],
    ["Status", String(gateway.http_status ?? "none: the caller left")],
    ["Flags", gateway.response_flags],
    ["Details", gateway.details],
    ["Took", milliseconds(gateway.duration_ms)],
    ["Received", bytes(Number(gateway.request_bytes ?? 0))],
    ["Sent", bytes(Number(gateway.response_bytes ?? 0))],
    ["Answered by", gateway.upstream],
    ["Caller", gateway.peer],
  ]);
}

/** The value of a record's parameters, which are JSON; a seed that a number would round is a text. */
const parsed = (parameters) => JSON.parse(parameters.replace(/("seed":\s*)(-?\d{16,})(?=\s*[,}])/g, '$1"$2"'));

function pretty(parameters) {
  if (!parameters) return "none: the model's own";
  try {
    return JSON.stringify(parsed(parameters), null, 2);
  } catch {
    return parameters;
  }
}

/** The request to Generate that a record was made by, null where it cannot be made of the record. */
function requestOf(record) {
  const messages = conversation(record.prompt);
  if (!record.model || !record.prompt || (messages === null && record.prompt.startsWith("["))) return null;
  let given = {};
  try {
    given = parsed(record.parameters || "{}");
  } catch {
    return null; // The record has only the beginning of them.
  }
  const kept = Object.entries(given).filter(([name]) => FIELDS.includes(name));
  const sampling = Object.fromEntries(kept.map(([name, value]) => [name, name === "seed" ? String(value) : value]));
  return { model: record.model, ...(messages ? { messages } : { prompt: record.prompt }), ...sampling };
}

function actions(record, request) {
  const again = button("Replay", () => {
    const why = replay(request);
    if (why) showFailure(byId("record-error"), new Error(`It cannot be sent again: ${why}.`));
  });
  const code = button("As code", () => showCode(request));
  again.disabled = code.disabled = request === null;
  return make("div", { className: "row" }, again, code, deleteButton(record.record_id));
}

/** Asks once more before it deletes. */
function deleteButton(recordId) {
  let isSure = false;
  const remove = button("Delete", async () => {
    if (!isSure) {
      isSure = true;
      remove.textContent = "Delete it for good?";
      setTimeout(() => {
        isSure = false;
        remove.textContent = "Delete";
      }, CONFIRM_MS);
      return;
    }
    try {
      await call(`/headrace/v1/payloads/${encodeURIComponent(recordId)}`, { method: "DELETE" });
      location.hash = "#requests";
    } catch (error) {
      showFailure(byId("record-error"), error);
    }
  }, { className: "danger" });
  return remove;
}
