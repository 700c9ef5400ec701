// A call as code: for Python, curl and grpcurl, with exactly the fields that the page sends.

import { keyOfTab } from "./calls.js";
import { byId, copyButton, make } from "./dom.js";

// What OpenAI's client takes as arguments of its own; it sends other fields in `extra_body`.
const OPENAI = ["model", "prompt", "messages", "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop"];

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const asJson = (request) => quoted(JSON.stringify(request));

/** A value as Python writes it. */
function python(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "bigint") return String(value);
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, own]) => `${JSON.stringify(name)}: ${python(own)}`).join(", ")}}`;
  }
  // Python reads JSON's escapes, but for the halves of surrogate pairs, which JSON.stringify writes for broken text alone.
  return JSON.stringify(value);
}

/** Fields of a request to Generate as those of OpenAI's API. */
function forOpenAI(request) {
  const { seed, logprobs, ...fields } = request;
  if (seed !== undefined) fields.seed = /^\d+$/.test(seed) ? BigInt(seed) : seed; // 64 bits.
  if (logprobs) fields.logprobs = request.messages ? true : 1;
  return fields;
}

function pythonCode(request) {
  const fields = forOpenAI(request);
  const own = Object.keys(fields).filter((name) => OPENAI.includes(name) || name === "logprobs");
  const extra = Object.fromEntries(Object.entries(fields).filter(([name]) => !own.includes(name)));
  const method = request.messages ? "chat.completions" : "completions";
  const piece = request.messages ? "chunk.choices[0].delta.content" : "chunk.choices[0].text";
  const key = keyOfTab() === null ? '"none"' : 'os.environ["HEADRACE_KEY"]';
  return [
    ...(keyOfTab() === null ? [] : ["import os", ""]),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(`${location.origin}/v1`)}, api_key=${key})`,
    `stream = client.${method}.create(`,
    ...own.map((name) => `    ${name}=${python(fields[name])},`),
    ...(Object.keys(extra).length ? [`    extra_body=${python(extra)},`] : []),
    "    stream=True,",
    ")",
    "for chunk in stream:",
    `    print(${piece} or "", end="", flush=True)`,
  ].join("\n");
}

const header = () => (keyOfTab() === null ? "" : ` -H "authorization: Bearer $HEADRACE_KEY"`);

const curlCode = (request) =>
  `curl -N${header()} ${location.origin}/headrace/v1/generate \\\n  -d ${asJson(request)}`;

const openAICurlCode = (request) =>
  `curl -N${header()} ${location.origin}/v1/${request.messages ? "chat/completions" : "completions"} \\\n  -d ${asJson({ ...request, stream: true })}`;

function grpcurlCode(request) {
  const plain = location.protocol === "https:" ? "" : " -plaintext";
  const port = location.port || (location.protocol === "https:" ? 443 : 80);
  return `grpcurl${plain}${header()} -d ${asJson(request)} \\\n  ${location.hostname}:${port} headrace.v1.TextGeneration/Generate`;
}

const LANGUAGES = { Python: pythonCode, curl: curlCode, grpcurl: grpcurlCode };

/** Opens the dialog that shows a request as code. */
export function showCode(request) {
  const shown = make("pre", { className: "code", tabIndex: 0 });
  const choices = make("div", { className: "choices", role: "radiogroup", "aria-label": "Language" });
  for (const language of Object.keys(LANGUAGES)) {
    const input = make("input", { type: "radio", name: "language", value: language });
    input.onchange = () => (shown.textContent = LANGUAGES[language](request));
    choices.append(make("label", {}, input, language));
  }
  const dialog = byId("code-dialog");
  byId("code").replaceChildren(choices, shown, copyButton(shown));
  choices.querySelector("input").click();
  dialog.showModal();
}

export { curlCode, grpcurlCode, openAICurlCode, pythonCode };
