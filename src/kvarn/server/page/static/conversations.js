// The conversations, and the open one as a tree: every message has a parent, and the head tells which path is shown.
import { batch, clip, computed, newId, signal } from "./base.js";
import { chatModels, say } from "./state.js";
import * as store from "./store.js";

export const list = signal([]);
export const current = signal(null); // {id, title, settings, head, created, updated}
const tree = signal(new Map()); // message id -> signal of the message; replaced when one is added
const children = computed(() => {
  const found = new Map();
  for (const [id, message] of tree.value) {
    const parent = message.peek().parent ?? "";
    found.set(parent, [...(found.get(parent) ?? []), id]);
  }
  return found;
});

// Ids from the first message to the head.
export const path = computed(() => {
  const ids = [];
  const seen = new Set();
  for (let id = current.value?.head; id && tree.value.has(id) && !seen.has(id); id = tree.value.get(id).peek().parent) {
    seen.add(id);
    ids.push(id);
  }
  return ids.reverse();
});

export const messageOf = (id) => tree.value.get(id);
export const siblingsOf = (id) => children.value.get(tree.value.get(id)?.peek().parent ?? "") ?? [];
export const messagesOnPath = () => path.value.map((id) => tree.value.get(id).peek());
export const settings = computed(() => current.value?.settings ?? {});
export const modelId = computed(() => {
  const wanted = settings.value.model;
  return chatModels.value.some((model) => model.id === wanted) ? wanted : (chatModels.value[0]?.id ?? "");
});
export const model = computed(() => chatModels.value.find((one) => one.id === modelId.value));

const LAST = "kvarn.settings";
let saving = 0;

function lastSettings() {
  try {
    const { system, params, schema, tools, ...rest } = JSON.parse(localStorage.getItem(LAST)) ?? {};
    return { model: rest.model, inspect: rest.inspect };
  } catch {
    return {};
  }
}

export async function refresh() {
  list.value = await store.listConversations();
}

export function begin() {
  if (current.value && path.value.length === 0) return;
  const now = Date.now();
  batch(() => {
    tree.value = new Map();
    current.value = { id: newId(), title: "New chat", settings: lastSettings(), head: null, created: now, updated: now };
  });
}

export async function open(id) {
  const found = list.value.find((one) => one.id === id);
  if (!found) return begin();
  const messages = await store.messagesOf(id);
  messages.sort((a, b) => a.created - b.created);
  batch(() => {
    tree.value = new Map(messages.map((message) => [message.id, signal(settled(message))]));
    current.value = found;
  });
  sessionStorage.setItem("kvarn.open", id);
}

// An answer that was under way when its page was closed has ended there.
const settled = (message) => (message.state === "writing" ? { ...message, state: "lost" } : message);

export function change(fields) {
  current.value = { ...current.value, ...fields };
}

export function set(fields) {
  change({ settings: { ...settings.value, ...fields } });
  localStorage.setItem(LAST, JSON.stringify(settings.value));
  clearTimeout(saving); // once for several keystrokes
  saving = setTimeout(() => path.value.length && persist(), 300);
}

export function add(fields) {
  const message = { id: newId(), conversation: current.value.id, created: Date.now(), content: "", ...fields };
  const siblings = children.peek().get(message.parent ?? "") ?? [];
  const before = [message.parent, siblings.at(-1)].map((id) => tree.peek().get(id)?.peek().created ?? 0);
  message.created = Math.max(message.created, ...before.map((time) => time + 1)); // messages are ordered by it
  const held = signal(message);
  const isFirst = tree.value.size === 0;
  batch(() => {
    tree.value = new Map(tree.value).set(message.id, held);
    change({ head: message.id, updated: Date.now(), ...(isFirst ? { title: clip(message.content, 60) || "New chat" } : {}) });
  });
  sessionStorage.setItem("kvarn.open", current.value.id);
  return held;
}

export async function persist(...messages) {
  const conversation = current.value;
  const others = list.value.filter((one) => one.id !== conversation.id);
  list.value = [conversation, ...others].sort((a, b) => b.updated - a.updated);
  await store.save(conversation, messages);
}

// For an answer that ends after its conversation was left.
export async function persistIn(conversationId, message) {
  if (current.value?.id === conversationId) return persist(message);
  const conversation = list.value.find((one) => one.id === conversationId);
  if (conversation) await store.save(conversation, [message]);
}

export function select(id) {
  let leaf = id;
  for (let next = children.value.get(leaf); next?.length; next = children.value.get(leaf)) leaf = next.at(-1);
  change({ head: leaf });
  persist();
}

export async function rename(id, title) {
  const found = current.value?.id === id ? current.value : list.value.find((one) => one.id === id);
  const renamed = { ...found, title: clip(title, 200) || found.title };
  if (current.value?.id === id) current.value = renamed;
  list.value = list.value.map((one) => (one.id === id ? renamed : one));
  await store.save(renamed);
}

export async function remove(id) {
  const conversation = list.value.find((one) => one.id === id);
  const messages = await store.remove(id);
  list.value = list.value.filter((one) => one.id !== id);
  if (current.value?.id === id) {
    current.value = null;
    begin();
  }
  say(`“${clip(conversation.title, 30)}” deleted.`, "Undo", async () => {
    await store.save(conversation, messages);
    await refresh();
    await open(id);
  });
}

// What another tab has done: the list, and the open conversation unless an answer is being written here.
store.onChange(async (id) => {
  await refresh();
  if (current.value?.id !== id || [...tree.value.values()].some((one) => one.peek().state === "writing")) return;
  if (list.value.some((one) => one.id === id)) await open(id);
  else begin();
});
