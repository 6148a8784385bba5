// AI SDK: text, streams, tools over two steps and objects through its providers of all three dialects; a vector.
import { strict as assert } from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import {
  CHAT, CITIES, DIMENSIONS, EMBEDDING, KEY, MAX_TOKENS, OPENAI_URL, QUESTION, WEATHER, follows, joined, task,
} from "./tasks.mjs";

const openai = createOpenAI({ baseURL: OPENAI_URL, apiKey: KEY });
const models = {
  responses: openai(CHAT),
  chat: openai.chat(CHAT),
  messages: createAnthropic({ baseURL: OPENAI_URL, apiKey: KEY })(CHAT),
  compatible: createOpenAICompatible({ name: "kvarn", baseURL: OPENAI_URL, supportsStructuredOutputs: true })(CHAT),
};
const schema = z.object({ city: z.enum(CITIES) });
const weather = tool({ description: "The weather of a city", inputSchema: schema, execute: async () => "cold" });

for (const [dialect, model] of Object.entries(models)) {
  const asked = { model, maxRetries: 0, temperature: 0, maxOutputTokens: MAX_TOKENS };

  await task(`${dialect}: a stream adds up to the answer`, async () => {
    const { text } = await generateText({ ...asked, prompt: QUESTION });
    assert.ok(text);
    const stream = streamText({ ...asked, prompt: QUESTION, onError: ({ error }) => { throw error; } });
    assert.equal(await joined(stream.textStream, (part) => part), text);
  });

  await task(`${dialect}: a tool is called and its result read`, async () => {
    const { steps } = await generateText({
      ...asked, prompt: WEATHER, tools: { weather }, toolChoice: "required", stopWhen: stepCountIs(2),
    });
    assert.equal(steps.length, 2);
    steps.flatMap((step) => step.toolCalls).forEach((call) => follows(call.input));
  });

  await task(`${dialect}: an object follows its schema`, async () => {
    follows((await generateObject({ ...asked, schema, prompt: "Which city is cold?" })).object);
  });
}

await task("a text becomes a vector", async () => {
  const { embedding } = await embed({ model: openai.embedding(EMBEDDING), value: "the sky", maxRetries: 0 });
  assert.equal(embedding.length, DIMENSIONS);
});
