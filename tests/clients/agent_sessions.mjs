// Vercel's AI SDK with its providers for OpenAI and Anthropic, unmodified, with a tool and a typed result: GATEWAY.
// The model caller answers what its test has written: a call of `weather`, then the result. Prints "done" if all passed.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `http://${process.argv[2]}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "any" });
const anthropic = createAnthropic({ baseURL, apiKey: "any" });
const Weather = z.object({ city: z.string(), is_warm: z.boolean() });
let called = [];
const weather = tool({
  description: "Looks the weather of a city up.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    called.push(city);
    return "28 degrees";
  },
});
for (const model of [openai("caller"), openai.chat("caller"), anthropic("caller")]) {
  const prompt = "Is it warm in Rome?";
  const output = Output.object({ schema: Weather });
  const options = { model, prompt, tools: { weather }, output, stopWhen: stepCountIs(3), maxRetries: 0 };
  const whole = await generateText(options);
  assert.deepEqual(whole.output, { city: "Rome", is_warm: true });
  const stream = streamText({ ...options, onError: ({ error }) => assert.fail(String(error)) });
  for await (const part of stream.fullStream) assert.notEqual(part.type, "error", String(part.error));
  assert.deepEqual(await stream.output, { city: "Rome", is_warm: true });
  assert.deepEqual(called, ["Rome", "Rome"]);
  called = [];
}
console.log("done");
