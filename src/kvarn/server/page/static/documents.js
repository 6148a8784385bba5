// Files that a conversation may look things up in: dropped here, kept in a collection of the server, cited in answers.
import { html, named, plural, signal } from "./base.js";
import { getJson, request } from "./api.js";
import * as conversations from "./conversations.js";
import { isInBytes, kindOf } from "./filekinds.js";
import { Icon, IconButton } from "./icons.js";
import { say } from "./state.js";

const MAX_BYTES = 6_000_000; // of one request: it may have 8 MiB, and base64 makes four bytes of three
const MAX_TOGETHER = 256; // documents of one request
const MAX_NAME = 1024;
const HITS = 4;
export const adding = signal(null); // what is being read

// Take files, as filekinds.js gives them; those that cannot be read are told, and the others go on.
export async function addFiles(found) {
  const images = found.filter(({ file }) => file.type.startsWith("image/"));
  if (images.length) say("Images cannot be read here: no model of this server sees. Send text instead.");
  const files = found.filter((one) => !images.includes(one));
  if (!files.length) return;
  const upload = new Upload(files.length);
  for (const { path, file } of files) await upload.take(path, file);
  await upload.send();
  adding.value = null;
  upload.report();
}

const collectionOf = (conversation) => `chat-${conversation.slice(0, 18)}`;

// Files on their way into the collection of the conversation that was open when they came.
class Upload {
  constructor(total) {
    this.total = total;
    this.conversation = conversations.current.value.id;
    this.collection = conversations.settings.value.collection ?? collectionOf(this.conversation);
    this.waiting = [];
    this.bytes = 0;
    this.added = [];
    this.passages = 0;
    this.refused = [];
  }

  async take(path, file) {
    adding.value = this.total > 1 ? `${path} (${this.added.length + this.waiting.length + 1} of ${this.total})` : path;
    try {
      const document = await documentOf(path, file);
      // What the server has to read goes alone: if it cannot, the others are not refused with it.
      if (document.data || this.bytes + file.size > MAX_BYTES || this.waiting.length >= MAX_TOGETHER) await this.send();
      this.waiting.push(document);
      this.bytes += file.size;
      if (document.data) await this.send();
    } catch (error) {
      this.refused.push(`${path} ${error.message}`);
    }
  }

  async send() {
    const documents = this.waiting;
    this.waiting = [];
    this.bytes = 0;
    if (!documents.length) return;
    const names = documents.map((one) => one.id);
    try {
      await getJson("v1/collections", { body: { name: this.collection } });
      const told = await getJson(`v1/collections/${encodeURIComponent(this.collection)}/documents`, { body: { documents } });
      this.passages += told.chunks;
      this.added.push(...names);
      this.keep(names);
    } catch (error) {
      this.refused.push(`${names.length > 1 ? plural(names.length, "file") : names[0]}: ${error.message}`);
    }
  }

  // In the conversation that they were given to, which may have been left meanwhile.
  keep(names) {
    this.isKept = conversations.setIn(this.conversation, ({ files }) => {
      const others = (files ?? []).filter((one) => !names.includes(one));
      return { collection: this.collection, files: [...others, ...names] };
    });
  }

  report() {
    const [first] = this.refused;
    const more = this.refused.length > 1 ? ` And ${this.refused.length - 1} more could not be read.` : "";
    if (!this.added.length) return first && say(`${first}${more}`);
    if (!this.isKept) return say("The chat that these files were for was left before it began; drop them again.");
    const what = this.added.length > 1 ? plural(this.added.length, "file") : this.added[0];
    return say(`${what}: ${plural(this.passages, "passage")}. Answers now look things up there.${first ? ` Not taken: ${first}.${more}` : ""}`);
  }
}

async function documentOf(path, file) {
  if (file.size > MAX_BYTES) throw new Error(`has ${(file.size / 1e6).toFixed(1)} MB; at most ${MAX_BYTES / 1e6} MB are taken`);
  const kind = kindOf(path) ?? "text";
  const name = path.slice(-MAX_NAME);
  const document = { id: name, source: name, kind };
  if (isInBytes(kind)) document.data = await base64(file);
  else document.text = await text(file);
  return document;
}

async function text(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  const mark = bytes[0] * 256 + bytes[1];
  const encoding = mark === 0xfffe ? "utf-16le" : mark === 0xfeff ? "utf-16be" : "utf-8";
  try {
    const read = new TextDecoder(encoding, { fatal: true }).decode(bytes);
    if (!read.trim() || read.includes("\0")) throw new TypeError();
    return read;
  } catch {
    throw new Error("is no text in UTF-8; give text, Markdown, HTML, code, CSV, a notebook, a PDF, a Word document or an EPUB");
  }
}

async function base64(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  const pieces = [];
  for (let start = 0; start < bytes.length; start += 0x8000) pieces.push(String.fromCharCode(...bytes.subarray(start, start + 0x8000)));
  return btoa(pieces.join(""));
}

// Files of one folder are shown, and removed, together.
function groups(files) {
  const found = new Map();
  for (const id of files) {
    const name = id.includes("/") ? `${id.split("/")[0]}/` : id;
    found.set(name, [...(found.get(name) ?? []), id]);
  }
  return [...found];
}

async function removeFiles(ids) {
  const { id, settings: { collection } } = conversations.current.value;
  try {
    for (let start = 0; start < ids.length; start += MAX_TOGETHER) {
      const some = ids.slice(start, start + MAX_TOGETHER);
      await getJson(`v1/collections/${encodeURIComponent(collection)}/documents/delete`, { body: { ids: some } });
    }
  } catch (error) {
    if (error.status !== 404) return say(error.message); // else it is gone already, or was of another server
  }
  return conversations.setIn(id, ({ files }) => ({ files: files.filter((one) => !ids.includes(one)) }));
}

// The files of a conversation that was deleted. A collection that is named otherwise is not its own: a file that was imported tells its name.
export function forgetFiles({ id, settings }) {
  if (settings?.collection === collectionOf(id)) request(`v1/collections/${encodeURIComponent(settings.collection)}`, { method: "DELETE" }).catch(() => {});
}

// The field of a request that looks things up, if there is something to look in.
export const retrievalField = (settings) => (settings.files?.length ? { retrieval: { collection: settings.collection, k: HITS, return_passages: true } } : {});

// A source as a message keeps it: with the text that the model read, whatever becomes of the collection.
export function sourceOf({ number, source, document, text, lines, page }) {
  const place = page ? `page ${page}` : lines ? (lines.first === lines.last ? `line ${lines.first}` : `lines ${lines.first}–${lines.last}`) : "";
  return { number, source: source || document, text: text ?? "", place };
}

export function FileList() {
  const files = conversations.settings.value.files ?? [];
  if (!files.length && !adding.value) return null;
  return html`<ul class="files" aria-label="Files of this conversation">
    ${groups(files).map(([name, ids]) => html`<li key=${name}><${Icon} name="file" /><span dir="auto">${name}${ids.length > 1 || name.endsWith("/") ? ` ${plural(ids.length, "file")}` : ""}</span><${IconButton} icon="close" label=${`Remove ${name}`} onClick=${() => removeFiles(ids)} /></li>`)}
    ${adding.value && html`<li role="status"><${Icon} name="file" /><span dir="auto">reading ${adding.value}…</span></li>`}
  </ul>`;
}

export function Sources({ sources, cited: numbers, unsupported, open, onOpen }) {
  const cited = new Set(numbers ?? []);
  return html`<div class="sources">
    <p class="label">Sources</p>
    <div class="source-row">${sources.map((one) => html`<button type="button" key=${one.number} class=${cited.has(one.number) ? "source is-cited" : "source"} aria-expanded=${open === one.number} onClick=${() => onOpen(open === one.number ? null : one.number)}>[${one.number}] ${named(one.source)}${one.place ? html`<span class="facts"> ${one.place}</span>` : null}</button>`)}</div>
    ${unsupported?.length > 0 && html`<details class="unsupported"><summary>${plural(unsupported.length, "sentence")} not found in the sources</summary><ul>${unsupported.map((one, at) => html`<li key=${at} dir="auto">${named(one)}</li>`)}</ul></details>`}
  </div>`;
}

// The passage of a source, beside the text where there is room, below the sources where there is none.
export function Passage({ source, onEnd }) {
  return html`<aside class="passage" aria-label=${`Source ${source.number}`}>
    <div class="passage-head"><p><b>[${source.number}]</b> <span dir="auto">${named(source.source)}</span>${source.place ? html`<span class="facts"> ${source.place}</span>` : null}</p>
      <${IconButton} icon="close" label="Close the passage" onClick=${onEnd} /></div>
    <div class="passage-text" dir="auto" tabindex="0" role="region" aria-label="Passage">${named(source.text) || "The text of this passage was not kept."}</div>
  </aside>`;
}
