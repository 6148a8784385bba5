// @anthropic-ai/sdk: messages, streams, tools and their results, token counts.
import { strict as assert } from "node:assert";
import Anthropic from "@anthropic-ai/sdk";
import { CHAT, KEY, MAX_TOKENS, QUESTION, SCHEMA, URL, WEATHER, follows, task } from "./tasks.mjs";

const client = new Anthropic({ baseURL: URL, apiKey: KEY, maxRetries: 0 });
const asked = { model: CHAT, messages: [{ role: "user", content: QUESTION }], max_tokens: 12, temperature: 0 };
const tools = [{ name: "weather", description: "The weather of a city", input_schema: SCHEMA }];

await task("a stream adds up to the answer", async () => {
  const whole = await client.messages.create(asked);
  assert.ok(whole.content[0].text);
  assert.equal(await client.messages.stream(asked).finalText(), whole.content[0].text);
});

await task("a tool is called and its result read", async () => {
  const messages = [{ role: "user", content: WEATHER }];
  const called = await client.messages.create({
    ...asked, messages, tools, tool_choice: { type: "any" }, max_tokens: MAX_TOKENS,
  });
  assert.equal(called.stop_reason, "tool_use");
  const uses = called.content.filter((part) => part.type === "tool_use");
  uses.forEach((use) => follows(use.input));
  const results = uses.map((use) => ({ type: "tool_result", tool_use_id: use.id, content: "cold" }));
  const after = await client.messages.create({
    ...asked,
    tools,
    messages: [...messages, { role: "assistant", content: called.content }, { role: "user", content: results }],
  });
  assert.ok(after.content.length);
});

await task("tokens are counted", async () => {
  const { input_tokens } = await client.messages.countTokens({ model: CHAT, messages: asked.messages });
  assert.ok(input_tokens > 0);
});
