// What the scripts of all JavaScript clients share: where the server is, and a line of JSON about each task done.
import { strict as assert } from "node:assert";

export const URL = process.argv[2];
export const OPENAI_URL = `${URL}/v1`;
export const KEY = "none";
export const CHAT = "smollm2";
export const EMBEDDING = "minilm";
export const DIMENSIONS = 384;
export const QUESTION = "Say hi."; // the answer is short and ends by itself
export const WEATHER = "What is the weather in Oslo?";
export const CITIES = ["Oslo", "Paris"];
export const MAX_TOKENS = 100; // of an answer in JSON; so small a model may fill it with spaces
export const SCHEMA = {
  type: "object",
  properties: { city: { type: "string", enum: CITIES } },
  required: ["city"],
  additionalProperties: false,
};

export async function task(name, work) {
  let error = null;
  try {
    await work();
  } catch (found) {
    error = String(found.stack ?? found).slice(0, 3000);
  }
  console.log(JSON.stringify({ task: name, error }));
}

export const follows = (value) => assert.ok(CITIES.includes(value.city), JSON.stringify(value));

export async function joined(parts, textOf) {
  let text = "";
  for await (const part of parts) text += textOf(part) ?? "";
  return text;
}
