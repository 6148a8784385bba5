// The dialog that asks for an API key. It stays in this tab unless "remember" is chosen, and travels in a header only.
import { html, useEffect, useRef, useState } from "./base.js";
import { needsKey, setKey } from "./api.js";
import { loadModels } from "./state.js";

export function KeyDialog() {
  const dialog = useRef(null);
  const field = useRef(null);
  const remember = useRef(null);
  const [isTrying, setTrying] = useState(false);
  useEffect(() => {
    if (!dialog.current.open) dialog.current.showModal();
  }, []);
  const submit = async (event) => {
    event.preventDefault();
    const text = field.current.value.trim();
    if (!text) return;
    setTrying(true);
    setKey(text, remember.current.checked);
    await loadModels();
    setTrying(false);
  };
  return html`<dialog class="key" ref=${dialog} aria-labelledby="key-title" onCancel=${(event) => event.preventDefault()}>
    <form onSubmit=${submit}>
      <h2 id="key-title">API key</h2>
      <p role="alert">${needsKey.value}</p>
      <label class="field">Key<input ref=${field} type="password" autocomplete="off" spellcheck="false" required /></label>
      <label class="check"><input ref=${remember} type="checkbox" />Remember it in this browser</label>
      <p class="help">Otherwise it is forgotten when this tab is closed. It is sent to this server only, in a header.</p>
      <div class="row"><button class="primary" type="submit" disabled=${isTrying}>${isTrying ? "Trying…" : "Use this key"}</button></div>
    </form>
  </dialog>`;
}
