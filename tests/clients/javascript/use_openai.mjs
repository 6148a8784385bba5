// openai (JavaScript): chat, streams, the tool runner, responses and their continuation, embeddings.
import { strict as assert } from "node:assert";
import OpenAI from "openai";
import {
  CHAT, DIMENSIONS, EMBEDDING, KEY, MAX_TOKENS, OPENAI_URL, QUESTION, SCHEMA, WEATHER, follows, joined, task,
} from "./tasks.mjs";

const client = new OpenAI({ baseURL: OPENAI_URL, apiKey: KEY, maxRetries: 0 });
const asked = {
  model: CHAT, messages: [{ role: "user", content: QUESTION }], max_tokens: 12, temperature: 0,
};
const tool = { name: "weather", description: "The weather of a city", parameters: SCHEMA };

await task("a stream adds up to the answer", async () => {
  const whole = await client.chat.completions.create(asked);
  assert.ok(whole.choices[0].message.content);
  const chunks = await client.chat.completions.create({
    ...asked, stream: true, stream_options: { include_usage: true },
  });
  const text = await joined(chunks, (chunk) => chunk.choices[0]?.delta?.content);
  assert.equal(text, whole.choices[0].message.content);
});

await task("the tool runner calls and answers", async () => {
  const cities = [];
  const run = client.chat.completions.runTools({
    ...asked,
    messages: [{ role: "user", content: WEATHER }],
    max_tokens: MAX_TOKENS,
    tool_choice: { type: "function", function: { name: "weather" } },
    tools: [{
      type: "function",
      function: { ...tool, parse: JSON.parse, function: (given) => (cities.push(given), "cold") },
    }],
  });
  await run.finalMessage();
  assert.ok(cities.length);
  cities.forEach(follows);
});

await task("a response is continued", async () => {
  const first = await client.responses.create({ model: CHAT, input: QUESTION, max_output_tokens: 12 });
  const second = await client.responses.create({
    model: CHAT, input: "Name another.", previous_response_id: first.id, max_output_tokens: 12,
  });
  assert.ok(second.output_text);
});

await task("a streamed response adds up", async () => {
  const stream = client.responses.stream({ model: CHAT, input: QUESTION, max_output_tokens: 12, temperature: 0 });
  const text = await joined(stream, (event) => (event.type === "response.output_text.delta" ? event.delta : ""));
  assert.equal(text, (await stream.finalResponse()).output_text);
});

await task("texts become vectors", async () => {
  const { data } = await client.embeddings.create({ model: EMBEDDING, input: ["sky", "sea"] });
  assert.deepEqual(data.map((one) => one.embedding.length), [DIMENSIONS, DIMENSIONS]);
});

await task("models are listed", async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert.ok(ids.includes(CHAT));
});
