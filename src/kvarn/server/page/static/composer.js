// Where the next message is written. Its text lives in the element: a keystroke draws nothing else.
import { html, useEffect, useRef } from "./base.js";
import * as ask from "./ask.js";
import * as conversations from "./conversations.js";
import { addFiles, FileList } from "./documents.js";
import { Icon } from "./icons.js";
import { toast } from "./state.js";

const MAX_ROWS_PX = 280;
const DRAFT = "kvarn.draft";

export function Composer() {
  const area = useRef(null);
  const id = ask.writing();
  useEffect(() => {
    area.current.value = sessionStorage.getItem(DRAFT) ?? "";
    grow(area.current);
    if (matchMedia("(min-width: 760px)").matches) area.current.focus();
  }, []);

  const send = () => {
    const text = area.current.value;
    if (!text.trim() || id) return;
    area.current.value = "";
    sessionStorage.removeItem(DRAFT);
    grow(area.current);
    ask.send(text);
  };
  const onInput = () => {
    grow(area.current);
    sessionStorage.setItem(DRAFT, area.current.value);
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
    if (event.key === "ArrowUp" && !area.current.value) {
      const last = conversations.messagesOnPath().findLast((message) => message.role === "user");
      if (last) document.querySelector(`[data-edit="${CSS.escape(last.id)}"]`)?.click();
    }
  };
  const onPaste = (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    addFiles([...event.clipboardData.files]);
  };
  return html`<div class="composer-box">
    ${toast.value && html`<div class="toast" role="status">${toast.value.text}${toast.value.action && html`<button type="button" onClick=${() => { toast.value.onAction(); toast.value = null; }}>${toast.value.action}</button>`}</div>`}
    <${FileList} />
    <form class="composer" onSubmit=${(event) => { event.preventDefault(); send(); }}>
      <label class="icon-button attach" title="Add files to look things up in"><${Icon} name="clip" /><input type="file" multiple class="visually-hidden" aria-label="Add files" onChange=${(event) => { addFiles([...event.target.files]); event.target.value = ""; }} /></label>
      <textarea id="ask" ref=${area} rows="1" dir="auto" placeholder="Ask anything" aria-label="Your message" onInput=${onInput} onKeyDown=${onKey} onPaste=${onPaste}></textarea>
      ${id ? html`<button type="button" class="send stop" aria-label="Stop" title="Stop (Esc)" onClick=${() => ask.stop(id)}><${Icon} name="stop" /></button>`
        : html`<button type="submit" class="send" aria-label="Send" title="Send (Enter)"><${Icon} name="send" /></button>`}
    </form>
    <p class="hint">Enter sends, Shift+Enter begins a line. Answers may be wrong.</p>
  </div>`;
}

function grow(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight, MAX_ROWS_PX)}px`;
}
