// The tab Models: each model's state with its reason, how it runs and in what memory, at which predictors; load and unload.

import { post } from "./calls.js";
import { button, byId, bytes, definitions, make, showFailure } from "./dom.js";
import { factsOf } from "./form.js";
import { look, onLook, stack } from "./status.js";

let shown = ""; // What is shown, as text: it is drawn again when it changes.

async function show() {
  if (byId("view-models").hidden || stack.states === null) return;
  const now = JSON.stringify([stack.states, stack.predictors]);
  if (now === shown) return;
  shown = now;
  const facts = await Promise.all(stack.states.map(({ name, state }) => (state === "READY" ? factsOf(name).catch(() => ({})) : {})));
  if (now !== shown) return;
  // A button that has the focus keeps it.
  const focused = document.activeElement?.dataset?.action;
  byId("models").replaceChildren(...stack.states.map((state, i) => cardOf(state, facts[i])));
  if (focused) byId("models").querySelector(`[data-action="${CSS.escape(focused)}"]`)?.focus();
}

function cardOf({ name, state, reason, version }, facts) {
  const ready = state === "READY";
  const at = (stack.predictors ?? []).flatMap((predictor) =>
    predictor.models.filter(({ model }) => model === name).map((load) => ({ ...load, predictor: predictor.name })),
  );
  return make("section", { className: "card", "data-model": name },
    make("h2", {}, name, " ", make("span", { className: ready ? "state good" : "state bad" }, state.toLowerCase())),
    ...(reason ? [make("p", {}, reason)] : []),
    definitions([
      ["Architecture", facts.architecture],
      ["Parameters", facts.parameter_count && `${(facts.parameter_count / 1e6).toFixed(1)} M, ${facts.dtype}`],
      ["Runner", facts.runner],
      ["Device", facts.device],
      ["Context", facts.context_length && `${Number(facts.context_length).toLocaleString("en")} tokens`],
      ["Weights", facts.weights_bytes && bytes(Number(facts.weights_bytes))],
      ["KV cache, at most", facts.cache_bytes && bytes(Number(facts.cache_bytes))],
      ["Chat template", facts.chat_template && (facts.chat_template === "true" ? "yes" : "no")],
      ["Ready at", stack.predictors && `${at.length} of ${stack.predictors.length} predictors`],
      ["Version", version],
    ]),
    ...at.map(loadOf),
    make("div", { className: "row" },
      ready ? actionButton("Unload", name) : actionButton("Load", name),
      ready ? actionButton("Load", name, "Load again") : ""),
  );
}

function loadOf({ predictor, running, waiting, cache_free: free }) {
  const cache = `${(100 * (1 - free)).toFixed(0)} % of the cache used`;
  return make("p", { className: "quiet" }, `${predictor}: ${running} running, ${waiting} waiting, ${cache}`);
}

function actionButton(action, name, label = action) {
  const own = button(label, async () => {
    own.disabled = true;
    own.textContent = `${action}ing…`;
    showFailure(byId("models-error"), null);
    try {
      await post(`/v2/repository/models/${encodeURIComponent(name)}/${action.toLowerCase()}`, {});
    } catch (error) {
      showFailure(byId("models-error"), error);
    }
    shown = "";
    await look();
  }, { "data-action": `${label} ${name}`, "aria-label": `${label} ${name}` });
  return own;
}

/** Shows the tab now. */
export function openModels() {
  shown = "";
  show();
  look();
}

export function startModels() {
  onLook(show);
}
