// Conversations as a file, out and in. A file may come from anybody: of what it holds, only what the page can show is taken.
import { newId } from "./base.js";
import { listConversations, messagesOf, save } from "./store.js";

const FORMAT = "kvarn-conversations";
const ROLES = ["user", "assistant", "tool"];

const isText = (value) => typeof value === "string";
const isNumber = (value) => Number.isFinite(value);
const isFlag = (value) => value === true;
const either = (...checks) => (value) => checks.some((check) => check(value));
const isNull = (value) => value === null;
const isMissing = (value) => value === undefined;
const listOf = (check) => (value) => Array.isArray(value) && value.every(check);
const has = (fields) => (value) => typeof value === "object" && value !== null && Object.entries(fields).every(([name, check]) => check(value[name]));
const isToken = has({ t: isText, p: isNumber, b: either(isNull, listOf(isNumber)) });
const MESSAGE = {
  ...{ model: isText, reasoning: isText, state: isText, finish: isText, callId: isText, name: isText, warning: isText, rewritten: isFlag },
  usage: has({ prompt_tokens: isNumber, completion_tokens: isNumber }),
  timing: has({ firstToken: isNumber, rate: either(isNull, isNumber) }),
  calls: listOf(has({ name: isText, args: isText })),
  error: has({ message: isText }),
  frames: listOf(has({ step: isNumber, text: isText })),
  sources: listOf(has({ number: isNumber, source: isText, text: isText, place: either(isText, isMissing) })),
  tokens: listOf((one) => isToken(one) && listOf(isToken)(one.a)),
};
const SETTINGS = { model: isText, inspect: isFlag, system: isText, schema: isText, tools: isText, preset: isText, collection: isText, files: listOf(isText) };
SETTINGS.params = (value) => typeof value === "object" && value !== null && Object.values(value).every(isText);

const taken = (fields, value) => Object.fromEntries(Object.entries(fields).filter(([name, check]) => check(value?.[name])).map(([name]) => [name, value[name]]));

export async function exported() {
  const conversations = await listConversations();
  const messages = (await Promise.all(conversations.map((one) => messagesOf(one.id)))).flat();
  messages.sort((a, b) => a.created - b.created);
  return JSON.stringify({ format: FORMAT, version: 1, conversations, messages }, null, 1);
}

// Conversations of a file, under new ids: what is here already stays as it is. Tells how many.
export async function imported(text) {
  const data = parsed(text);
  const ids = new Map();
  const fresh = (id) => (id == null ? null : (ids.get(String(id)) ?? ids.set(String(id), newId()).get(String(id))));
  for (const one of data.conversations) {
    const messages = data.messages
      .filter((message) => message?.conversation === one?.id && ROLES.includes(message.role) && isText(message.content))
      .map(({ id, parent, role, content, created, ...rest }) => ({ id: fresh(id ?? newId()), parent: fresh(parent), conversation: fresh(one.id), role, content, created: Number(created) || 0, ...taken(MESSAGE, rest) }));
    const created = Number(one.created) || Date.now();
    const head = rooted(messages).has(fresh(one.head)) ? fresh(one.head) : (messages.at(-1)?.id ?? null);
    const title = String(one.title ?? "Imported").slice(0, 200);
    await save({ id: fresh(one.id), title, settings: taken(SETTINGS, one.settings), head, created, updated: Number(one.updated) || created }, messages);
  }
  return data.conversations.length;
}

function parsed(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON; choose one that was exported here.");
  }
  const isOurs = data?.format === FORMAT && data.version === 1 && Array.isArray(data.messages);
  if (isOurs && listOf(has({}))(data.conversations)) return data;
  throw new Error("This file has no conversations of Kvarn; choose one that was exported here.");
}

// Cuts parents that are missing, or that lead back to the message itself; gives the messages by id.
function rooted(messages) {
  const all = new Map(messages.map((message) => [message.id, message]));
  const known = new Set();
  for (const message of messages) {
    const trail = new Set();
    let at = message;
    for (let next = all.get(at.parent); next && !known.has(next); next = all.get(at.parent)) {
      trail.add(at);
      if (trail.has(next)) break;
      at = next;
    }
    if (!known.has(all.get(at.parent))) at.parent = null;
    for (const one of trail.add(at)) known.add(one);
  }
  return all;
}
