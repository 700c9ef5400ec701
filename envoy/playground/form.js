// The request form: which model, chat or completion, sampling, pace; and what of it a request to Generate has.

import { json } from "./calls.js";
import { renderedPrompt } from "./answer.js";
import { bytes, byId, button, make, showFailure } from "./dom.js";
import { stack } from "./status.js";

const RENDER_MS = 400;
const SEEDS = 2 ** 31;

// Of models that are bundled; any other gets the last two.
const EXAMPLES = {
  storyteller: {
    messages: ["Tell me a story about a fox and a kite.", "A story about a dragon, please."],
    prompt: ["Once upon a time", "One morning Ben saw a fox near the meadow."],
  },
  normalizer: { messages: [], prompt: ["date: 3 Mar 2021", "number: twenty-one", "date: yesterday"] },
};
const OTHER = {
  messages: ["Explain in one sentence why the sky is blue.", "Write a haiku about water."],
  prompt: ["Once upon a time", "The three most common causes of a slow web page are"],
};

const form = byId("request");
const facts = new Map(); // Of each model: what its ModelConfig states.
let hasChosenKind = false; // Else a model with a chat template gets chats.

export const model = () => byId("model").value;
export const isChat = () => form.elements.kind.value === "messages";

/** Lists the models, keeping the chosen one. */
export function listModels() {
  const select = byId("model");
  const names = (stack.models ?? []).filter(({ kind }) => kind !== "embedding").map(({ id }) => id);
  if (names.join() === [...select.options].map(({ value }) => value).join()) return;
  const before = select.value;
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(before)) select.value = before;
  facts.clear();
  modelChanged();
}

/** What the gateway states of a model, from the parameters of its ModelConfig. */
export async function factsOf(name) {
  if (!facts.has(name)) {
    const { parameters } = await json(`/v2/models/${encodeURIComponent(name)}/config`);
    facts.set(name, Object.fromEntries(Object.entries(parameters).map(([key, value]) => [key, value.string_value])));
  }
  return facts.get(name);
}

async function modelChanged() {
  const name = model();
  if (!name) return;
  const own = await factsOf(name).catch(() => ({}));
  if (name !== model()) return;
  const size = own.parameter_count ? `${(own.parameter_count / 1e6).toFixed(1)} M` : "";
  const first = [own.architecture, size, own.dtype, own.device].filter(Boolean).join(" · ");
  const memory = own.weights_bytes ? ` · weights ${bytes(Number(own.weights_bytes))}` : "";
  byId("model-card").replaceChildren(
    make("b", {}, first || name),
    make("br"),
    `context ${Number(own.context_length ?? 0).toLocaleString("en")}${own.runner ? ` · runner ${own.runner}` : ""}${memory}`,
  );
  const chats = own.chat_template === "true";
  const [chat, completion] = form.elements.kind;
  chat.disabled = !chats;
  byId("chat-label").title = chats ? "" : "This model has no chat template";
  if (!chats) completion.checked = true;
  else if (!hasChosenKind) chat.checked = true;
  kindChanged();
}

/** Fits the form to chats or completions, with examples for the model. */
function kindChanged() {
  const kind = form.elements.kind.value;
  byId("system-field").hidden = kind !== "messages";
  byId("prompt").placeholder =
    kind === "messages" ? `Ask ${model()}… (Enter sends, Shift+Enter breaks the line)` : `Text that ${model()} continues`;
  const examples = (EXAMPLES[model()] ?? OTHER)[kind];
  byId("examples").replaceChildren(
    ...examples.map((text) =>
      button(text, () => {
        byId("prompt").value = text;
        form.requestSubmit();
      }, { className: "chip" }),
    ),
  );
  render();
}

/** The first example for a model, for a demonstration without a prompt. */
export const firstExample = (name = model(), kind = form.elements.kind.value) =>
  (EXAMPLES[name] ?? OTHER)[kind][0] ?? "Once upon a time";

/** The sampling parameters that the form gives; what is empty is the model's, but for the seed, which the page chooses. */
function sampling() {
  const given = {};
  for (const field of form.querySelectorAll(".sampling input")) {
    if (field.value === "") continue;
    if (field.name === "stop") given.stop = [field.value];
    // A seed has 64 bits, more than a number of JavaScript keeps; protobuf's JSON takes a string.
    else given[field.name] = field.type === "number" ? field.valueAsNumber : field.value;
  }
  given.seed ??= String(Math.floor(Math.random() * SEEDS));
  const pace = Number(byId("pace").value);
  if (pace) given.pace = pace;
  if (byId("logprobs").checked) given.logprobs = true;
  return given;
}

/** The request that the form and the turns of the chat before it make. */
export function requestOf(text, turns) {
  if (!isChat()) return { model: model(), prompt: text, ...sampling() };
  const system = byId("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns, { role: "user", content: text }];
  return { model: model(), messages, ...sampling() };
}

let turnsOfChat = () => [];
let rendering = 0;

/** Shows the prompt as the model will see it, a moment after the latest change and only while that is open. */
function render() {
  clearTimeout(rendering);
  if (byId("rendered").open) rendering = setTimeout(renderNow, RENDER_MS);
}

async function renderNow() {
  const shown = byId("rendered-text");
  try {
    const { text, count, room } = await renderedPrompt(requestOf(byId("prompt").value, turnsOfChat()));
    shown.textContent = text;
    byId("rendered-count").textContent = `${count} of ${room ?? "?"} tokens`;
    showFailure(byId("rendered-error"), null);
  } catch (error) {
    shown.textContent = "";
    showFailure(byId("rendered-error"), error);
  }
}

/** Puts a request of the log into the form; returns why that is impossible, or an empty text. */
export function fill(request) {
  if (![...byId("model").options].some(({ value }) => value === request.model)) return `no model ${request.model} is ready`;
  byId("model").value = request.model;
  const last = request.messages?.at(-1);
  if (request.messages && last?.role !== "user") return "its conversation does not end with a message of the user";
  form.elements.kind.value = request.messages ? "messages" : "prompt";
  hasChosenKind = true;
  modelChanged();
  byId("system").value = request.messages?.find(({ role }) => role === "system")?.content ?? "";
  byId("prompt").value = request.messages ? last.content : request.prompt;
  for (const field of form.querySelectorAll(".sampling input")) {
    const value = request[field.name];
    field.value = Array.isArray(value) ? (value[0] ?? "") : (value ?? "");
  }
  const paces = [...byId("pace").options].map(({ value }) => value);
  byId("pace").value = paces.includes(String(request.pace)) ? String(request.pace) : "0";
  return "";
}

/** Begins; `turns` returns the messages of the chat so far. */
export function startForm(turns) {
  turnsOfChat = turns;
  byId("model").addEventListener("change", modelChanged);
  for (const input of form.elements.kind) {
    input.addEventListener("change", () => {
      hasChosenKind = true;
      kindChanged();
    });
  }
  form.addEventListener("input", render);
  byId("rendered").addEventListener("toggle", render);
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
}
