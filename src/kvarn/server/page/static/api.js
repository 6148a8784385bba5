// The server: requests with the key in a header, failures as objects, streams of events. Knows no conversation.
import { signal } from "./base.js";
import { ofBrowser, ofTab } from "./kept.js";

// This file lies in page/ below wherever the server is offered, so the API is one folder up.
const BASE = new URL("../", import.meta.url);
const KEY = "kvarn.key";

export const key = signal(ofTab.get(KEY) ?? ofBrowser.get(KEY) ?? "");
export const needsKey = signal(null); // null, or why a key is asked for
export const isReachable = signal(true);

export function setKey(text, remember) {
  key.value = text;
  ofTab.set(KEY, text);
  ofBrowser.set(KEY, remember ? text : null);
  needsKey.value = null;
}

export function forgetKey() {
  key.value = "";
  ofTab.set(KEY, null);
  ofBrowser.set(KEY, null);
}

export class Failure extends Error {
  constructor(message, fields = {}) {
    super(message);
    Object.assign(this, { status: 0, code: null, retryAfter: null, ...fields });
  }
}

export async function request(path, { body, method, signal: abort } = {}) {
  const headers = key.value ? { authorization: `Bearer ${key.value}` } : {};
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, BASE), {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: abort,
      credentials: "omit",
      cache: "no-store",
      referrerPolicy: "no-referrer",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    unreachable();
    throw new Failure("The server does not answer. It may be restarting; ask again once it is back.", { code: "unreachable" });
  }
  isReachable.value = true;
  if (response.ok) return response;
  throw await failure(response);
}

export const getJson = async (path, options) => (await request(path, options)).json();

async function failure(response) {
  const text = await response.text().catch(() => "");
  let told = {};
  try {
    told = JSON.parse(text).error ?? {};
  } catch {
    // not ours: a proxy's page
  }
  const message = told.message ?? `The server answered ${response.status} ${response.statusText}.`;
  if (response.status === 401) needsKey.value = key.value ? message : "This server needs an API key.";
  const wait = Number(response.headers.get("retry-after"));
  return new Failure(message, {
    status: response.status,
    code: told.code ?? null,
    retryAfter: Number.isFinite(wait) && wait > 0 ? wait : null,
  });
}

// Server-sent events of a response, one object each; comments and the end mark are left out.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      unreachable();
      throw new Failure("The connection was lost in the middle of the answer.", { code: "lost" });
    }
    if (piece.done) return;
    rest += piece.value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (!data.length) continue;
      if (data[0] === "[DONE]") {
        yield null;
        return;
      }
      const event = JSON.parse(data.join("\n"));
      if (event.error) throw new Failure(event.error.message ?? "The server failed in the middle.", { code: event.error.code ?? "failed" });
      yield event;
    }
  }
}

let isWaiting = false;

// Ask for health until the server is back; requests are not repeated by themselves.
async function unreachable() {
  isReachable.value = false;
  if (isWaiting) return;
  isWaiting = true;
  for (let wait = 500; !isReachable.value; wait = Math.min(wait * 1.6, 8000)) {
    await new Promise((resolve) => setTimeout(resolve, wait));
    try {
      isReachable.value = (await fetch(new URL("health/ready", BASE), { cache: "no-store" })).ok;
    } catch {
      // still away
    }
  }
  isWaiting = false;
}
