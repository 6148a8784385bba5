// Files that a conversation may look things up in: dropped here, kept in a collection of the server, cited in answers.
import { html, signal, useState } from "./base.js";
import { getJson } from "./api.js";
import * as conversations from "./conversations.js";
import { Icon, IconButton } from "./icons.js";
import { say } from "./state.js";

const MAX_BYTES = 6_000_000; // of one file: a request may have 8 MiB, and base64 makes four bytes of three
const HITS = 4;
const KINDS = { pdf: "pdf", md: "markdown", markdown: "markdown", html: "html", htm: "html" };
const CODE = new Set("py js ts c cc cpp h hpp rs go java sh sql css json yaml yml toml xml".split(" "));
export const adding = signal(null); // the name of the file that is being read

export async function addFiles(files) {
  for (const file of files) {
    if (file.type.startsWith("image/")) {
      say("Images cannot be read here: no model of this server sees. Send text instead.");
      continue;
    }
    adding.value = file.name;
    try {
      await addFile(file);
    } catch (error) {
      say(`${file.name}: ${error.message}`);
    }
    adding.value = null;
  }
}

async function addFile(file) {
  if (file.size > MAX_BYTES) throw new Error(`has ${(file.size / 1e6).toFixed(1)} MB; at most ${MAX_BYTES / 1e6} MB are taken`);
  const ending = file.name.split(".").pop().toLowerCase();
  const kind = KINDS[ending] ?? (CODE.has(ending) ? "code" : "text");
  const document = { id: file.name.slice(0, 200), source: file.name.slice(0, 200), kind };
  if (kind === "pdf") document.data = await base64(file);
  else document.text = await text(file);
  const { id } = conversations.current.value;
  const name = conversations.settings.value.collection ?? `chat-${id.slice(0, 18)}`;
  await getJson("v1/collections", { body: { name } });
  const report = await getJson(`v1/collections/${encodeURIComponent(name)}/documents`, { body: { documents: [document] } });
  if (conversations.current.value.id !== id) return;
  const others = (conversations.settings.value.files ?? []).filter((one) => one !== document.id);
  conversations.set({ collection: name, files: [...others, document.id] });
  say(`${file.name}: ${report.chunks} passages. Answers now look things up there.`);
}

async function text(file) {
  try {
    const read = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!read.trim() || read.includes("\0")) throw new TypeError();
    return read;
  } catch {
    throw new Error("is no text in UTF-8; give text, Markdown, HTML, code or a PDF");
  }
}

async function base64(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  const pieces = [];
  for (let start = 0; start < bytes.length; start += 0x8000) pieces.push(String.fromCharCode(...bytes.subarray(start, start + 0x8000)));
  return btoa(pieces.join(""));
}

export async function removeFile(id) {
  const { collection, files } = conversations.settings.value;
  try {
    await getJson(`v1/collections/${encodeURIComponent(collection)}/documents/delete`, { body: { ids: [id] } });
  } catch (error) {
    return say(error.message);
  }
  return conversations.set({ files: files.filter((one) => one !== id) });
}

// The field of a request that looks things up, if there is something to look in.
export const retrievalField = (settings) => (settings.files?.length ? { retrieval: { collection: settings.collection, k: HITS } } : {});

// The passages of an answer's sources: the stream names them, a search has their texts.
export async function passages(citations, collection, query) {
  const found = await getJson(`v1/collections/${encodeURIComponent(collection)}/search`, { body: { query: query.slice(0, 32_000), k: HITS } });
  const texts = new Map(found.data.map((hit) => [hit.id, hit.text]));
  return citations.map(({ number, id, source, document }) => ({ number, source: source || document, text: texts.get(id) ?? "" }));
}

export function FileList() {
  const files = conversations.settings.value.files ?? [];
  if (!files.length && !adding.value) return null;
  return html`<ul class="files" aria-label="Files of this conversation">
    ${files.map((name) => html`<li key=${name}><${Icon} name="file" /><span dir="auto">${name}</span><${IconButton} icon="close" label=${`Remove ${name}`} onClick=${() => removeFile(name)} /></li>`)}
    ${adding.value && html`<li role="status"><${Icon} name="file" />reading ${adding.value}…</li>`}
  </ul>`;
}

export function Sources({ sources, text }) {
  const [open, setOpen] = useState(null);
  const cited = new Set([...text.matchAll(/\[(\d+)\]/g)].map(([, number]) => Number(number)));
  const shown = sources.find((one) => one.number === open);
  return html`<div class="sources">
    <p class="label">Sources</p>
    <div class="source-row">${sources.map((one) => html`<button type="button" key=${one.number} class=${cited.has(one.number) ? "source is-cited" : "source"} aria-expanded=${open === one.number} onClick=${() => setOpen(open === one.number ? null : one.number)}>[${one.number}] ${one.source}</button>`)}</div>
    ${shown && html`<blockquote class="passage" dir="auto">${shown.text || "This passage is no longer in the collection."}</blockquote>`}
  </div>`;
}
