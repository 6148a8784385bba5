// Named settings: kept in this browser, chosen in the settings of a conversation. A new chat begins with the last chosen.
import { clip, html, signal, useState } from "./base.js";
import { ConfirmButton, IconButton } from "./icons.js";
import { ofBrowser } from "./kept.js";

const KEPT = "kvarn.presets";
const FIELDS = ["system", "params", "schema", "tools"];
const MAX_NAME = 60;
const read = () => new Map(Object.entries(ofBrowser.object(KEPT)));
const presets = signal(read()); // name -> the fields

function keep(next) {
  presets.value = new Map([...next].sort(([one], [other]) => one.localeCompare(other)));
  ofBrowser.set(KEPT, JSON.stringify(Object.fromEntries(presets.value)));
}

addEventListener("storage", (event) => event.key === KEPT && (presets.value = read())); // another tab

const fieldsOf = (settings) => Object.fromEntries(FIELDS.map((name) => [name, settings?.[name]]));

// What a conversation has of a preset; without one, of none.
export const presetSettings = (name) => (presets.value.has(name) ? { ...fieldsOf(presets.value.get(name)), preset: name } : { ...fieldsOf({}), preset: undefined });

export function Presets({ settings, onChoose }) {
  const [isNaming, setNaming] = useState(false);
  const chosen = presets.value.has(settings.preset) ? settings.preset : "";
  const save = (event) => {
    event.preventDefault();
    const name = clip(new FormData(event.currentTarget).get("name"), MAX_NAME);
    if (!name) return;
    keep(new Map(presets.value).set(name, fieldsOf(settings)));
    setNaming(false);
    onChoose({ preset: name });
  };
  const remove = () => {
    const left = new Map(presets.value);
    left.delete(chosen);
    keep(left);
    onChoose({ preset: undefined });
  };
  if (isNaming) {
    return html`<form class="field" onSubmit=${save} onKeyDown=${(event) => event.key === "Escape" && (event.stopPropagation(), setNaming(false))}>
      <label for="preset-name">Name of the preset</label>
      <div class="preset-row"><input id="preset-name" name="name" required maxlength=${MAX_NAME} autocomplete="off" value=${chosen} ref=${(one) => one && one !== document.activeElement && one.select()} />
        <button class="primary">Save</button></div>
      <p class="help">Keeps the system prompt and all fields below. One of the same name is replaced.</p></form>`;
  }
  return html`<div class="field"><label for="preset">Preset</label>
    <div class="preset-row"><select id="preset" value=${chosen} onChange=${(event) => onChoose(presetSettings(event.target.value))}>
        <option value="">none</option>${[...presets.value.keys()].map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select>
      <${IconButton} icon="save" label="Save as a preset" onClick=${() => setNaming(true)} />
      ${chosen && html`<${ConfirmButton} icon="trash" label=${`Delete the preset ${chosen}`} confirm="Delete?" onConfirm=${remove} />`}</div></div>`;
}
