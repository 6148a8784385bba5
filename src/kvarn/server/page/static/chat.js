// The open conversation: its messages, the head line above and the composer below.
import { download, Guard, html, useEffect, useLayoutEffect, useRef, useState } from "./base.js";
import { writing } from "./ask.js";
import { Composer } from "./composer.js";
import * as conversations from "./conversations.js";
import { IconButton } from "./icons.js";
import { Message } from "./message.js";
import { SelectionButton } from "./rewrite.js";
import { chatModels, isSettingsOpen, isSidebarOpen, modelsProblem } from "./state.js";

const FIRST = 40; // messages drawn at once; earlier ones when they are scrolled to
const MORE = 60;
const NEAR = 80; // pixels from the end that count as being there
const FAR = 400; // ... and from which a button leads there

export function Chat() {
  return html`<main class="chat" id="main">
    <${Head} />
    <${Messages} key=${conversations.current.value?.id} />
    <${SelectionButton} />
    <${Composer} key=${`composer ${conversations.current.value?.id}`} />
  </main>`;
}

function Head() {
  const names = chatModels.value;
  return html`<header class="head">
    <span class="only-narrow"><${IconButton} icon="menu" label="Conversations" onClick=${() => (isSidebarOpen.value = true)} /></span>
    <h1 class="visually-hidden">${conversations.current.value?.title ?? "Kvarn"}</h1>
    <label class="model"><span class="visually-hidden">Model</span>
      <select value=${conversations.modelId.value} onChange=${(event) => conversations.set({ model: event.target.value })}>
        ${names.map((one) => html`<option key=${one.id} value=${one.id}>${one.id}</option>`)}
        ${names.length === 0 && html`<option value="">${modelsProblem.value ? "no model" : "…"}</option>`}
      </select></label>
    <span class="spacer" />
    ${conversations.path.value.length > 0 && html`<${IconButton} icon="down" label="Save this conversation as Markdown" onClick=${saveAsMarkdown} />`}
    <${IconButton} icon="sliders" label="Settings" aria-expanded=${isSettingsOpen.value} onClick=${() => (isSettingsOpen.value = !isSettingsOpen.value)} />
  </header>`;
}

function saveAsMarkdown() {
  const name = conversations.current.value.title.replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 60);
  download(`${name || "conversation"}.md`, conversations.asMarkdown(), "text/markdown");
}

function Messages() {
  const box = useRef(null);
  const isAtEnd = useRef(true);
  const top = useRef(0);
  const earlier = useRef(null);
  const [shown, setShown] = useState(FIRST);
  const [isFar, setFar] = useState(false);
  const ids = conversations.path.value;
  const part = ids.slice(-shown);
  const isWriting = writing() !== undefined;

  const look = () => {
    if (!box.current) return; // it was just left
    const { scrollTop, scrollHeight, clientHeight } = box.current;
    const left = scrollHeight - scrollTop - clientHeight;
    if (left < NEAR) isAtEnd.current = true;
    else if (scrollTop < top.current) isAtEnd.current = false; // its reader left; a text that grows does not
    top.current = scrollTop;
    setFar(!isAtEnd.current && left > FAR);
  };
  const toEnd = () => {
    box.current.scrollTop = box.current.scrollHeight;
    top.current = box.current.scrollTop; // of a text that became shorter: its reader did not leave
    isAtEnd.current = true;
  };
  // Going through versions moves nothing; what is asked is seen; a conversation opens at its end.
  useLayoutEffect(() => void (isAtEnd.current = isWriting), [ids.at(-1)]);
  useLayoutEffect(() => void (isWriting && toEnd()), [isWriting]);
  useLayoutEffect(toEnd, []);
  useEffect(() => {
    // Follow an answer that grows, unless its reader has scrolled away.
    const element = box.current;
    const follow = new ResizeObserver(() => (isAtEnd.current && box.current ? toEnd() : look()));
    follow.observe(element.firstElementChild);
    return () => follow.disconnect();
  }, []);
  useEffect(() => {
    const element = box.current;
    if (!earlier.current) return undefined;
    const seen = new IntersectionObserver(([entry]) => {
      if (!entry.isIntersecting) return;
      const before = element.scrollHeight;
      setShown(shown + MORE);
      requestAnimationFrame(() => (element.scrollTop += element.scrollHeight - before));
    }, { root: element });
    seen.observe(earlier.current);
    return () => seen.disconnect();
  }, [shown, ids.length > shown]);

  return html`<div class="messages" ref=${box} onScroll=${look} tabindex="0" role="log" aria-label="Messages" aria-busy=${isWriting}>
    <div class="column">
      ${ids.length > shown && html`<button ref=${earlier} type="button" class="quiet" onClick=${() => setShown(shown + MORE)}>Show earlier messages</button>`}
      ${part.map((id) => html`<${Guard} key=${id} says="This message cannot be shown."><${Message} id=${id} /><//>`)}
      ${ids.length === 0 && html`<${Welcome} />`}
    </div>
  </div>
  ${isFar && html`<div class="to-end"><${IconButton} icon="end" label="To the end" onClick=${toEnd} /></div>`}`;
}

const IDEAS = ["Explain how a millstone is dressed, in three sentences.", "Write a Python function that merges two sorted lists.", "What is the difference between TCP and UDP?"];

function Welcome() {
  const begin = (text) => {
    const box = document.querySelector("#ask");
    box.value = text;
    box.dispatchEvent(new Event("input"));
    box.focus();
  };
  return html`<div class="welcome">
    <h2>What shall we work on?</h2>
    <p>${modelsProblem.value ?? "Everything runs on this server. Conversations stay in this browser."}</p>
    <div class="ideas">${IDEAS.map((idea) => html`<button type="button" key=${idea} onClick=${() => begin(idea)}>${idea}</button>`)}</div>
  </div>`;
}
