// The hops of a call as a waterfall, drawn from its record: no tracing backend is needed.
//
// A record has the gateway's duration, the transformer's times, each predictor with the time of its first token there, and
// the time of each chunk. What has no begin on record starts where the request arrived.

import { make, milliseconds } from "./dom.js";

const MOST_TICKS = 500; // Of a span; more lie on the same pixels.
const LEAST_SILENCE_MS = 250; // At the end of an answer that did not come to its own.

/** The rows of a record's waterfall: name, class, start and end in ms since the request arrived, and a remark. */
export function spansOf(record) {
  const chunks = record.chunks ?? [];
  const spans = [];
  const duration = record.duration_ms ?? 0;
  if (record.gateway) {
    const { duration_ms: took = 0, http_status: status, upstream } = record.gateway;
    spans.push({ name: "gateway", kind: "hop", start: 0, end: took, remark: `${status || "no status"}, to ${upstream || "no service"}` });
  }
  const service = record.protocol ? record.protocol.split("/").pop() : "";
  if (record.protocol) spans.push({ name: "transformer", kind: "hop", start: 0, end: duration, remark: service });
  if (record.ttft_ms !== undefined) {
    const remark = "tokenising, queue, prefill";
    spans.push({ name: "until the first token", kind: "wait", start: 0, end: record.ttft_ms, remark });
  }
  const parts = record.predictors ?? [];
  parts.forEach(({ predictor, offset_ms: start }, i) => {
    const next = parts[i + 1]?.offset_ms;
    const own = chunks.filter(({ offset_ms: at }) => at >= start - 0.5 && (next === undefined || at < next - 0.5));
    const last = own.at(-1)?.offset_ms ?? start;
    // An answer that did not come to its end has no predictor that worked on it up to then.
    const end = next === undefined && record.status === "OK" ? Math.max(duration, start) : last;
    const tokens = own.reduce((sum, { token_ids: ids }) => sum + (ids?.length ?? 0), 0);
    spans.push({ name: predictor, kind: "work", start, end, remark: `${tokens} tokens`, ticks: own.map(({ offset_ms: at }) => at) });
    if (next !== undefined) {
      spans.push({ name: "pause", kind: "pause", start: end, end: next, remark: `${predictor} lost, ${parts[i + 1].predictor} continues` });
    } else if (duration - end > LEAST_SILENCE_MS) {
      spans.push({ name: "pause", kind: "pause", start: end, end: duration, remark: "no further token until the call ended" });
    }
  });
  return spans;
}

/** The waterfall of the records of one trace; each begins as long after the first as its request arrived. */
export function waterfall(records) {
  const begins = records.map(({ time }) => Date.parse(time));
  const first = Math.min(...begins);
  const spans = records.flatMap((record, i) => {
    const shift = begins[i] - first;
    return spansOf(record).map((span) => ({ ...span, shift, record }));
  });
  const length = Math.max(1, ...spans.map(({ shift, end }) => shift + end));
  return make("ol", { className: "waterfall", "aria-label": "The call's hops" }, ...spans.map((span) => rowOf(span, length)));
}

function rowOf({ name, kind, start, end, remark, shift, ticks = [] }, length) {
  const bar = make("span", { className: `span ${kind}` });
  place(bar, shift + start, end - start, length);
  const lane = make("span", { className: "lane" }, bar);
  const step = Math.ceil(ticks.length / MOST_TICKS);
  for (const at of ticks.filter((_, i) => i % step === 0)) {
    const tick = make("i");
    place(tick, shift + at, 0, length);
    lane.append(tick);
  }
  const times = `${milliseconds(end - start)}${start ? ` from ${milliseconds(start)}` : ""}`;
  return make("li", { "data-span": kind }, make("b", {}, name), lane, make("span", { className: "quiet" }, `${times} · ${remark}`));
}

function place(element, start, length, whole) {
  element.style.left = `${(100 * start) / whole}%`;
  if (length) element.style.width = `${(100 * length) / whole}%`;
}
