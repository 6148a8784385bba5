// One message: its text, what can be done with it, and under an answer how it came about.
import { Fragment, html, memo, named, plural, seconds, useEffect, useRef, useState } from "./base.js";
import * as ask from "./ask.js";
import * as conversations from "./conversations.js";
import { Passage, Sources } from "./documents.js";
import { CopyButton, IconButton } from "./icons.js";
import { Markdown } from "./markdown.js";
import { canRewrite, picked, rowsOf, TextView } from "./rewrite.js";
import { Canvas, PromptDialog, Replay, Tokens } from "./tokens.js";

export const Message = memo(({ id }) => {
  const held = conversations.messageOf(id);
  if (!held) return null;
  const message = held.value;
  if (message.role === "user") return html`<${Question} message=${message} />`;
  if (message.role === "tool") return html`<article class="message tool" aria-label="Tool result"><p class="label">${named(message.name ?? "tool")} returned</p><pre tabindex="0">${message.content}</pre></article>`;
  return html`<${Answer} message=${message} />`;
});

const MAX_QUESTION = 4000; // characters that are shown of a question until the rest is asked for

function Question({ message }) {
  const [isEditing, setEditing] = useState(false);
  const [isWhole, setWhole] = useState(message.content.length <= MAX_QUESTION * 1.2);
  if (isEditing) return html`<${Editor} message=${message} onEnd=${() => setEditing(false)} />`;
  return html`<article class="message user"><h2 class="visually-hidden">You</h2>
    <div class="bubble" dir="auto">${isWhole ? message.content : html`${message.content.slice(0, MAX_QUESTION).replace(/[\ud800-\udbff]$/, "")}…<button type="button" class="link" onClick=${() => setWhole(true)}>Show all ${message.content.length.toLocaleString("en")} characters</button>`}</div>
    <div class="tools">
      <${Siblings} id=${message.id} />
      <${CopyButton} text=${() => message.content} />
      <${IconButton} icon="edit" label="Edit and ask again" onClick=${() => setEditing(true)} data-edit=${message.id} />
    </div>
  </article>`;
}

function Editor({ message, onEnd }) {
  const area = useRef(null);
  useEffect(() => {
    area.current.focus();
    area.current.setSelectionRange(message.content.length, message.content.length);
  }, []);
  const send = () => {
    onEnd();
    if (area.current.value.trim()) ask.edit(message.id, area.current.value);
  };
  const onKey = (event) => {
    if (event.key === "Escape") onEnd();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
  };
  return html`<article class="message user editing" aria-label="Edit your message">
    <textarea ref=${area} aria-label="Message" rows=${rowsOf(message.content)} onKeyDown=${onKey}>${message.content}</textarea>
    <div class="row"><button type="button" class="plain" onClick=${onEnd}>Cancel</button><button type="button" class="primary" onClick=${send}>Ask again</button></div>
  </article>`;
}

function Answer({ message }) {
  const [view, setView] = useState("text"); // or tokens, replay, rewrite
  const [number, setNumber] = useState(null); // of the source whose passage is shown
  useEffect(() => {
    if (picked.value?.id === message.id) setView("rewrite");
  }, [picked.value]);
  const isWriting = message.state === "writing";
  const isWaiting = isWriting && !message.content && !message.reasoning && !message.calls?.length && !message.frames;
  const source = message.sources?.find((one) => one.number === number);
  const cite = (event) => {
    const pressed = event.target.closest?.("button.cite");
    if (pressed) setNumber(Number(pressed.dataset.number));
  };
  const passage = source && html`<${Passage} source=${source} onEnd=${() => setNumber(null)} />`;
  return html`<article class="message assistant" data-id=${message.id} data-passage=${Boolean(source)} aria-busy=${isWriting} onClick=${cite}><h2 class="visually-hidden">Answer</h2>
    ${message.reasoning && html`<${Reasoning} text=${message.reasoning} isOpen=${isWriting && !message.content} />`}
    ${isWaiting && html`<p class="waiting" role="status"><span class="visually-hidden">Waiting for the first token</span><i></i><i></i><i></i></p>`}
    <${Body} message=${message} view=${isWriting ? "text" : view} onEnd=${() => setView("text")} />
    ${message.sources && html`<${Sources} sources=${message.sources} cited=${message.cited} unsupported=${message.unsupported} open=${number} onOpen=${setNumber} />`}
    ${passage}
    ${message.calls?.length > 0 && html`<${Calls} message=${message} />`}
    ${message.error && html`<${Problem} message=${message} />`}
    ${message.state === "lost" && !message.error && html`<p class="problem" role="alert">The page was closed in the middle of this answer. Regenerate to ask again.</p>`}
    ${message.state === "elsewhere" && html`<p class="facts" role="status">Another tab is writing this answer.</p>`}
    ${!isWriting && html`<${Foot} message=${message} view=${view} onView=${(next) => setView(next === view ? "text" : next)} />`}
  </article>`;
}

function Body({ message, view, onEnd }) {
  if (view === "tokens") return html`<${Tokens} message=${message} />`;
  if (view === "rewrite") return html`<${TextView} message=${message} onEnd=${onEnd} />`;
  if (view === "replay") return html`<${Replay} frames=${message.frames} onEnd=${onEnd} />`;
  if (message.state === "writing" && message.frames?.length) return html`<${Canvas} text=${message.frames.at(-1).text} />`;
  return message.content ? html`<${Markdown} text=${message.content} sources=${message.sources} />` : null;
}

function Reasoning({ text, isOpen }) {
  return html`<details class="reasoning" open=${isOpen}><summary>Reasoning</summary><${Markdown} text=${text} /></details>`;
}

function Calls({ message }) {
  const answers = useRef({});
  const isLast = conversations.current.value?.head === message.id && message.state === "done";
  const calls = message.calls.filter(Boolean);
  const send = () => ask.sendResults(calls.map((call) => ({ id: call.id, name: call.name, content: answers.current[call.id] ?? "" })));
  return html`<div class="calls">${calls.map((call) => html`<div class="call" key=${call.id}>
      <p class="label">calls ${named(call.name)}</p><pre tabindex="0">${named(call.args)}</pre>
      ${isLast && html`<label>Result<textarea rows="2" onInput=${(event) => (answers.current[call.id] = event.target.value)} /></label>`}
    </div>`)}
    ${isLast && html`<div class="row"><button type="button" class="primary" onClick=${send}>Send ${calls.length > 1 ? "results" : "result"}</button></div>`}
  </div>`;
}

function Problem({ message }) {
  const { error } = message;
  const left = useCountdown(error.retryAt);
  const isRate = error.status === 429 || error.status === 503;
  const again = () => ask.regenerate(message.id);
  return html`<div class="problem" role="alert">
    <p>${error.message}${error.code === "lost" ? " What came is kept; regenerate to ask again." : ""}</p>
    <button type="button" class="plain" disabled=${left > 0} onClick=${again}>${left > 0 ? `Try again in ${left} s` : isRate ? "Try again" : "Regenerate"}</button>
  </div>`;
}

function useCountdown(until) {
  const rest = () => (until ? Math.max(0, Math.ceil((until - Date.now()) / 1000)) : 0);
  const [left, setLeft] = useState(rest);
  useEffect(() => {
    if (!until || rest() === 0) return undefined;
    const timer = setInterval(() => setLeft(rest()), 500);
    return () => clearInterval(timer);
  }, [until]);
  return left;
}

const ENDS = { length: "cut at the length limit", cancelled: "stopped", tool_calls: null, stop: null };

function Foot({ message, view, onView }) {
  const [isPromptOpen, setPromptOpen] = useState(false);
  const { usage, timing } = message;
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const end = message.state === "stopped" ? "stopped" : ENDS[message.finish];
  return html`<div class="answer-foot">
    <div class="tools">
      <${Siblings} id=${message.id} />
      <${CopyButton} text=${() => message.content} />
      <${IconButton} icon="retry" label="Regenerate" onClick=${() => ask.regenerate(message.id)} />
      ${ask.canGoOn(message) && html`<${IconButton} icon="goOn" label="Go on from here" onClick=${() => ask.goOn(message)} />`}
      ${message.tokens?.length > 0 && html`<${IconButton} icon="tokens" label="Token probabilities" aria-pressed=${view === "tokens"} onClick=${() => onView("tokens")} />`}
      ${canRewrite(message) && html`<${IconButton} icon="slots" label="Rewrite a part" aria-pressed=${view === "rewrite"} onClick=${() => onView("rewrite")} />`}
      ${message.frames?.length > 1 && html`<${IconButton} icon="play" label="Replay the denoising" aria-pressed=${view === "replay"} onClick=${() => onView("replay")} />`}
      <span class="model-name">${message.model}</span>
    </div>
    ${isPromptOpen && html`<${PromptDialog} message=${message} onEnd=${() => setPromptOpen(false)} />`}
    <p class="figures">
      ${end && html`<span class="end">${end}</span>`}
      ${usage && html`<span>${plural(usage.completion_tokens, "token")}</span>`}
      ${timing?.rate && html`<span>${timing.rate.toFixed(timing.rate < 10 ? 1 : 0)} tokens/s</span>`}
      ${timing && html`<span>first token ${seconds(timing.firstToken)}</span>`}
      ${usage && html`<${PromptShare} prompt=${usage.prompt_tokens} cached=${cached} onOpen=${() => setPromptOpen(true)} />`}
      ${message.rewritten && html`<span>partly rewritten</span>`}
      ${message.warning && html`<span>${message.warning}</span>`}
    </p>
  </div>`;
}

// How much of the prompt lay in the cache, as a bar and in words.
function PromptShare({ prompt, cached, onOpen }) {
  return html`<button type="button" class="prompt-share" onClick=${onOpen} title=${`${cached} of ${prompt} prompt tokens were in the prefix cache`}>
    <svg viewBox="0 0 40 4" aria-hidden="true"><rect width="40" height="4" rx="2" class="whole" /><rect width=${(40 * cached) / Math.max(1, prompt)} height="4" rx="2" class="part" /></svg>
    prompt ${prompt.toLocaleString("en")}${cached > 0 ? `, ${cached.toLocaleString("en")} cached` : ""}</button>`;
}

function Siblings({ id }) {
  const ids = conversations.siblingsOf(id);
  if (ids.length < 2) return null;
  const place = ids.indexOf(id);
  return html`<${Fragment}><span class="siblings">
    <${IconButton} icon="left" label="Previous version" disabled=${place === 0} onClick=${() => conversations.select(ids[place - 1])} />
    <span aria-live="polite">${place + 1}/${ids.length}</span>
    <${IconButton} icon="right" label="Next version" disabled=${place === ids.length - 1} onClick=${() => conversations.select(ids[place + 1])} /></span><//>`;
}
