// Asking the model: the conversation becomes a request, its events become a message. Knows no element.
import { signal } from "./base.js";
import { events, Failure, getJson, request } from "./api.js";
import * as conversations from "./conversations.js";
import { retrievalField, sourceOf } from "./documents.js";
import { ALTERNATIVES, parsedFields } from "./fields.js";
import { chatModels, loadModels, modelsProblem, say } from "./state.js";
import { Frames, textOf, tokensOf } from "./tokens.js";

const SAVE_MS = 2000; // a page that is closed in mid-answer loses at most this much
const running = signal(new Map()); // message id -> {conversation, abort, requestId}

export const writing = () => [...running.value.keys()].find((id) => conversations.messageOf(id));

export function send(text) {
  const user = conversations.add({ role: "user", content: text, parent: conversations.current.value.head });
  conversations.persist(user.value);
  return answer(user.value.id);
}

export function sendResults(results) {
  let parent = conversations.current.value.head;
  const added = results.map(({ id, name, content }) => {
    const message = conversations.add({ role: "tool", content, parent, callId: id, name }).value;
    parent = message.id;
    return message;
  });
  conversations.persist(...added);
  return answer(parent);
}

export function edit(id, text) {
  const { parent } = conversations.messageOf(id).value;
  const user = conversations.add({ role: "user", content: text, parent });
  conversations.persist(user.value);
  return answer(user.value.id);
}

export const regenerate = (id) => answer(conversations.messageOf(id).value.parent);

export function stop(id = writing()) {
  const run = running.value.get(id);
  if (!run) return;
  const abort = () => run.abort.abort();
  if (!run.requestId) return abort();
  // Asked to end, the stream still tells how many tokens it had; if that fails, it is cut.
  request(`v1/requests/${encodeURIComponent(run.requestId)}`, { method: "DELETE" }).catch(abort);
  setTimeout(() => running.value.get(id) === run && abort(), 3000);
}

// All that is written into a conversation that goes away.
export function stopIn(conversation) {
  for (const [id, run] of running.value) if (run.conversation === conversation) stop(id);
}

conversations.onGone(stopIn);

// One more answer below a message.
function answer(parent) {
  return generate(parent, { model: conversations.modelId.value }, async (abort) => {
    if (!conversations.modelId.value) await loadModels(); // a message that was sent while the page still loads
    try {
      return await request("v1/chat/completions", { body: chatBody(parent), signal: abort });
    } catch (error) {
      if (error.status === 404) loadModels(); // of a server that has others now
      throw error;
    }
  });
}

// Stream an answer into a new message. begin: sends the request; fields: what the message has before its first token.
export async function generate(parent, fields, begin) {
  const held = conversations.add({ role: "assistant", parent, state: "writing", ...fields });
  const { id, conversation } = held.value;
  const run = { conversation, abort: new AbortController(), requestId: null };
  running.value = new Map(running.value).set(id, run);
  conversations.persist(held.value);
  const writer = new AnswerWriter(held, conversation);
  try {
    const response = await begin(run.abort.signal);
    run.requestId = response.headers.get("x-request-id");
    writer.warn(response.headers.get("x-kvarn-warning"));
    for await (const event of events(response)) writer.take(event);
    writer.end();
  } catch (error) {
    writer.fail(error);
  } finally {
    const left = new Map(running.value);
    left.delete(id);
    running.value = left;
    conversations.ended(id);
    await conversations.persistIn(conversation, held.value);
    await conversations.catchUp();
  }
}

function chatBody(head) {
  const { settings, modelId, model } = conversations;
  const body = {
    model: modelId.value,
    messages: wireMessages(head),
    stream: true,
    stream_options: { include_usage: true },
    ...parsedFields(settings.value, model.value),
    ...retrievalField(settings.value),
  };
  if (!body.model) throw new Failure(modelsProblem.value ?? "This server has no model that chats.");
  return body;
}

// The conversation up to a message, as the API takes it.
export function wireMessages(head) {
  const messages = conversations.lineage(head).map((id) => wireMessage(conversations.messageOf(id).value));
  const { system } = conversations.settings.value;
  return system?.trim() ? [{ role: "system", content: system }, ...messages] : messages;
}

const modelOf = (message) => chatModels.value.find((one) => one.id === message.model);

// Another answer that begins as this one does up to a token, and goes on with another one in its place.
export async function branch(message, index, chosen) {
  const tokens = [...message.tokens.slice(0, index), { ...chosen, a: message.tokens[index].a }];
  const prefix = textOf(tokens);
  if (prefix === null) return say("The text ends in the middle of a character here; branch one token earlier or later.");
  return goOn(message, { content: prefix, tokens });
}

// An answer that was cut, stopped or lost goes on, as another version; not one whose text is not all that was written.
export function canGoOn({ content, model, finish, state, reasoning, calls, sources }) {
  const { schema, tools } = conversations.settings.value;
  const isCut = finish === "length" || state === "stopped" || state === "lost";
  const writer = modelOf({ model });
  return isCut && Boolean(content && writer) && !writer.is_diffusion && !reasoning && !calls?.length && !sources && !schema?.trim() && !tools?.trim();
}

export function goOn(message, { content, tokens } = message) {
  const { model, parent } = message;
  const begun = textOf(tokens ?? []) === content ? { content, tokens } : { content };
  return generate(parent, { model, ...begun }, async (abort) => {
    const fields = parsedFields(conversations.settings.value, modelOf(message)); // of the one that goes on, whichever is chosen now
    for (const name of ["logprobs", "top_logprobs", "chat_template_kwargs", "reasoning_effort"]) delete fields[name];
    const asked = await getJson("tokenize", { body: { model, messages: wireMessages(parent) }, signal: abort });
    const written = await getJson("tokenize", { body: { model, prompt: content, add_special_tokens: false }, signal: abort });
    const prompt = [...asked.tokens, ...written.tokens];
    const left = asked.max_model_len - prompt.length;
    const body = { ...fields, model, prompt, max_tokens: Math.max(1, Math.min(left, fields.max_tokens ?? left)) };
    return request("v1/completions", { body: { ...body, ...(begun.tokens ? { logprobs: ALTERNATIVES } : {}), stream: true, stream_options: { include_usage: true } }, signal: abort });
  });
}

function wireMessage(message) {
  if (message.role === "tool") return { role: "tool", content: message.content, tool_call_id: message.callId };
  const wire = { role: message.role, content: message.content };
  if (message.calls?.length) {
    wire.tool_calls = message.calls.map(({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args } }));
  }
  return wire;
}

// Gathers the events of one stream; the message is drawn at most once a frame.
class AnswerWriter {
  constructor(held, conversation) {
    this.held = held;
    this.conversation = conversation;
    this.fields = { ...held.value };
    this.started = performance.now();
    this.first = this.last = 0;
    this.frame = 0;
    this.savedAt = this.started;
    this.isWhole = false;
  }

  take(event) {
    if (event === null) {
      this.isWhole = true;
      return;
    }
    const choice = event.choices?.[0];
    const delta = choice?.delta ?? {};
    const text = delta.content ?? choice?.text ?? "";
    if (text || delta.reasoning_content || delta.tool_calls) this.touch();
    if (text) this.fields.content += text;
    if (delta.reasoning_content) this.fields.reasoning = (this.fields.reasoning ?? "") + delta.reasoning_content;
    for (const call of delta.tool_calls ?? []) this.call(call);
    const tokens = tokensOf(choice?.logprobs);
    if (tokens.length) this.fields.tokens = [...(this.fields.tokens ?? []), ...tokens];
    if (event.retrieval?.sentences) this.support(event.retrieval);
    else if (event.retrieval?.citations.length) this.fields.sources = event.retrieval.citations.map(sourceOf);
    if (event.diffusion) this.denoise(event.diffusion);
    if (choice?.finish_reason) this.fields.finish = choice.finish_reason;
    if (event.usage) this.fields.usage = event.usage;
    this.draw();
  }

  // What was found out after the answer: spans count characters, not the halves that a string of the page has.
  support({ citations, sentences }) {
    const characters = Array.from(this.fields.content);
    const unsupported = sentences.filter((one) => one.choice === 0 && !one.supported);
    this.fields.cited = citations.filter((one) => one.cited).map((one) => one.number);
    this.fields.unsupported = unsupported.map(({ span }) => characters.slice(span.start, span.end).join(""));
  }

  denoise(step) {
    this.touch();
    this.frames ??= new Frames();
    this.frames.add(step);
    this.fields.frames = this.frames.list;
  }

  touch() {
    this.last = performance.now();
    this.first ||= this.last;
  }

  call({ index, id, function: { name, arguments: args } }) {
    const calls = [...(this.fields.calls ?? [])];
    calls[index] = { id: id ?? calls[index]?.id, name: name ?? calls[index]?.name, args: (calls[index]?.args ?? "") + (args ?? "") };
    this.fields.calls = calls;
  }

  warn(words) {
    if (words) this.fields.warning = words;
  }

  draw() {
    this.frame ||= requestAnimationFrame(() => this.show());
    if (document.hidden && performance.now() - this.savedAt > SAVE_MS) this.show();
  }

  show() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.held.value = { ...this.fields };
    if (performance.now() - this.savedAt < SAVE_MS) return;
    this.savedAt = performance.now();
    conversations.persistIn(this.conversation, this.held.value);
  }

  end() {
    if (!this.isWhole) return this.fail(new Failure("The connection was lost in the middle of the answer.", { code: "lost" }));
    this.fields.state = this.fields.finish === "cancelled" ? "stopped" : "done";
    this.measure();
    this.show();
  }

  fail(error) {
    const isStopped = error.name === "AbortError";
    this.fields.state = isStopped ? "stopped" : error.code === "lost" ? "lost" : "failed";
    if (!isStopped) {
      this.fields.error = { message: error.message, code: error.code ?? null, status: error.status ?? 0 };
      if (error.retryAfter) this.fields.error.retryAt = Date.now() + error.retryAfter * 1000;
    }
    this.measure();
    this.show();
  }

  measure() {
    if (!this.first) return;
    const tokens = this.fields.usage?.completion_tokens ?? 0;
    const span = (this.last - this.first) / 1000;
    this.fields.timing = { firstToken: (this.first - this.started) / 1000, rate: tokens > 1 && span > 0 ? (tokens - 1) / span : null };
  }
}
