// What the stack is doing: whether it is ready, its models and predictors, and how many sequences run and wait.
//
// Polls, so a page that was opened before the stack was ready can be used as soon as it is. Each poll counts against the
// limits of a key, so with a key the interval is longer; a hidden page does not poll.

import { call, Failure, json, keyOfTab } from "./calls.js";
import { byId, count } from "./dom.js";

const LOOK_MS = 1000;
const KEYED_LOOK_MS = 15_000;

/** `models` are OpenAI's cards, `states` the index with reasons, `predictors` each with its load; null: not known. */
export const stack = { ready: false, models: null, states: null, predictors: null, trouble: "Connecting to the gateway…" };
const listeners = new Set();
let known = ""; // The models that were ready when they were listed.
let timer = 0;
let looking = null;

/** Calls the listener after each look. */
export const onLook = (listener) => listeners.add(listener);

/** Looks now, and then at intervals. */
export function look() {
  looking ??= lookOnce().finally(() => {
    looking = null;
    clearTimeout(timer);
    timer = setTimeout(() => (document.hidden ? 0 : look()), keyOfTab() === null ? LOOK_MS : stack.ready ? KEYED_LOOK_MS : LOOK_MS);
  });
  return looking;
}

document.addEventListener("visibilitychange", () => document.hidden || look());

async function lookOnce() {
  try {
    stack.ready = await isReady();
    stack.trouble = "";
    await Promise.all([readStates(), readPredictors()]);
    if (stack.ready) await readModels();
    if (stack.models?.length === 0) stack.trouble = "No text model is loaded: the tab Models loads one.";
    if (!stack.ready) stack.trouble = whatIsLoading();
  } catch (error) {
    stack.ready = false;
    stack.trouble = `${error.message} ${error.advice ?? ""}`;
  }
  show();
  for (const listener of listeners) listener();
}

async function isReady() {
  try {
    await call("/v2/health/ready", { quiet: true });
    return true;
  } catch (error) {
    if (error.status === 0 || !(error instanceof Failure)) throw error;
    return false;
  }
}

/** The models by state; a gateway with keys answers only calls that have one. */
async function readStates() {
  stack.states = await json("/v2/repository/index", { method: "POST", quiet: true }).catch(() => null);
}

async function readPredictors() {
  const answer = await json("/headrace/v1/predictors", { quiet: true }).catch(() => null);
  stack.predictors = answer?.predictors ?? null;
}

/** Lists the models, and again when others are ready. */
async function readModels() {
  const ready = JSON.stringify(stack.states?.map(({ name, state }) => [name, state]) ?? null);
  if (stack.models !== null && ready === known) return;
  stack.models = (await json("/v1/models")).data;
  known = ready;
}

function whatIsLoading() {
  if (stack.states === null) return "The transformer is starting…";
  const waiting = stack.states.filter(({ state }) => state !== "READY");
  const named = waiting.map(({ name, state, reason }) => `${name}: ${state.toLowerCase()}${reason ? `, ${reason}` : ""}`);
  return named.length ? `Not ready yet. ${named.join("; ")}` : "Not ready yet: no predictor is there.";
}

const sum = (name) => stack.predictors.flatMap(({ models }) => models).reduce((all, model) => all + model[name], 0);

function show() {
  const state = byId("state");
  state.dataset.ready = stack.ready;
  const text = stack.ready ? "ready" : stack.states === null ? "not reachable" : "loading";
  if (state.textContent !== text) state.textContent = text; // A live region: a change is read out.
  byId("state-models").textContent = stack.models === null ? "" : count(stack.models.length, "model");
  const there = stack.predictors?.filter(({ ready }) => ready).length ?? 0;
  const lacking = stack.predictors?.length !== there;
  byId("state-predictors").textContent =
    stack.predictors === null ? "" : `${lacking ? `${there} of ` : ""}${count(stack.predictors.length, "predictor")}`;
  byId("state-load").textContent = stack.predictors === null ? "" : `${sum("running")} running · ${sum("waiting")} waiting`;
  byId("trouble").textContent = stack.trouble;
  byId("trouble").hidden = stack.trouble === "";
}
