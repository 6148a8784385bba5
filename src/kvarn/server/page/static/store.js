// Conversations and messages in IndexedDB. Where there is none, or no room, they live in memory and the page says so.
import { newId, signal } from "./base.js";

const NAME = "kvarn";
const VERSION = 1;
export const storageProblem = signal(null);

const memory = { conversations: new Map(), messages: new Map() };
const channel = "BroadcastChannel" in self ? new BroadcastChannel("kvarn") : null;
const opened = open();

function open() {
  return new Promise((resolve) => {
    let asked;
    try {
      asked = indexedDB.open(NAME, VERSION);
    } catch (error) {
      return resolve(without(error));
    }
    asked.onupgradeneeded = () => {
      asked.result.createObjectStore("conversations", { keyPath: "id" });
      asked.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
    };
    asked.onsuccess = () => {
      asked.result.onversionchange = () => asked.result.close(); // another tab has a newer page
      resolve(asked.result);
    };
    asked.onerror = asked.onblocked = () => resolve(without(asked.error));
  });
}

function without(error) {
  storageProblem.value = `This browser keeps nothing (${error?.name ?? "blocked"}): conversations last until the page is closed. Export what you want to keep.`;
  return null;
}

const done = (asked) =>
  new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });

async function read(store, work, fallback) {
  const database = await opened;
  if (!database) return fallback();
  return done(work(database.transaction(store).objectStore(store)));
}

async function write(stores, work) {
  const database = await opened;
  if (!database) return;
  try {
    await new Promise((resolve, reject) => {
      const transaction = database.transaction(stores, "readwrite");
      transaction.oncomplete = resolve;
      transaction.onabort = transaction.onerror = () => reject(transaction.error ?? new DOMException("", "AbortError"));
      work(...stores.map((name) => transaction.objectStore(name)));
    });
    storageProblem.value = null;
  } catch (error) {
    const isFull = error.name === "QuotaExceededError";
    storageProblem.value = isFull
      ? "The browser's storage is full: new messages are not kept. Export this conversation, or delete old ones."
      : `The browser could not store this (${error.name}). Export what you want to keep.`;
  }
}

// What another tab has changed: called with the id of the conversation.
export const onChange = (called) => channel?.addEventListener("message", (event) => called(event.data));
const tell = (id) => channel?.postMessage(id);

export async function listConversations() {
  const all = await read("conversations", (store) => store.getAll(), () => [...memory.conversations.values()]);
  return all.sort((a, b) => b.updated - a.updated);
}

export function messagesOf(id) {
  const inMemory = () => [...memory.messages.values()].filter((message) => message.conversation === id);
  return read("messages", (store) => store.index("conversation").getAll(id), inMemory);
}

export async function save(conversation, messages = []) {
  memory.conversations.set(conversation.id, conversation);
  for (const message of messages) memory.messages.set(message.id, message);
  await write(["conversations", "messages"], (conversations, stored) => {
    conversations.put(conversation);
    for (const message of messages) stored.put(message);
  });
  if (!storageProblem.value) for (const message of messages) memory.messages.delete(message.id);
  tell(conversation.id);
}

export async function remove(id) {
  const messages = await messagesOf(id);
  memory.conversations.delete(id);
  await write(["conversations", "messages"], (conversations, stored) => {
    conversations.delete(id);
    for (const message of messages) stored.delete(message.id);
  });
  tell(id);
  return messages;
}

// Ids of the conversations in which every word occurs, in a title or in one message.
export async function search(text, conversations) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const has = (one) => words.every((word) => one.includes(word));
  const found = new Set(conversations.filter((one) => has(one.title.toLowerCase())).map((one) => one.id));
  const messages = await read("messages", (store) => store.getAll(), () => [...memory.messages.values()]);
  for (const message of messages) {
    if (!found.has(message.conversation) && has((message.content ?? "").toLowerCase())) found.add(message.conversation);
  }
  return found;
}

export async function exported(ids) {
  const conversations = (await listConversations()).filter((one) => !ids || ids.includes(one.id));
  const messages = (await Promise.all(conversations.map((one) => messagesOf(one.id)))).flat();
  messages.sort((a, b) => a.created - b.created);
  return JSON.stringify({ format: "kvarn-conversations", version: 1, conversations, messages }, null, 1);
}

// Conversations of a file, under new ids: what is here already stays as it is.
export async function imported(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON; choose one that was exported here.");
  }
  if (data?.format !== "kvarn-conversations" || data.version !== 1 || !Array.isArray(data.conversations) || !Array.isArray(data.messages)) {
    throw new Error("This file has no conversations of Kvarn; choose one that was exported here.");
  }
  const ids = new Map();
  const fresh = (id) => (id == null ? null : (ids.get(String(id)) ?? ids.set(String(id), newId()).get(String(id))));
  const roles = ["user", "assistant", "tool"];
  for (const one of data.conversations) {
    const messages = data.messages
      .filter((message) => message.conversation === one.id && roles.includes(message.role) && typeof message.content === "string")
      .map((message) => ({ ...message, id: fresh(message.id), parent: fresh(message.parent), conversation: fresh(one.id) }));
    const title = String(one.title ?? "Imported").slice(0, 200);
    const settings = typeof one.settings === "object" && one.settings ? one.settings : {};
    const created = Number(one.created) || Date.now();
    await save({ id: fresh(one.id), title, settings, head: fresh(one.head), created, updated: Number(one.updated) || created }, messages);
  }
  return data.conversations.length;
}
