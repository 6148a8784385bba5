// What lies under an answer: its tokens with their probabilities, the steps in which it was denoised, its prompt.
import { html, named, useEffect, useRef, useState } from "./base.js";
import { getJson } from "./api.js";
import * as ask from "./ask.js";
import * as conversations from "./conversations.js";

const MAX_SHOWN = 1500;
const MAX_FRAMES = 400; // kept of one answer
const MASK = "░";

// {t: text, p: log-probability, b: bytes, a: [alternatives of the same shape]} from the logprobs of either API.
export function tokensOf(logprobs) {
  if (logprobs?.content) return logprobs.content.map((one) => ({ ...shape(one), a: one.top_logprobs.map(shape) }));
  if (!logprobs?.tokens) return [];
  return logprobs.tokens.map((text, place) => {
    const others = Object.entries(logprobs.top_logprobs?.[place] ?? {});
    return { ...plain(text, logprobs.token_logprobs[place]), a: others.map(([other, logprob]) => plain(other, logprob)) };
  });
}

const shape = ({ token, logprob, bytes }) => ({ t: token, p: logprob, b: bytes });
// This API tells no bytes; of a token that is part of a character they are not known.
const plain = (text, logprob) => ({ t: text, p: logprob, b: text.includes("\ufffd") ? null : [...new TextEncoder().encode(text)] });

// The text of tokens; null where it does not end with a whole character.
export function textOf(tokens) {
  if (tokens.some((token) => !token.b)) return null;
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(tokens.flatMap((token) => token.b)));
  } catch {
    return null;
  }
}

// The steps of a diffusion model; of very many every second one is kept, and the last always.
export class Frames {
  constructor() {
    this.list = [];
  }

  add({ step, block, text }) {
    const kept = this.list.length < MAX_FRAMES ? this.list : this.list.filter((_, place) => place % 2 === 0);
    this.list = [...kept, { step, block, text }];
  }
}

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return `${share >= 10 ? share.toFixed(0) : share >= 0.1 ? share.toFixed(1) : share.toExponential(0)}%`;
};
const level = (logprob) => Math.min(4, Math.floor(Math.exp(logprob) * 5)); // 0: unlikely
const visible = (text) => named(text).replaceAll("\n", "↵").replaceAll("\t", "⇥");

export function Tokens({ message }) {
  const [chosen, setChosen] = useState(null);
  const [shown, setShown] = useState(MAX_SHOWN);
  const tokens = message.tokens;
  return html`<div class="tokens">
    <p class="token-text" dir="auto">${tokens.slice(0, shown).map((token, place) => html`<${Token} key=${place} token=${token} isChosen=${chosen === place} onClick=${() => setChosen(chosen === place ? null : place)} />`)}</p>
    ${tokens.length > shown && html`<button type="button" class="quiet" onClick=${() => setShown(shown + MAX_SHOWN)}>Show more tokens</button>`}
    ${chosen !== null && html`<${Alternatives} message=${message} index=${chosen} />`}
  </div>`;
}

// A button is one box, so lines are broken behind it; what its token has of the next line stands there, for the eye only.
function Token({ token, isChosen, onClick }) {
  const lines = token.t.split("\n");
  const indent = lines.length > 1 ? lines.at(-1) : "";
  const text = indent ? token.t.slice(0, -indent.length) : token.t;
  const look = `level-${level(token.p)}`;
  return html`<button type="button" class=${`token ${look}`} aria-pressed=${isChosen} title=${percent(token.p)} onClick=${onClick}>${visible(text) || "·"}</button>${lines.slice(1).map((_, line) => html`<br key=${line} />`)}${indent && html`<span class=${look} aria-hidden="true">${visible(indent)}</span>`}`;
}

function Alternatives({ message, index }) {
  const token = message.tokens[index];
  const [end, setEnd] = useState(undefined);
  useEffect(() => {
    getJson(`tokenizer_info?model=${encodeURIComponent(message.model)}`).then((info) => setEnd(info.eos_token)).catch(() => setEnd(null));
  }, [message.model]);
  const { schema, tools } = conversations.settings.value;
  const why = message.reasoning || message.calls?.length || schema?.trim() || tools?.trim() ? "Answers with reasoning, tools or a schema cannot be continued from a token." : null;
  const others = token.a.some((one) => one.t === token.t) ? token.a : [{ t: token.t, p: token.p, b: token.b }, ...token.a];
  return html`<div class="alternatives" role="group" aria-label=${`Alternatives to token ${index + 1}`}>
    <p class="label">token ${index + 1} of ${message.tokens.length}: “${visible(token.t)}” had ${percent(token.p)}</p>
    <ul>${others.map((one) => html`<li key=${one.t}>
      <code>${visible(one.t)}</code><meter min="0" max="1" value=${Math.exp(one.p)} aria-label=${`probability of ${one.t}`}></meter><span>${percent(one.p)}</span>
      ${one.t === token.t ? html`<span class="facts">chosen</span>` : one.t === end ? html`<span class="facts">ends the answer</span>` : html`<button type="button" class="plain" disabled=${why !== null || end === undefined} onClick=${() => ask.branch(message, index, one)}>Branch here</button>`}</li>`)}</ul>
    ${why && html`<p class="help">${why}</p>`}
  </div>`;
}

// The canvas of a diffusion model: positions that are not filled yet are pale.
export function Canvas({ text }) {
  return html`<p class="canvas" dir="auto">${named(text).split(/(░+)/).map((part, place) => (part.startsWith(MASK) ? html`<span class="mask" key=${place} aria-hidden="true">${part}</span>` : part))}</p>`;
}

export function Replay({ frames, onEnd }) {
  const [place, setPlace] = useState(0);
  const [isPlaying, setPlaying] = useState(true);
  useEffect(() => {
    if (!isPlaying) return undefined;
    const timer = setInterval(() => setPlace((now) => {
      if (now >= frames.length - 1) setPlaying(false);
      return Math.min(now + 1, frames.length - 1);
    }), Math.max(30, Math.min(250, 6000 / frames.length)));
    return () => clearInterval(timer);
  }, [isPlaying, frames]);
  const frame = frames[Math.min(place, frames.length - 1)];
  const left = [...frame.text].filter((one) => one === MASK).length;
  const play = () => {
    if (place >= frames.length - 1) setPlace(0);
    setPlaying(!isPlaying);
  };
  return html`<div class="replay"><${Canvas} text=${frame.text} />
    <div class="replay-bar"><button type="button" class="plain" onClick=${play}>${isPlaying ? "Pause" : "Play"}</button>
      <input type="range" min="0" max=${frames.length - 1} value=${place} aria-label="Denoising step" aria-valuetext=${`step ${frame.step}, ${left} positions left`} onInput=${(event) => { setPlaying(false); setPlace(Number(event.target.value)); }} />
      <span class="facts">step ${frame.step} of ${frames.at(-1).step}, ${left} left</span>
      <button type="button" class="plain" onClick=${onEnd}>Done</button></div></div>`;
}

// The prompt's tokens as text, up to where it was cached and from there.
async function promptOf({ model, parent }, cached) {
  const { count, tokens } = await getJson("tokenize", { body: { model, messages: ask.wireMessages(parent) } });
  const parts = [tokens.slice(0, cached), tokens.slice(cached)];
  const [known, rest] = await Promise.all(parts.map(async (part) => (part.length ? (await getJson("detokenize", { body: { model, tokens: part } })).prompt : "")));
  return { count, known, rest };
}

// The prompt as the model read it, with the part that lay in the cache marked.
export function PromptDialog({ message, onEnd }) {
  const dialog = useRef(null);
  const [told, setTold] = useState(null);
  const cached = message.usage.prompt_tokens_details?.cached_tokens ?? 0;
  useEffect(() => {
    dialog.current.showModal();
    promptOf(message, cached).then(setTold, (error) => setTold({ problem: error.message }));
  }, []);
  const isOther = told?.count !== undefined && told.count !== message.usage.prompt_tokens;
  return html`<dialog ref=${dialog} class="prompt-dialog" aria-labelledby="prompt-title" onClose=${onEnd}>
    <h2 id="prompt-title">The prompt as the model read it</h2>
    <p class="facts"><mark>${cached.toLocaleString("en")} tokens</mark> of ${message.usage.prompt_tokens.toLocaleString("en")} lay in the prefix cache and were not computed again.</p>
    ${isOther && html`<p class="help">With today's settings it has ${told.count.toLocaleString("en")} tokens: they have changed since, or sources or tools were part of it.</p>`}
    ${told?.problem && html`<p class="problem">${told.problem}</p>`}
    <pre tabindex="0" dir="auto">${told?.count === undefined ? "…" : html`${told.known && html`<mark>${told.known}</mark>`}${told.rest}`}</pre>
    <form method="dialog" class="row"><button class="primary">Close</button></form>
  </dialog>`;
}
