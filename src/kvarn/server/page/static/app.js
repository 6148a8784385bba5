// The page: puts the parts together, starts them, and listens to the keyboard.
import { Guard, html, render, useEffect, useRef } from "./base.js";
import { isReachable, needsKey } from "./api.js";
import * as ask from "./ask.js";
import { Chat } from "./chat.js";
import * as conversations from "./conversations.js";
import { addFiles } from "./documents.js";
import { droppedFiles } from "./filekinds.js";
import { ofTab } from "./kept.js";
import { KeyDialog } from "./key.js";
import { Fill } from "./fill.js";
import { Live } from "./live.js";
import { Models } from "./models.js";
import { Settings } from "./settings.js";
import { newChat, Sidebar, write } from "./sidebar.js";
import { isHelpOpen, isSettingsOpen, isSidebarOpen, loadModels, toast, view } from "./state.js";
import { storageProblem } from "./store.js";

const KEYS = [
  ["Enter", "send"], ["Shift + Enter", "new line"], ["Esc", "stop the answer, close a panel"], ["↑ in an empty box", "edit the last message"],
  ["Ctrl + K", "search conversations"], ["Ctrl + Shift + O", "new chat"], ["Ctrl + ,", "settings"], ["/", "write"], ["Ctrl + / or ?", "this list"],
];

const VIEWS = { chat: Chat, fill: Fill, live: Live, models: Models };

function App() {
  useEffect(() => {
    document.title = conversations.current.value?.head ? `${conversations.current.value.title} · Kvarn` : "Kvarn";
  }, [conversations.current.value?.title, conversations.current.value?.head]);
  return html`<div class="app" data-settings=${isSettingsOpen.value && view.value === "chat"}>
    <a class="skip" href="#main" onClick=${skip}>${view.value === "chat" ? "Skip to the message box" : "Skip to the content"}</a>
    <${Sidebar} />
    ${isSidebarOpen.value && html`<div class="shade" onClick=${() => (isSidebarOpen.value = false)} />`}
    <${Banner} />
    <${Guard} key=${`${view.value} ${conversations.current.value?.id}`} says="This cannot be shown; reload the page, or open another conversation."><${VIEWS[view.value]} /><//>
    ${isSettingsOpen.value && view.value === "chat" && html`<${Guard} key=${conversations.current.value?.id} says="The settings of this conversation cannot be shown."><${Settings} /><//>`}
    <${Toast} />
    ${needsKey.value !== null && html`<${KeyDialog} />`}
    ${isHelpOpen.value && html`<${Help} />`}
  </div>`;
}

function skip(event) {
  event.preventDefault(); // the hash names the view
  document.querySelector("#ask, #main .messages")?.focus();
}

// What was just done, in every view: a deleted conversation can be brought back from each.
function Toast() {
  const { text, action, onAction } = toast.value ?? {};
  const act = () => {
    toast.value = null;
    onAction();
  };
  return html`<div class="toasts" role="status">${text && html`<div class="toast">${text}${action && html`<button type="button" onClick=${act}>${action}</button>`}</div>`}</div>`;
}

function Banner() {
  const problem = isReachable.value ? storageProblem.value : "The server does not answer. This page goes on as soon as it is back.";
  return problem && html`<p class="banner" role="alert">${problem}</p>`;
}

function Help() {
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  return html`<dialog class="help-dialog" ref=${dialog} aria-labelledby="help-title" onClose=${() => (isHelpOpen.value = false)}>
    <h2 id="help-title">Keyboard</h2>
    <dl>${KEYS.map(([keys, words]) => html`<div key=${keys}><dt><kbd>${keys}</kbd></dt><dd>${words}</dd></div>`)}</dl>
    <form method="dialog" class="row"><button class="primary">Close</button></form>
  </dialog>`;
}

function onKey(event) {
  const command = event.ctrlKey || event.metaKey;
  const isTyping = event.target.matches?.("input, textarea, select");
  if (command && event.key.toLowerCase() === "k") {
    isSidebarOpen.value = true;
    requestAnimationFrame(() => document.querySelector("#search")?.focus());
  } else if (command && event.shiftKey && event.key.toLowerCase() === "o") {
    newChat();
  } else if (command && event.key === ",") {
    isSettingsOpen.value = !isSettingsOpen.value;
  } else if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (ask.writing()) ask.stop();
    else isSidebarOpen.value = isSettingsOpen.value = false;
    return;
  } else if (event.key === "/" && !isTyping && !command) {
    write();
  } else if ((event.key === "?" && !isTyping) || (command && event.key === "/")) {
    isHelpOpen.value = true;
  } else {
    return;
  }
  event.preventDefault();
}

async function start() {
  const last = ofTab.get("kvarn.open");
  conversations.begin();
  render(html`<${App} />`, document.querySelector("#app"));
  addEventListener("keydown", onKey);
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    droppedFiles(event.dataTransfer).then(addFiles);
  });
  loadModels();
  await conversations.refresh();
  if (last) await conversations.open(last);
}

document.querySelector("#app").textContent = "";
start();
