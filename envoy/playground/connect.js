// The tab Connect: how each client calls this gateway, filled in with its address and a model that is ready. A model with a
// chat template is called by chats, another one by completions.

import { keyOfTab } from "./calls.js";
import { curlCode, grpcurlCode, openAICurlCode, pythonCode } from "./code.js";
import { byId, copyButton, make } from "./dom.js";
import { factsOf, firstExample } from "./form.js";
import { stack } from "./status.js";

const COMPLETED = "Once upon a time";

function clients(model, chats) {
  const { origin, hostname } = location;
  const address = `${hostname}:${location.port || (location.protocol === "https:" ? 443 : 80)}`;
  const hasKey = keyOfTab() !== null;
  const asked = chats ? { messages: [{ role: "user", content: firstExample(model, "messages") }] } : { prompt: COMPLETED };
  const request = { model, ...asked, max_tokens: 60 };
  const [method, piece] = chats ? ["chat.completions", 'chunk.choices[0].delta.content ?? ""'] : ["completions", "chunk.choices[0].text"];
  const key = hasKey ? '"$HEADRACE_KEY"' : "none";
  return [
    ["Environment", "What most tools for OpenAI's API read.", `export OPENAI_BASE_URL=${origin}/v1\nexport OPENAI_API_KEY=${key}`],
    ["Python, openai", "", pythonCode(request)],
    ["curl", "OpenAI's API, with server-sent events.", openAICurlCode(request)],
    ["curl, lines of JSON", `The gateway's own API: \`/headrace/v1/generate\`.`, curlCode(request)],
    ["grpcurl", "Server reflection is on: no `.proto` files are needed.", grpcurlCode(request)],
    ["buf curl", "", `buf curl --protocol grpc --http2-prior-knowledge${hasKey ? ' -H "authorization: Bearer $HEADRACE_KEY"' : ""} \\\n` +
      `  -d '${JSON.stringify(request)}' \\\n  ${origin}/headrace.v1.TextGeneration/Generate`],
    ["JavaScript, openai", "", [
      'import OpenAI from "openai";', "",
      `const client = new OpenAI({ baseURL: "${origin}/v1", apiKey: ${hasKey ? "process.env.HEADRACE_KEY" : '"none"'} });`,
      `const stream = await client.${method}.create(${JSON.stringify({ ...request, stream: true })});`,
      `for await (const chunk of stream) process.stdout.write(${piece});`,
    ].join("\n")],
    ["Triton's client", "The tensor names are those of Triton's vLLM backend.", [
      "import numpy as np", "import tritonclient.grpc as triton", "",
      'text = triton.InferInput("text_input", [1], "BYTES")',
      `text.set_data_from_numpy(np.array([b"${COMPLETED}"], dtype=object))`,
      `client = triton.InferenceServerClient("${address}")`,
      `result = client.infer("${model}", [text], parameters={"max_tokens": 60}${hasKey ? ', headers={"authorization": f"Bearer {key}"}' : ""})`,
      'print(result.as_numpy("text_output")[0].decode())',
    ].join("\n")],
    ["Triton's REST, KServe", "", `curl ${hasKey ? '-H "authorization: Bearer $HEADRACE_KEY" ' : ""}${origin}/v2/models/${model}/generate \\\n` +
      `  -d '{"text_input": "${COMPLETED}", "max_tokens": 60}'`],
    ["On the terminal", "From a checkout of Headrace.", `.venv/bin/headrace chat --model ${model}\n.venv/bin/headrace log --follow`],
  ];
}

/** A remark, whose parts between backticks are code. */
const remarkOf = (text) => make("p", { className: "quiet" }, ...text.split("`").map((part, i) => (i % 2 ? make("code", {}, part) : part)));

/** Shows the tab. */
export async function openConnect() {
  const model = byId("model").value || stack.models?.[0]?.id || "MODEL";
  const facts = await factsOf(model).catch(() => ({}));
  const note = keyOfTab() === null ? "" : " The key is not written here: set HEADRACE_KEY to it.";
  byId("connect-note").textContent = `One address for all clients: ${location.origin}. The model is ${model}.${note}`;
  byId("clients").replaceChildren(
    ...clients(model, facts.chat_template === "true").map(([name, remark, code]) => {
      const shown = make("pre", { className: "code", tabIndex: 0 }, code);
      return make("section", { className: "card" },
        make("div", { className: "row" }, make("h2", {}, name), copyButton(shown)),
        ...(remark ? [remarkOf(remark)] : []), shown);
    }),
  );
}
