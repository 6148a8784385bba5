// The conversations, and the open one as a tree: every message has a parent, and the head tells which path is shown.
import { batch, clip, computed, effect, newId, signal } from "./base.js";
import { ofBrowser, ofTab } from "./kept.js";
import { presetSettings } from "./presets.js";
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
export const path = computed(() => lineage(current.value?.head));

// From the first message to this one.
export function lineage(head) {
  const ids = new Set();
  for (let id = head; tree.value.has(id) && !ids.has(id); id = tree.value.get(id).peek().parent) ids.add(id);
  return [...ids].reverse();
}

export const messageOf = (id) => tree.value.get(id);
export const siblingsOf = (id) => children.value.get(tree.value.get(id)?.peek().parent ?? "") ?? [];
export const messagesOnPath = () => path.value.map((id) => tree.value.get(id).peek());
export const settings = computed(() => current.value?.settings ?? {});
export const modelId = computed(() => {
  const wanted = settings.value.model;
  return chatModels.value.some((model) => model.id === wanted) ? wanted : (chatModels.value[0]?.id ?? "");
});
export const model = computed(() => chatModels.value.find((one) => one.id === modelId.value));

// The entry of the browser's history tells which one is open.
const openId = computed(() => current.value?.id);
effect(() => openId.value && history.replaceState({ conversation: openId.value }, ""));
addEventListener("popstate", ({ state }) => {
  const id = state?.conversation;
  if (id && id !== openId.value) open(id);
});

const LAST = "kvarn.settings";
const gone = new Set(); // conversations that were deleted, here or in another tab: what is still written into them is not kept
const underWay = new Map(); // answers that are written here, by id: whoever leaves their conversation finds them on the way back
let saving = 0;

function lastSettings() {
  const { model, inspect, preset } = ofBrowser.object(LAST);
  return { model, inspect, ...presetSettings(preset) };
}

export async function refresh() {
  list.value = await store.listConversations();
}

let opening = 0; // counts what was chosen: a read that ends after the next choice shows nothing

export function begin() {
  opening += 1;
  if (current.value && path.value.length === 0) return;
  const now = Date.now();
  ofTab.set("kvarn.open", null);
  batch(() => {
    tree.value = new Map();
    current.value = { id: newId(), title: "New chat", settings: lastSettings(), head: null, created: now, updated: now };
  });
}

export async function open(id, { isLive = false } = {}) {
  const found = list.value.find((one) => one.id === id);
  if (!found) return begin();
  const asked = (opening += 1);
  const messages = await store.messagesOf(id);
  if (asked !== opening) return undefined;
  messages.sort((a, b) => a.created - b.created);
  batch(() => {
    tree.value = new Map(messages.map((message) => [message.id, underWay.get(message.id) ?? signal(settled(message, isLive))]));
    current.value = found;
  });
  ofTab.set("kvarn.open", id);
}

// An answer that was under way when its page was closed has ended there; one that a living tab has just told of has not.
const settled = (message, isLive) => (message.state === "writing" ? { ...message, state: isLive ? "elsewhere" : "lost" } : message);

export function change(fields) {
  current.value = { ...current.value, ...fields };
}

export function set(fields) {
  change({ settings: { ...settings.value, ...fields } });
  ofBrowser.set(LAST, JSON.stringify(settings.value));
  clearTimeout(saving); // once for several keystrokes
  saving = setTimeout(() => path.value.length && persist(), 300);
}

// Settings of a conversation that may not be the open one. Tells whether there still is one.
export function setIn(id, fields) {
  if (current.value?.id === id) {
    set(fields(settings.value));
    return true;
  }
  const found = list.value.find((one) => one.id === id);
  if (!found) return false;
  const changed = { ...found, settings: { ...found.settings, ...fields(found.settings) } };
  list.value = list.value.map((one) => (one.id === id ? changed : one));
  store.save(changed);
  return true;
}

export function add(fields) {
  const message = { id: newId(), conversation: current.value.id, created: Date.now(), content: "", ...fields };
  const siblings = children.peek().get(message.parent ?? "") ?? [];
  const before = [message.parent, siblings.at(-1)].map((id) => tree.peek().get(id)?.peek().created ?? 0);
  message.created = Math.max(message.created, ...before.map((time) => time + 1)); // messages are ordered by it
  const held = signal(message);
  if (message.state === "writing") underWay.set(message.id, held);
  const isFirst = tree.value.size === 0;
  batch(() => {
    tree.value = new Map(tree.value).set(message.id, held);
    change({ head: message.id, updated: Date.now(), ...(isFirst ? { title: clip(message.content, 60) || "New chat" } : {}) });
  });
  ofTab.set("kvarn.open", current.value.id);
  return held;
}

export async function persist(...messages) {
  const conversation = current.value;
  if (gone.has(conversation.id)) return;
  const others = list.value.filter((one) => one.id !== conversation.id);
  list.value = [conversation, ...others].sort((a, b) => b.updated - a.updated);
  await store.save(conversation, messages);
}

// An answer has ended.
export const ended = (id) => underWay.delete(id);

// A whole message, made while its conversation may have been left for another one.
export async function addTo(id, fields) {
  if (current.value?.id === id) return persist(add(fields).value);
  const conversation = list.value.find((one) => one.id === id);
  if (!conversation) return undefined;
  const message = { id: newId(), conversation: id, created: Date.now(), ...fields };
  const changed = { ...conversation, head: message.id, updated: message.created };
  list.value = list.value.map((one) => (one.id === id ? changed : one));
  return store.save(changed, [message]);
}

// For an answer that ends after its conversation was left.
export async function persistIn(conversationId, message) {
  if (current.value?.id === conversationId) return persist(message);
  const conversation = list.value.find((one) => one.id === conversationId);
  if (conversation) await store.save(conversation, [message]);
}

export function select(id) {
  change({ head: leafBelow(id) });
  persist();
}

// The end of the newest path that leads on from a message.
function leafBelow(id) {
  let leaf = id;
  for (let next = children.value.get(leaf); next?.length; next = children.value.get(leaf)) leaf = next.at(-1);
  return leaf;
}

// As it is now: settings of the open one are stored a moment after they were changed.
export const recordOf = (id) => (current.value?.id === id ? current.value : list.value.find((one) => one.id === id));

export async function rename(id, title) {
  const found = recordOf(id);
  const renamed = { ...found, title: clip(title, 200) || found.title };
  if (current.value?.id === id) current.value = renamed;
  list.value = list.value.map((one) => (one.id === id ? renamed : one));
  await store.save(renamed);
}

// onUndo: it was brought back.
export async function remove(id, onUndo) {
  const conversation = recordOf(id);
  gone.add(id);
  const messages = await store.remove(id);
  list.value = list.value.filter((one) => one.id !== id);
  if (current.value?.id === id) {
    current.value = null;
    begin();
  }
  say(`“${clip(conversation.title, 30)}” deleted.`, "Undo", async () => {
    onUndo();
    gone.delete(id);
    await store.save(conversation, messages);
    await refresh();
    await open(id);
  });
}

// The messages that are shown, for other programs.
export function asMarkdown() {
  const names = { user: "You", tool: "Tool" };
  const { system } = settings.value;
  const parts = messagesOnPath().map(({ role, name, model: writer, content, calls }) => {
    const called = (calls ?? []).filter(Boolean).map((call) => `\`${call.name}(${call.args})\``);
    return [`## ${names[role] ?? writer ?? "Answer"}${role === "tool" && name ? ` ${name}` : ""}`, content, ...called].filter(Boolean).join("\n\n");
  });
  return [`# ${current.value.title}`, ...(system?.trim() ? [`## System prompt\n\n${system}`] : []), ...parts].join("\n\n") + "\n";
}

const missed = new Set(); // ids of conversations that another tab changed while an answer was written into them here
const isWriting = () => [...tree.value.values()].some((one) => one.peek().state === "writing");

// Called with the id of a conversation that another tab has deleted.
const leaving = [];
export const onGone = (called) => leaving.push(called);

// What another tab has done: the list, and the open conversation, once no answer is being written here.
store.onChange(async (id) => {
  await refresh();
  if (list.value.some((one) => one.id === id)) gone.delete(id);
  else {
    gone.add(id);
    for (const called of leaving) called(id);
  }
  if (current.value?.id !== id) return;
  missed.add(id);
  await catchUp();
});

export async function catchUp() {
  const id = current.value?.id;
  if (!missed.has(id) || (isWriting() && !gone.has(id))) return;
  missed.delete(id);
  const { head } = current.value;
  if (!list.value.some((one) => one.id === id)) return begin();
  await open(id, { isLive: true });
  // What was added below is followed; another branch leaves what is looked at here.
  if (current.value?.id === id && tree.value.has(head)) change({ head: leafBelow(head) });
}
