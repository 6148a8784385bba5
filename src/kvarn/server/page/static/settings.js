// The settings of one conversation: system prompt, sampling, structure. What is empty is the default, which is shown.
import { html, useState } from "./base.js";
import * as conversations from "./conversations.js";
import { fieldsFor, parsed } from "./fields.js";
import { IconButton } from "./icons.js";
import { Presets } from "./presets.js";
import { isSettingsOpen } from "./state.js";

export function Settings() {
  const { settings, model } = conversations;
  const params = settings.value.params ?? {};
  const setParam = (name, value) => conversations.set({ params: { ...settings.peek().params, [name]: value } });
  const changed = Object.values(params).filter((value) => value?.trim?.()).length;
  return html`<aside class="settings" aria-label="Settings">
    <div class="settings-head"><h2>Settings</h2><${IconButton} icon="close" label="Close settings" onClick=${() => (isSettingsOpen.value = false)} /></div>
    <${Presets} settings=${settings.value} onChoose=${conversations.set} />
    <label class="field">System prompt
      <textarea rows="4" dir="auto" placeholder="none: as the model's template has it" value=${settings.value.system ?? ""} onInput=${(event) => conversations.set({ system: event.target.value })}></textarea></label>
    ${!model.value?.is_diffusion && html`<label class="check"><input type="checkbox" checked=${Boolean(settings.value.inspect)} onChange=${(event) => conversations.set({ inspect: event.target.checked })} />Token probabilities</label>
    <p class="help">Keeps the alternatives of every token: look at them under an answer, and branch there.</p>`}
    ${fieldsFor(model.value).map(([name, fields], number) => html`<details class="group" key=${name} open=${number === 0}><summary>${name}</summary>
      ${fields.map((field) => html`<${Field} key=${field[0]} field=${field} value=${params[field[0]] ?? ""} otherwise=${defaultOf(field, model.value)} onChange=${(value) => setParam(field[0], value)} />`)}
    </details>`)}
    <details class="group"><summary>Structure</summary>
      <${JsonField} label="JSON schema" value=${settings.value.schema ?? ""} placeholder=${'{"type": "object", "properties": {…}}'} help="The answer always validates against it." onChange=${(schema) => conversations.set({ schema })} />
      <${JsonField} label="Tools" value=${settings.value.tools ?? ""} placeholder=${'[{"name": "…", "parameters": {…}}]'} help="A list of functions. You play the part of the tool: type what a call returns." onChange=${(tools) => conversations.set({ tools })} />
    </details>
    ${changed > 0 && html`<button type="button" class="plain" onClick=${() => conversations.set({ params: {} })}>Back to the defaults (${changed} changed)</button>`}
  </aside>`;
}

// What the model's authors recommend comes before our own default.
function defaultOf([name, , , otherwise], model) {
  const recommended = model?.sampling?.[name];
  return recommended === undefined || recommended === null ? otherwise : `${recommended} (the model's)`;
}

function Field({ field, value, otherwise, onChange }) {
  const [name, label, kind, , help] = field;
  const [problem, setProblem] = useState(null);
  const id = `field-${name.replaceAll(".", "-")}`;
  const take = (event) => {
    try {
      parsed(field, event.target.value);
      setProblem(null);
    } catch (error) {
      setProblem(error.message);
    }
    onChange(event.target.value);
  };
  const common = { id, value, onInput: take, "aria-describedby": `${id}-help`, "aria-invalid": problem ? "true" : undefined };
  let input;
  if (kind === "flag") {
    input = html`<select ...${common}><option value="">${otherwise}</option><option value="true">on</option></select>`;
  } else if (kind.startsWith("choice:")) {
    input = html`<select ...${common}><option value="">${otherwise}</option>${kind.slice(7).split("|").map((one) => html`<option key=${one} value=${one}>${one}</option>`)}</select>`;
  } else if (kind === "lines" || kind === "json") {
    input = html`<textarea rows="2" ...${common} placeholder=${otherwise} />`;
  } else {
    input = html`<input type="text" inputmode=${kind === "text" ? "text" : "decimal"} ...${common} placeholder=${otherwise} autocomplete="off" />`;
  }
  return html`<div class="field"><label for=${id}>${label}</label>${input}<p class="help" id=${`${id}-help`}>${problem ?? help}</p></div>`;
}

function JsonField({ label, value, placeholder, help, onChange }) {
  let problem = null;
  try {
    if (value.trim()) JSON.parse(value);
  } catch (error) {
    problem = error.message;
  }
  return html`<div class="field"><label>${label}<textarea rows="5" class="mono" spellcheck="false" placeholder=${placeholder} value=${value} aria-invalid=${problem ? "true" : undefined} onInput=${(event) => onChange(event.target.value)} /></label><p class="help">${problem ?? help}</p></div>`;
}
