// Where the next message is written. Its text lives in the element: a keystroke draws nothing else.
import { html, useEffect, useRef } from "./base.js";
import * as ask from "./ask.js";
import * as conversations from "./conversations.js";
import { addFiles, FileList } from "./documents.js";
import { chosenFiles } from "./filekinds.js";
import { Icon } from "./icons.js";
import { ofTab } from "./kept.js";
import { say } from "./state.js";

const MAX_ROWS_PX = 280;
const IS_TOUCH = matchMedia("(pointer: coarse)");
const LONG = 20_000; // characters
const MAX_PASTED = 500_000; // browsers take half a minute to lay out two million in one line
const DRAFT = "kvarn.draft";

export function Composer() {
  const area = useRef(null);
  const id = ask.writing();
  useEffect(() => {
    area.current.value = ofTab.get(DRAFT) ?? "";
    grow(area.current);
    if (matchMedia("(min-width: 760px)").matches) area.current.focus();
  }, []);

  // Whoever pressed Stop goes on writing.
  const wasWriting = useRef(false);
  useEffect(() => {
    if (!id && wasWriting.current && document.activeElement.matches("body, .send") && !IS_TOUCH.matches) area.current.focus();
    wasWriting.current = Boolean(id);
  }, [id]);

  const send = () => {
    const text = area.current.value;
    if (!text.trim() || id) return;
    area.current.value = "";
    ofTab.set(DRAFT, null);
    grow(area.current);
    ask.send(text);
  };
  const onInput = () => {
    grow(area.current);
    ofTab.set(DRAFT, area.current.value);
  };
  const onKey = (event) => {
    const isSending = event.ctrlKey || event.metaKey || !(event.shiftKey || IS_TOUCH.matches); // a phone has no Shift+Enter
    if (event.key === "Enter" && isSending && !event.isComposing) {
      event.preventDefault();
      send();
    }
    if (event.key === "ArrowUp" && !area.current.value) {
      const last = conversations.messagesOnPath().findLast((message) => message.role === "user");
      if (last) document.querySelector(`[data-edit="${CSS.escape(last.id)}"]`)?.click();
    }
  };
  const onPaste = (event) => {
    const { files } = event.clipboardData;
    const { length } = event.clipboardData.getData("text/plain");
    if (!files.length && length <= MAX_PASTED) return;
    event.preventDefault();
    if (files.length) addFiles(chosenFiles(files));
    else say(`${length.toLocaleString("en")} characters are too many for this box; save them as a file and drop it here.`);
  };
  return html`<div class="composer-box">
    <${FileList} />
    <form class="composer" onSubmit=${(event) => { event.preventDefault(); send(); }}>
      <${Attach} icon="clip" label="Add files" title="Add files to look things up in" multiple />
      <${Attach} icon="folder" label="Add a folder" title="Add a folder of documents or source code" webkitdirectory />
      <textarea id="ask" ref=${area} rows="1" dir="auto" placeholder="Ask anything" aria-label="Your message" onInput=${onInput} onKeyDown=${onKey} onPaste=${onPaste}></textarea>
      ${id ? html`<button type="button" class="send stop" aria-label="Stop" title="Stop (Esc)" onClick=${() => ask.stop(id)}><${Icon} name="stop" /></button>`
        : html`<button type="submit" class="send" aria-label="Send" title="Send (Enter)"><${Icon} name="send" /></button>`}
    </form>
    <p class="hint">Enter sends, Shift+Enter begins a line. Answers may be wrong.</p>
  </div>`;
}

function Attach({ icon, label, title, ...how }) {
  const take = (event) => {
    const files = chosenFiles(event.target.files);
    event.target.value = "";
    addFiles(files);
  };
  return html`<label class="icon-button attach" title=${title}><${Icon} name=${icon} /><input type="file" class="visually-hidden" aria-label=${label} onChange=${take} ...${how} /></label>`;
}

// As high as its text, which is laid out twice for it: of a long one it is known that it has no room.
function grow(area) {
  if (area.value.length > LONG) return void (area.style.height = `${MAX_ROWS_PX}px`);
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight, MAX_ROWS_PX)}px`;
}
