// The gateway's settings for the page: where traces are shown, and whether predictors may be killed.

import { json } from "./calls.js";
import { make } from "./dom.js";

export const settings = { tracePage: "", development: false };

export async function readSettings() {
  const { trace_page: page, development } = await json("/playground/settings.json", { quiet: true });
  if (/^https?:\/\//.test(page)) settings.tracePage = page;
  settings.development = ["true", "1"].includes(development);
}

/** A trace's id, with a link where the settings name a page of traces. */
export function traceLink(traceId) {
  if (!settings.tracePage || !traceId) return make("span", {}, traceId || "–");
  const href = settings.tracePage + encodeURIComponent(traceId);
  return make("a", { href, target: "_blank", rel: "noopener" }, traceId);
}
