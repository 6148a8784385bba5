// The page: puts the parts together, starts them, and listens to the keyboard.
import { html, render, useEffect, useRef } from "./base.js";
import { isReachable, needsKey } from "./api.js";
import * as ask from "./ask.js";
import { Chat } from "./chat.js";
import * as conversations from "./conversations.js";
import { addFiles } from "./documents.js";
import { KeyDialog } from "./key.js";
import { Live } from "./live.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { isHelpOpen, isSettingsOpen, isSidebarOpen, loadModels, view } from "./state.js";
import { storageProblem } from "./store.js";

const KEYS = [
  ["Enter", "send"], ["Shift + Enter", "new line"], ["Esc", "stop the answer, close a panel"], ["↑ in an empty box", "edit the last message"],
  ["Ctrl + K", "search conversations"], ["Ctrl + Shift + O", "new chat"], ["Ctrl + ,", "settings"], ["/", "write"], ["?", "this list"],
];

function App() {
  useEffect(() => {
    document.title = conversations.current.value?.head ? `${conversations.current.value.title} · Kvarn` : "Kvarn";
  }, [conversations.current.value?.title, conversations.current.value?.head]);
  return html`<div class="app" data-settings=${isSettingsOpen.value && view.value === "chat"}>
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.querySelector("#ask")?.focus(); }}>Skip to the message box</a>
    <${Sidebar} />
    ${isSidebarOpen.value && html`<div class="shade" onClick=${() => (isSidebarOpen.value = false)} />`}
    <${Banner} />
    ${view.value === "live" ? html`<${Live} />` : html`<${Chat} />`}
    ${isSettingsOpen.value && view.value === "chat" && html`<${Settings} />`}
    ${needsKey.value !== null && html`<${KeyDialog} />`}
    ${isHelpOpen.value && html`<${Help} />`}
  </div>`;
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
    conversations.begin();
    document.querySelector("#ask")?.focus();
  } else if (command && event.key === ",") {
    isSettingsOpen.value = !isSettingsOpen.value;
  } else if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (ask.writing()) ask.stop();
    else isSidebarOpen.value = isSettingsOpen.value = false;
    return;
  } else if (event.key === "/" && !isTyping) {
    document.querySelector("#ask")?.focus();
  } else if (event.key === "?" && !isTyping) {
    isHelpOpen.value = true;
  } else {
    return;
  }
  event.preventDefault();
}

async function start() {
  conversations.begin();
  render(html`<${App} />`, document.querySelector("#app"));
  addEventListener("keydown", onKey);
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    addFiles([...event.dataTransfer.files]);
  });
  loadModels();
  await conversations.refresh();
  const last = sessionStorage.getItem("kvarn.open");
  if (last) await conversations.open(last);
}

document.querySelector("#app").textContent = "";
start();
