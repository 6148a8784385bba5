// A part of an answer written anew by a diffusion model, which sees what stands before and after it (suffix of
// /v1/completions). The new text is another version of the answer; the old one stays.
import { clip, html, signal, useEffect, useRef, useState } from "./base.js";
import { getJson } from "./api.js";
import { wireMessages } from "./ask.js";
import * as conversations from "./conversations.js";
import { parsedFields } from "./fields.js";
import { fillingModels } from "./fill.js";
import { Icon } from "./icons.js";
import { say } from "./state.js";

const SAMPLING = ["temperature", "top_k", "top_p", "min_p", "seed"];
const WARMTH = 0.7; // greedy, it would write the same again
const MORE_ROOM = 1.5; // tokens for each that was there
const busy = signal(null); // id of the message that is being rewritten
export const picked = signal(null); // {id, start, end}: what to show selected in the text view

export const canRewrite = (message) => fillingModels().length > 0 && Boolean(message.content) && message.state !== "writing";

function modelFor(message) {
  const able = fillingModels().map((one) => one.id);
  return able.find((id) => id === conversations.modelId.value) ?? able.find((id) => id === message.model) ?? able[0];
}

// Replace content[start, end) of an answer.
async function rewrite(message, start, end) {
  const model = modelFor(message);
  const { content, conversation } = message;
  const [before, chosen, after] = [content.slice(0, start), content.slice(start, end), content.slice(end)];
  busy.value = message.id;
  try {
    // As it is now: until the answer comes, another conversation may be open.
    const messages = wireMessages(message.parent);
    const given = parsedFields(conversations.settings.value, conversations.model.value);
    const hasSpace = before.endsWith(" "); // it belongs to the word after it, as tokens have it
    const prompt = await promptIds(model, messages, hasSpace ? before.slice(0, -1) : before);
    const { count } = await getJson("tokenize", { body: { model, prompt: chosen, add_special_tokens: false } });
    const fields = Object.fromEntries(SAMPLING.filter((name) => given[name] !== undefined).map((name) => [name, given[name]]));
    const body = { temperature: WARMTH, ...fields, model, prompt, max_tokens: Math.ceil(count * MORE_ROOM) + 2, ...(after ? { suffix: after } : {}) };
    const told = await getJson("v1/completions", { body });
    const text = hasSpace ? told.choices[0].text.replace(/^ /, "") : told.choices[0].text;
    await conversations.addTo(conversation, { role: "assistant", parent: message.parent, model, content: before + text + after, state: "done", finish: "stop", usage: told.usage, rewritten: true });
    say(`“${clip(chosen, 24)}” became “${clip(text, 24)}”.`);
  } catch (error) {
    say(error.message);
  }
  busy.value = null;
}

// The conversation as the model reads it, and the answer up to the gap; a model without a chat template reads the answer.
async function promptIds(model, messages, before) {
  const begun = await getJson("tokenize", { body: { model, prompt: before, add_special_tokens: false } });
  try {
    const asked = await getJson("tokenize", { body: { model, messages } });
    return [...asked.tokens, ...begun.tokens];
  } catch (error) {
    if (error.status !== 400) throw error;
    return begun.tokens.length ? begun.tokens : (await getJson("tokenize", { body: { model, prompt: "\n" } })).tokens;
  }
}

// As many as the text takes in a column of the page's width, about.
export const rowsOf = (text) => Math.min(16, text.split("\n").reduce((rows, line) => rows + 1 + Math.floor(line.length / 72), 1));

// The answer as it was written, to select in: markup included, so that a selection is exact.
export function TextView({ message, onEnd }) {
  const area = useRef(null);
  const [range, setRange] = useState([0, 0]);
  const { id, content } = message;
  useEffect(() => {
    const { start, end } = picked.value?.id === id ? picked.value : { start: 0, end: 0 };
    area.current.focus();
    area.current.setSelectionRange(start, end);
    setRange([start, end]);
    picked.value = null;
  }, [id]);
  const onSelect = () => setRange([area.current.selectionStart, area.current.selectionEnd]);
  const [start, end] = range;
  const isBusy = busy.value === id;
  return html`<div class="rewrite">
    <textarea ref=${area} readonly aria-label="The answer as text: select what to write anew" rows=${rowsOf(content)} value=${content} onSelect=${onSelect} onKeyUp=${onSelect} onMouseUp=${onSelect} />
    <div class="row"><p class="facts" role="status">${end > start ? `${end - start} characters selected` : "Select what to write anew."}</p><span class="spacer" />
      <button type="button" class="plain" onClick=${onEnd}>Done</button>
      <button type="button" class="primary" disabled=${end <= start || isBusy} onClick=${() => rewrite(message, start, end)}>${isBusy ? "Writing…" : "Rewrite"}</button></div>
  </div>`;
}

// Where a selection in a drawn answer stands in its text; null where markup lies between.
export function rangeOf(selection, element, content) {
  const chosen = selection.toString();
  const ruler = document.createRange();
  ruler.selectNodeContents(element);
  const { startContainer, startOffset } = selection.getRangeAt(0);
  ruler.setEnd(startContainer, startOffset);
  const countIn = (text) => text.split(chosen).length - 1;
  const number = countIn(ruler.toString()); // how many of the same stand before it
  let at = -1;
  for (let place = 0; place <= number; place++) {
    at = content.indexOf(chosen, at + 1);
    if (at < 0) return null;
  }
  return [at, at + chosen.length];
}

// A button at whatever is selected in the last answers: rewrites it at once, or opens the text where markup lies between.
export function SelectionButton() {
  const [place, setPlace] = useState(null);
  useEffect(() => {
    const look = () => {
      const selection = getSelection();
      const holder = selection.rangeCount ? selection.getRangeAt(0).commonAncestorContainer : null;
      const element = (holder?.nodeType === Node.TEXT_NODE ? holder.parentElement : holder)?.closest?.(".assistant[data-id] .markdown");
      const message = element && conversations.messageOf(element.closest("[data-id]").dataset.id)?.peek();
      if (!selection.toString().trim() || !message || !canRewrite(message)) return setPlace(null);
      const box = selection.getRangeAt(0).getBoundingClientRect();
      return setPlace({ id: message.id, range: rangeOf(selection, element, message.content), top: Math.max(8, box.top - 46), left: Math.min(innerWidth - 150, Math.max(8, box.left + box.width / 2 - 55)) });
    };
    document.addEventListener("selectionchange", look);
    addEventListener("scroll", look, true);
    return () => {
      document.removeEventListener("selectionchange", look);
      removeEventListener("scroll", look, true);
    };
  }, []);
  if (!place) return null;
  const go = () => {
    const message = conversations.messageOf(place.id).peek();
    if (place.range) rewrite(message, ...place.range);
    else picked.value = { id: place.id, start: 0, end: 0 };
    getSelection().removeAllRanges();
    setPlace(null);
  };
  // mousedown: a click would first take the selection away
  return html`<div class="rewrite-pop" role="toolbar" aria-label="Selection" style=${{ top: `${place.top}px`, left: `${place.left}px` }}><button type="button" class="plain with-icon" onMouseDown=${(event) => { event.preventDefault(); go(); }} onClick=${go}><${Icon} name="retry" />${busy.value ? "Writing…" : "Rewrite"}</button></div>`;
}
