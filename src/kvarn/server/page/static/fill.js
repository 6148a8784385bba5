// Templates: a text with slots, or a JSON schema, which a diffusion model fills in at once (POST /v1/fill).
import { html, named, signal, useEffect, useRef, useState } from "./base.js";
import { getJson } from "./api.js";
import { CopyButton } from "./icons.js";
import { ofTab } from "./kept.js";
import { Panel } from "./panel.js";
import { chatModels, loadModels, models } from "./state.js";

const SLOT = /\{\{\s*([A-Za-z_][A-Za-z0-9_.-]{0,63})\s*\}\}/g;
const RULES = [["text", "any text"], ["choices", "one of"], ["regex", "pattern"], ["schema", "JSON"]];
const RULE_NAMES = { text: "Text", choices: "Choices", regex: "Pattern", schema: "Schema" };
const EXAMPLES = { text: "", choices: "dog | cat", regex: "[A-Z][a-z]+", schema: '{"type": "integer", "maximum": 9}' };
const KEPT = "kvarn.template";
const SCHEMA = `{
  "type": "object",
  "properties": {
    "name": {"type": "string", "maxLength": 12},
    "age": {"type": "integer", "minimum": 1, "maximum": 9},
    "pet": {"enum": ["dog", "cat", "bird"]}
  }
}`;
const FIRST = { kind: "template", prompt: "", template: "Once upon a time, {{name}} had a {{pet}}. They {{did}}.", schema: SCHEMA, rules: { pet: { rule: "choices", value: "dog | cat" }, name: { rule: "regex", value: "[A-Z][a-z]+" } } };

function remembered() {
  const kept = ofTab.object(KEPT);
  const isBroken = Object.entries(FIRST).some(([name, first]) => name in kept && (kept[name] === null || typeof kept[name] !== typeof first));
  return isBroken ? FIRST : { ...FIRST, ...kept };
}

const form = signal(remembered());
const change = (fields) => {
  form.value = { ...form.value, ...fields };
  ofTab.set(KEPT, JSON.stringify(form.value));
};

export const fillingModels = () => chatModels.value.filter((one) => one.can_fill);
export const slotNames = (template) => [...new Set([...template.matchAll(SLOT)].map(([, name]) => name))];

// The request of a form; throws an Error that says what is wrong with it.
export function fillBody({ kind, prompt, template, schema, rules, temperature, seed, model }) {
  const numbers = Object.fromEntries([["temperature", temperature], ["seed", seed]].filter(([, value]) => value !== undefined && value !== "").map(([name, value]) => [name, Number(value)]));
  const body = { model, ...(prompt ? { prompt } : {}), ...numbers };
  if (kind === "schema") {
    return { ...body, json_schema: fromJson(schema, "The schema") };
  }
  const slots = {};
  for (const name of slotNames(template)) {
    const { rule = "text", value = "", room } = rules[name] ?? {};
    const slot = room ? { max_tokens: Number(room) } : {};
    if (rule === "regex" && value) slot.regex = value;
    if (rule === "choices" && value.trim()) slot.choices = value.split("|").map((one) => one.trim()).filter(Boolean);
    if (rule === "schema" && value.trim()) slot.json_schema = fromJson(value, `The schema of ${name}`);
    if (Object.keys(slot).length) slots[name] = slot;
  }
  return { ...body, template, ...(Object.keys(slots).length ? { slots } : {}) };
}

function fromJson(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} is no JSON: ${error.message}`);
  }
}

export function Fill() {
  const [answer, setAnswer] = useState(null);
  const [refusal, setRefusal] = useState(null);
  const [isBusy, setBusy] = useState(false);
  useEffect(() => {
    if (!models.value.length) loadModels();
  }, []);
  const able = fillingModels();
  const chosen = able.find((one) => one.id === form.value.model) ?? able[0];
  const send = async (event) => {
    event.preventDefault();
    setBusy(true);
    setRefusal(null);
    const began = performance.now();
    const { kind, template } = form.value; // which may be another one when the answer comes
    try {
      const told = await getJson("v1/fill", { body: fillBody({ ...form.value, model: chosen.id }) });
      setAnswer({ ...told, kind, template, seconds: (performance.now() - began) / 1000 });
    } catch (error) {
      setRefusal(error.message);
    }
    setBusy(false);
  };
  return html`<${Panel} title="Fill a template" label="Templates">
    <p class="note">A diffusion model sees what comes after a gap: every slot is filled at once, and what you wrote stays. Rules are always followed.</p>
    ${able.length === 0 && html`<p class="problem" role="alert">This server offers no model that fills templates. Load tiny-diffusion under Models, or start it with --model tiny-diffusion.</p>`}
    <form class="card fill-form" onSubmit=${send}>
      <div class="card-head"><div class="tabs" role="group" aria-label="What to fill">
        ${[["template", "Text with slots"], ["schema", "JSON schema"]].map(([kind, label]) => html`<button type="button" key=${kind} aria-pressed=${form.value.kind === kind} onClick=${() => change({ kind })}>${label}</button>`)}</div>
        <label class="inline">Model <select value=${chosen?.id} onChange=${(event) => change({ model: event.target.value })}>${able.map((one) => html`<option key=${one.id} value=${one.id}>${one.id}</option>`)}</select></label></div>
      <label class="field">What comes before: the model reads it, the result leaves it out<textarea rows="1" value=${form.value.prompt} onInput=${(event) => change({ prompt: event.target.value })} /></label>
      ${form.value.kind === "template" ? html`<${Template} />` : html`<label class="field">Schema<textarea class="mono" rows="11" spellcheck="false" value=${form.value.schema} onInput=${(event) => change({ schema: event.target.value })} /></label>`}
      <div class="fill-foot"><label class="inline">Temperature <input type="number" min="0" max="100" step="0.1" placeholder="0" value=${form.value.temperature ?? ""} onInput=${(event) => change({ temperature: event.target.value })} /></label>
        <label class="inline">Seed <input type="number" placeholder="any" value=${form.value.seed ?? ""} onInput=${(event) => change({ seed: event.target.value })} /></label>
        <span class="spacer" /><button class="primary" disabled=${!chosen || isBusy}>${isBusy ? "Filling…" : "Fill"}</button></div>
      ${refusal && html`<p class="problem" role="alert">${refusal}</p>`}
    </form>
    ${answer && html`<${Filled} answer=${answer} />`}
  <//>`;
}

function Template() {
  const names = slotNames(form.value.template);
  const setRule = (name, fields) => change({ rules: { ...form.value.rules, [name]: { ...form.value.rules[name], ...fields } } });
  return html`<label class="field">Template<textarea id="template" rows="3" value=${form.value.template} onInput=${(event) => change({ template: event.target.value })} /></label>
    <p class="help">Write a slot as {{name}}.</p>
    ${names.length > 0 && html`<div class="slots">${names.map((name) => {
      const { rule = "text", value = "", room = "" } = form.value.rules[name] ?? {};
      return html`<div class="slot" key=${name}><code>${name}</code>
        <select aria-label=${`Rule of ${name}`} value=${rule} onChange=${(event) => setRule(name, { rule: event.target.value })}>${RULES.map(([id, label]) => html`<option key=${id} value=${id}>${label}</option>`)}</select>
        <input aria-label=${`${RULE_NAMES[rule]} of ${name}`} class="mono" spellcheck="false" disabled=${rule === "text"} placeholder=${EXAMPLES[rule]} value=${rule === "text" ? "" : value} onInput=${(event) => setRule(name, { value: event.target.value })} />
        <input aria-label=${`Tokens of room for ${name}`} type="number" min="1" max="4096" placeholder="16 tokens" value=${room} onInput=${(event) => setRule(name, { room: event.target.value })} /></div>`;
    })}</div>`}`;
}

// What was filled in stands out from what was written.
function Filled({ answer }) {
  const card = useRef(null);
  useEffect(() => card.current.scrollIntoView({ block: "nearest" }), [answer]);
  const parts = answer.kind === "schema" ? [answer.text] : answer.template.split(SLOT);
  return html`<section class="card" ref=${card} aria-live="polite"><div class="card-head"><h2>Filled</h2><p class="facts">${answer.usage.completion_tokens} tokens, ${answer.seconds.toFixed(2)} s</p></div>
    <p class=${answer.kind === "schema" ? "filled mono-text" : "filled"} dir="auto">${parts.map((part, place) => (place % 2 ? html`<mark key=${place}>${named(answer.values[part])}</mark>` : named(part)))}</p>
    <div class="row"><${CopyButton} text=${() => answer.text} label="Copy the filled text" /></div></section>`;
}
