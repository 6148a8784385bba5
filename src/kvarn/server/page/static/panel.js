// The frame of every view but the chat: its title, the way back, and a column that scrolls.
import { html } from "./base.js";
import { IconButton } from "./icons.js";
import { isSidebarOpen } from "./state.js";

export function Panel({ title, label, children }) {
  return html`<main class="live" id="main">
    <header class="head">
      <span class="only-narrow"><${IconButton} icon="menu" label="Conversations" onClick=${() => (isSidebarOpen.value = true)} /></span>
      <h1>${title}</h1><span class="spacer" /><a class="plain" href="#">Back to the chat</a></header>
    <div class="messages" tabindex="0" role="region" aria-label=${label}><div class="column wide">${children}</div></div>
  </main>`;
}
