// What the key has used since the first of the month; nothing without a key.

import { json, keyOfTab } from "./calls.js";
import { byId, count } from "./dom.js";

const USAGE_MS = 500; // A record is in the sums some tenths of a second after its answer.
const USAGE_TRIES = 10;

/** Shows what the key has used; returns whether that is news. */
export async function showUsage() {
  if (keyOfTab() === null) return false;
  const now = new Date();
  const since = new Date(Date.UTC(now.getUTCFullYear(), now.getUTCMonth()));
  const asked = new URLSearchParams({ own: "true", group: "", since: since.toISOString() });
  const { groups } = await json(`/headrace/v1/usage?${asked}`);
  const { requests, prompt_tokens: prompt, completion_tokens: completion, seconds } = groups[0];
  const shown = byId("usage");
  const before = shown.textContent;
  const used = [count(Number(requests), "request"), count(Number(prompt) + Number(completion), "token")];
  shown.textContent = `This month: ${used.join(", ")}, ${seconds.toFixed(1)} s of engine`;
  shown.hidden = false;
  return shown.textContent !== before;
}

/** Shows the usage once the record of an answer that has ended is in it. */
export async function followUsage() {
  for (let tries = 0; tries < USAGE_TRIES; tries++) {
    await new Promise((resolve) => setTimeout(resolve, USAGE_MS));
    // Where nothing is logged, there is nothing to show.
    if (await showUsage().catch(() => true)) return;
  }
}
