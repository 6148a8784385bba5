// Conversations and messages in IndexedDB. Where there is none, or no room, they live in memory and the page says so.
import { signal } from "./base.js";

const NAME = "kvarn";
const VERSION = 1;
export const storageProblem = signal(null);

const memory = { conversations: new Map(), messages: new Map() }; // what is not stored (yet)
const channel = "BroadcastChannel" in self ? new BroadcastChannel("kvarn") : null;
const FULL = "The browser's storage is full: new messages are not kept. Export this conversation, or delete old ones.";
let wasOpen = false;
let opened = open();

// One that could not be opened is tried again: a disk may have room by then.
async function database() {
  if (!(await opened)) opened = open();
  return opened;
}

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
      asked.result.onclose = () => (opened = open()); // the browser gave up, as on a full disk
      wasOpen = true;
      resolve(asked.result);
    };
    asked.onerror = asked.onblocked = () => resolve(without(asked.error));
  });
}

function without(error) {
  storageProblem.value = wasOpen ? FULL : `This browser keeps nothing (${error?.name ?? "blocked"}): conversations last until the page is closed. Export what you want to keep.`;
  return null;
}

const done = (asked) =>
  new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });

// What is stored, and over it what is not: a message that found no room is still shown and exported.
async function read(store, work, isWanted = () => true) {
  const kept = new Map();
  try {
    const held = await database();
    if (held) for (const one of await done(work(held.transaction(store).objectStore(store)))) kept.set(one.id, one);
  } catch (error) {
    storageProblem.value = `The browser's storage cannot be read (${error.name}). Reload the page.`;
  }
  for (const one of memory[store].values()) if (isWanted(one)) kept.set(one.id, one);
  return [...kept.values()];
}

async function write(stores, work) {
  const held = await database();
  if (!held) return false;
  try {
    await new Promise((resolve, reject) => {
      const transaction = held.transaction(stores, "readwrite");
      transaction.oncomplete = resolve;
      transaction.onabort = transaction.onerror = () => reject(transaction.error ?? new DOMException("", "AbortError"));
      work(...stores.map((name) => transaction.objectStore(name)));
    });
    storageProblem.value = null;
    return true;
  } catch (error) {
    // A full quota has a name of its own; of a full disk only the words tell.
    const isFull = error.name === "QuotaExceededError" || /space|IOError/i.test(error.message);
    storageProblem.value = isFull ? FULL : `The browser could not store this (${error.name}). Export what you want to keep.`;
    return false;
  }
}

// What another tab has changed: called with the id of the conversation.
export const onChange = (called) => channel?.addEventListener("message", (event) => called(event.data));
const tell = (id) => channel?.postMessage(id);

export async function listConversations() {
  const all = await read("conversations", (store) => store.getAll());
  return all.sort((a, b) => b.updated - a.updated);
}

export function messagesOf(id) {
  return read("messages", (store) => store.index("conversation").getAll(id), (message) => message.conversation === id);
}

export async function save(conversation, messages = []) {
  memory.conversations.set(conversation.id, conversation);
  for (const message of messages) memory.messages.set(message.id, message);
  const [waiting, heads] = [[...memory.messages.values()], [...memory.conversations.values()]]; // and what found no room before
  const isStored = await write(["conversations", "messages"], (conversations, stored) => {
    for (const one of heads) conversations.put(one);
    for (const message of waiting) stored.put(message);
  });
  if (!isStored) return;
  for (const [kind, given] of [["conversations", heads], ["messages", waiting]]) {
    for (const one of given) if (memory[kind].get(one.id) === one) memory[kind].delete(one.id); // else it was changed meanwhile
  }
  tell(conversation.id);
}

export async function remove(id) {
  const messages = await messagesOf(id);
  memory.conversations.delete(id);
  for (const message of messages) memory.messages.delete(message.id);
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
  const messages = await read("messages", (store) => store.getAll());
  for (const message of messages) {
    if (!found.has(message.conversation) && has((message.content ?? "").toLowerCase())) found.add(message.conversation);
  }
  return found;
}
