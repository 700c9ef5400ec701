// OpenAI's client for Node and Vercel's AI SDK, unmodified, with tools: GATEWAY and MODEL, as in tool_clients.py.
// Run where both are installed; prints "done" if every check passed.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [gateway, model] = process.argv.slice(2);
const baseURL = `http://${gateway}/v1`;
const messages = [{ role: "user", content: "Is it warm in Rome?" }];
const Weather = z.object({ city: z.enum(["Rome", "Paris"]), is_warm: z.boolean() }).strict();
const settings = { temperature: 0, max_tokens: 200 };

const client = new OpenAI({ baseURL, apiKey: "any", maxRetries: 0 });
const parameters = z.toJSONSchema(Weather);
const tools = [{ type: "function", function: { name: "weather", description: "Looks up.", parameters } }];
const forced = { model, messages, tools, tool_choice: "required", parallel_tool_calls: false, ...settings };
const whole = await client.chat.completions.create(forced);
assert.equal(whole.choices[0].finish_reason, "tool_calls");
const [call] = whole.choices[0].message.tool_calls;
Weather.parse(JSON.parse(call.function.arguments));
const streamed = await client.chat.completions.stream(forced).finalChatCompletion();
assert.equal(streamed.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
assert.equal(streamed.choices[0].finish_reason, "tool_calls");

const provider = { name: "headrace", baseURL, apiKey: "any", includeUsage: true, supportsStructuredOutputs: true };
const ai = createOpenAICompatible(provider)(model);
const executed = [];
const weather = tool({
  description: "Looks the weather of a city up.",
  inputSchema: Weather,
  execute: async (input) => {
    executed.push(Weather.parse(input));
    return "warm";
  },
});
const options = { model: ai, messages, tools: { weather }, temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
const made = await generateText({ ...options, toolChoice: "required" });
assert.ok(made.toolCalls.length >= 1);
assert.equal(made.toolCalls.length, executed.length);
assert.equal(made.finishReason, "tool-calls");
assert.ok(made.usage.outputTokens > 0);
// Two steps: the calls, then their answers go back to the model.
const steps = await generateText({
  ...options,
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? { type: "tool", toolName: "weather" } : "auto" }),
});
assert.equal(steps.steps.length, 2);
const stream = streamText({ ...options, toolChoice: "required" });
const kinds = new Set();
for await (const part of stream.fullStream) {
  assert.notEqual(part.type, "error", String(part.error));
  kinds.add(part.type);
}
for (const kind of ["tool-input-start", "tool-input-delta", "tool-call", "tool-result"]) assert.ok(kinds.has(kind), kind);
assert.equal(await stream.finishReason, "tool-calls");
const { output } = await generateText({ ...options, tools: undefined, output: Output.object({ schema: Weather }) });
Weather.parse(output);
console.log("done");
