// The list of conversations: search, open, rename, delete, export and import.
import { clip, download, html, useEffect, useState } from "./base.js";
import { forgetKey, key, needsKey } from "./api.js";
import * as ask from "./ask.js";
import * as conversations from "./conversations.js";
import { forgetFiles } from "./documents.js";
import { ConfirmButton, Icon, IconButton } from "./icons.js";
import { isHelpOpen, isSidebarOpen, pushChat, query, say, theme, view } from "./state.js";
import * as store from "./store.js";
import { exported, imported } from "./transfer.js";

const DAY = 86_400_000;
const MAX_SHOWN = 200;
const VIEWS = [["fill", "slots", "Fill"], ["models", "cube", "Models"], ["live", "pulse", "Engine"]];
const THEMES = { system: ["auto", "light", "Theme: as the system"], light: ["sun", "dark", "Theme: light"], dark: ["moon", "system", "Theme: dark"] };

export function newChat() {
  if (conversations.path.value.length) pushChat(null);
  conversations.begin();
  isSidebarOpen.value = false;
  write();
}

// The message box, from every view: one that is drawn anew takes the focus itself.
export function write() {
  location.hash = "";
  document.querySelector("#ask")?.focus();
}

function group(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY) return "Yesterday";
  return time >= today - 7 * DAY ? "Last 7 days" : "Older";
}

export function Sidebar() {
  const [found, setFound] = useState(null);
  const all = conversations.list.value;
  useEffect(() => {
    if (!query.value.trim()) return setFound(null);
    const later = setTimeout(async () => setFound(await store.search(query.value, all)), 120);
    return () => clearTimeout(later);
  }, [query.value, all]);
  const shown = found ? all.filter((one) => found.has(one.id)) : all;
  const groups = Map.groupBy ? Map.groupBy(shown.slice(0, MAX_SHOWN), (one) => group(one.updated)) : new Map([["Conversations", shown]]);
  const [icon, next, label] = THEMES[theme.value];
  return html`<nav class="sidebar" aria-label="Conversations" data-open=${isSidebarOpen.value}>
    <div class="brand"><a href="#" onClick=${newChat}><${Mark} />Kvarn</a>
      <${IconButton} icon=${icon} label=${label} onClick=${() => (theme.value = next)} />
      <span class="only-narrow"><${IconButton} icon="close" label="Close the list" onClick=${() => (isSidebarOpen.value = false)} /></span></div>
    <button type="button" class="new-chat" onClick=${newChat}><${Icon} name="plus" />New chat</button>
    <div class="search"><${Icon} name="search" /><input id="search" type="search" placeholder="Search" aria-label="Search conversations" value=${query.value} onInput=${(event) => (query.value = event.target.value)} /></div>
    <div class="list" tabindex="-1">
      ${[...groups].map(([name, members]) => html`<section key=${name}><h2>${name}</h2><ul>${members.map((one) => html`<${Entry} key=${one.id} conversation=${one} />`)}</ul></section>`)}
      ${all.length === 0 && html`<p class="empty">Conversations stay in this browser.</p>`}
      ${found && shown.length === 0 && html`<p class="empty" role="status">Nothing has “${clip(query.value, 30)}”.</p>`}
    </div>
    <${Foot} />
  </nav>`;
}

const Mark = () => html`<svg class="mark" viewBox="0 0 32 32" aria-hidden="true"><circle cx="16" cy="16" r="11.5" /><circle cx="16" cy="16" r="3.2" /><path d="M16 4.5v6M16 21.500v6M4.500 16h6M21.500 16h6" /></svg>`;

const UNDO_MS = 9000; // a little longer than it is offered

function remove(id) {
  const conversation = conversations.recordOf(id);
  ask.stopIn(id);
  const later = setTimeout(() => forgetFiles(conversation), UNDO_MS);
  conversations.remove(id, () => clearTimeout(later));
}

function Entry({ conversation: { id, title } }) {
  const [isNaming, setNaming] = useState(false);
  const isOpen = conversations.current.value?.id === id && view.value === "chat";
  const finish = (event) => {
    setNaming(false);
    if (event.target.value.trim()) conversations.rename(id, event.target.value);
  };
  const onKey = (event) => {
    if (event.key === "Enter") event.target.blur();
    if (event.key === "Escape") setNaming(false);
  };
  if (isNaming) return html`<li><input class="rename" aria-label="Title" value=${title} ref=${(one) => one && one !== document.activeElement && one.select()} onBlur=${finish} onKeyDown=${onKey} /></li>`;
  const show = () => {
    pushChat(id);
    conversations.open(id);
    isSidebarOpen.value = false;
  };
  return html`<li class=${isOpen ? "entry is-open" : "entry"}>
    <button type="button" class="title" aria-current=${isOpen ? "true" : undefined} title=${title} dir="auto" onClick=${show} onDblClick=${() => setNaming(true)}>${title}</button>
    <span class="actions"><${IconButton} icon="edit" label=${`Rename ${clip(title, 40)}`} onClick=${() => setNaming(true)} />
    <${ConfirmButton} icon="trash" label=${`Delete ${clip(title, 40)}`} confirm="Delete?" onConfirm=${() => remove(id)} /></span>
  </li>`;
}

function Foot() {
  const exportAll = async () => download("kvarn-conversations.json", await exported());
  const importFile = async (event) => {
    const [file] = event.target.files;
    event.target.value = "";
    if (!file) return;
    try {
      const number = await imported(await file.text());
      await conversations.refresh();
      say(`${number} imported.`);
    } catch (error) {
      say(error.message);
    }
  };
  return html`<div class="views">${VIEWS.map(([name, icon, label]) => html`<a key=${name} class="foot-link" href=${`#${name}`} aria-current=${view.value === name ? "page" : undefined} onClick=${() => (isSidebarOpen.value = false)}><${Icon} name=${icon} />${label}</a>`)}</div>
  <div class="foot">
    <${IconButton} icon="down" label="Export all conversations" onClick=${exportAll} />
    <label class="icon-button" title="Import conversations"><${Icon} name="up" /><input type="file" class="visually-hidden" accept="application/json,.json" aria-label="Import conversations" onChange=${importFile} /></label>
    ${key.value && html`<${IconButton} icon="key" label="Forget the API key" onClick=${() => { forgetKey(); needsKey.value = "The key was forgotten. Give another one."; }} />`}
    <${IconButton} icon="help" label="Keyboard" onClick=${() => (isHelpOpen.value = true)} />
  </div>`;
}
