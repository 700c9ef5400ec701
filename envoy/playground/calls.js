// Calls of the gateway: its key, streams, and errors with a remedy.

import { byId } from "./dom.js";

// Kept for this tab alone.
const KEY = "key";
let asking = null;

export const keyOfTab = () => sessionStorage.getItem(KEY);

const ADVICE = {
  400: "Correct the request: the message names the cause.",
  401: "Reload the page and give a key that the gateway knows.",
  403: "Use a key that allows this, or ask whoever runs the gateway.",
  404: "Choose a model of the tab Models, or load this one there.",
  413: "Send less text.",
  429: "Wait a moment and send it again; the message names the limit.",
  500: "Send it again. If it fails again, look for the cause in the log of that hop.",
  501: "The stack is not started for that: DEVELOPMENT=true allows to kill predictors.",
  502: "Send it again: a service behind the gateway died or is starting.",
  503: "Wait until the state at the top is ready; the tab Models shows what is loading.",
  504: "Send it again when less is running, with fewer tokens or a higher pace.",
};

/** An error with its HTTP status, 0 where there was no answer, and what to do about it. */
export class Failure extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
    this.advice = ADVICE[status] ?? "Send it again; if it fails again, look at the log of the services.";
    if (status === 0) this.advice = "Is the stack running? `make up` or `docker compose up` starts it; this page tries again by itself.";
  }
}

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
      resolve(keyOfTab() !== null);
    };
    dialog.showModal();
  });
  return asking;
}

/** An answer that is not an error; raises Failure. `quiet` calls ask for no key. */
export async function call(path, { quiet = false, ...options } = {}) {
  const key = keyOfTab();
  const headers = key === null ? options.headers : { ...options.headers, authorization: `Bearer ${key}` };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The gateway does not answer.", 0);
  }
  if (response.ok) return response;
  if (response.status === 401 && !quiet) {
    // Another call may have got a newer key meanwhile.
    if (key !== null && key === keyOfTab()) sessionStorage.removeItem(KEY);
    if (keyOfTab() !== null || (await askForKey())) return call(path, options);
  }
  const text = await response.text();
  let message = text;
  try {
    const { error } = JSON.parse(text);
    message = error?.message ?? error ?? text;
  } catch {
    // Not JSON: the text itself is the message.
  }
  const hop = response.headers.get("x-failed-hop");
  throw new Failure(`${response.status}${hop ? ` from the ${hop}` : ""}: ${message || response.statusText}`, response.status);
}

export const json = async (path, options) => (await call(path, options)).json();

/** Sends a value as JSON. */
export const post = (path, value, options = {}) =>
  call(path, {
    method: "POST",
    body: JSON.stringify(value),
    ...options,
    headers: { "content-type": "application/json", ...options.headers },
  });

/** Each line of a streamed answer as it arrives. */
async function* textLines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      for (const part of parts) if (part) yield part;
    }
    if (rest) yield rest;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The connection broke in the middle of the answer.", 502);
  } finally {
    // Ends the call if the reader has left the loop.
    await reader.cancel().catch(() => {});
  }
}

/** Each message of newline-delimited JSON. */
export async function* lines(response) {
  for await (const line of textLines(response)) yield checked(JSON.parse(line));
}

/** Each server-sent event of OpenAI's API, up to its `[DONE]`. */
export async function* events(response) {
  for await (const line of textLines(response)) {
    if (!line.startsWith("data: ")) continue;
    if (line === "data: [DONE]") return;
    yield checked(JSON.parse(line.slice("data: ".length)));
  }
}

function checked(message) {
  if (message.error) throw new Failure(message.error.message ?? message.error, 500);
  return message;
}
