// The models of this server: what is in memory and on disk, and for admins how that is changed, with the plan before it.
import { html, plural, signal, size, useEffect, useState } from "./base.js";
import { events, getJson, needsKey, request } from "./api.js";
import { Icon } from "./icons.js";
import { Panel } from "./panel.js";
import { loadModels, models } from "./state.js";

const LOOK_MS = 2000; // between two looks at what is there
const UNDER_WAY = new Set(["looking", "waiting", "downloading", "unpacking"]);
const WORDS = { looking: "looking for it", waiting: "another program fetches it; waiting", downloading: "downloading", unpacking: "unpacking", success: "here", cancelled: "cancelled; the next pull goes on from there" };

const stored = signal(null); // the answer of v1/stored_models
const reader = signal(null); // why this key may only look, or null
const problem = signal(null);
const pulls = signal(new Map()); // name -> the last event of a pull
const following = new Set();

async function look() {
  if (needsKey.value !== null) return; // as the dialog asks for another one
  await loadModels();
  try {
    stored.value = await getJson("v1/stored_models");
    reader.value = problem.value = null;
  } catch (error) {
    if (error.status !== 403) problem.value = error.message;
    else reader.value = "This key may look. Keys with admin = true may also pull, load and unload models.";
    return;
  }
  for (const pull of stored.value.pulls) {
    if (UNDER_WAY.has(pull.status)) follow(pull.model); // another tab, or this one before it was loaded again
    else if (pull.status === "failed" && !pulls.value.has(pull.model)) note(pull);
  }
}

const note = (pull) => (pulls.value = new Map(pulls.value).set(pull.model, pull));

function forget(name) {
  const left = new Map(pulls.value);
  left.delete(name);
  pulls.value = left;
}

async function follow(name, fields = {}) {
  if (following.has(name)) return;
  following.add(name);
  note({ model: name, status: "looking" });
  try {
    for await (const event of events(await request("v1/models/pull", { body: { model: name, ...fields } }))) if (event) note(event);
    const last = pulls.value.get(name);
    if (UNDER_WAY.has(last?.status)) note({ ...last, status: "failed", error: "The server ended in the middle. Pull again: it goes on from there." });
  } catch (error) {
    note({ ...pulls.value.get(name), model: name, status: "failed", code: error.code, error: error.code === "lost" ? "The connection was lost. Pull again: it goes on from there." : error.message });
  } finally {
    following.delete(name);
    look();
  }
}

export function Models() {
  useEffect(() => {
    look();
    const timer = setInterval(() => document.visibilityState === "visible" && look(), LOOK_MS);
    return () => clearInterval(timer);
  }, []);
  return html`<${Panel} title="Models" label="Models of this server">
    ${problem.value && html`<p class="problem" role="alert">${problem.value}</p>`}
    ${reader.value && html`<p class="note" role="note">${reader.value}</p>`}
    ${stored.value && !reader.value && html`<${Room} memory=${stored.value.memory} disk=${stored.value.disk} />`}
    ${stored.value && !reader.value && html`<${Get} aliases=${stored.value.aliases} />`}
    <${List} />
  <//>`;
}

function Room({ memory, disk }) {
  const share = Math.min(100, (100 * memory.loaded_bytes) / memory.budget_bytes);
  return html`<section class="card"><div class="card-head"><h2>Memory</h2><p class="facts">${size(disk.free_bytes)} free on disk</p></div>
    <div class="bar" role="img" aria-label=${`${size(memory.loaded_bytes)} of ${size(memory.budget_bytes)} planned for models`}><svg viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true"><rect width=${share} height="8" /></svg></div>
    <p class="facts">${size(memory.loaded_bytes)} of ${size(memory.budget_bytes)} are planned for the models in memory; the rest is free for others.</p>
  </section>`;
}

// A model by its name: what it would take is told before anything is fetched.
function Get({ aliases }) {
  const [name, setName] = useState("");
  const [plan, setPlan] = useState(null);
  const [refusal, setRefusal] = useState(null);
  const [isAsking, setAsking] = useState(false);
  const ask = async (event) => {
    event?.preventDefault();
    setAsking(true);
    setPlan(null);
    setRefusal(null);
    try {
      setPlan(await getJson("v1/models/pull", { body: { model: name.trim(), dry_run: true } }));
    } catch (error) {
      setRefusal(error.message);
    }
    setAsking(false);
  };
  const pull = (force) => {
    follow(plan.model, force ? { force } : {});
    setPlan(null);
    setName("");
  };
  return html`<section class="card"><h2>Get a model</h2>
    <form class="get" onSubmit=${ask}>
      <label class="visually-hidden" for="get-name">Name of a model</label>
      <input id="get-name" value=${name} placeholder="hf:org/repo:Q4_K_M or a short name" autocomplete="off" spellcheck="false" list="known-models" onInput=${(event) => setName(event.target.value)} />
      <datalist id="known-models">${aliases.map((one) => html`<option key=${one.name} value=${one.name}>${one.summary}</option>`)}</datalist>
      <button class="primary" disabled=${!name.trim() || isAsking}>${isAsking ? "Looking…" : "Look it up"}</button>
    </form>
    ${aliases.length > 0 && !plan && html`<p class="facts">Tested here: ${aliases.map((one) => html`<button type="button" class="link" key=${one.name} onClick=${() => setName(one.name)} title=${one.summary}>${one.name}</button> (${size(one.bytes)}) `)}</p>`}
    ${refusal && html`<p class="problem" role="alert">${refusal}</p>`}
    ${plan && html`<${Plan} plan=${plan} onPull=${pull} onEnd=${() => setPlan(null)} />`}
    ${[...pulls.value.values()].filter((one) => one.status !== "success").map((one) => html`<${Progress} key=${one.model} pull=${one} />`)}
  </section>`;
}

function Plan({ plan: { model, status, plan }, onPull, onEnd }) {
  if (status === "success") return html`<p class="note" role="status">${model} is here already. Load it below.</p>`;
  const fits = plan?.fits ?? true;
  return html`<div class="plan" role="status"><h3>${model}</h3>
    ${plan ? html`<dl class="numbers">
      <${Fact} name="download" value=${plan.download_bytes === null ? "?" : size(plan.download_bytes)} />
      <${Fact} name="disk" value=${size(plan.disk_needed_bytes)} more=${`${size(plan.disk_free_bytes)} free`} isBad=${plan.disk_needed_bytes > plan.disk_free_bytes} />
      <${Fact} name="memory, about" value=${size(plan.memory_needed_bytes)} more=${`of ${size(plan.memory_budget_bytes)}`} isBad=${plan.memory_needed_bytes > plan.memory_budget_bytes} />
    </dl>` : html`<p class="facts">The source does not tell how large it is.</p>`}
    ${!fits && html`<p class="problem">It does not fit: see the numbers.</p>`}
    <div class="row"><button type="button" class="plain" onClick=${onEnd}>Not now</button>
      <button type="button" class="primary" onClick=${() => onPull(!fits)}>${fits ? "Pull" : "Pull all the same"}</button></div>
  </div>`;
}

function Fact({ name, value, more, isBad }) {
  return html`<div class=${isBad ? "is-bad" : undefined}><dt>${name}</dt><dd>${value}${more && html`<small>${more}</small>`}</dd></div>`;
}

function Progress({ pull }) {
  const { model, status, done_bytes: done = 0, total_bytes: total } = pull;
  const isRunning = UNDER_WAY.has(status);
  const cancel = () => request("v1/models/cancel_pull", { body: { model } }).catch(() => {});
  const words = pull.error ?? WORDS[status] ?? status;
  return html`<div class="pull"><div class="pull-head"><strong>${model}</strong><span class="facts">${total ? `${size(done)} of ${size(total)}` : ""}</span><span class="spacer" />
      ${isRunning && html`<button type="button" class="plain" onClick=${cancel} aria-label=${`Cancel the pull of ${model}`}>Cancel</button>`}
      ${!isRunning && html`<button type="button" class="plain" onClick=${() => forget(model)}>Dismiss</button><button type="button" class="plain" onClick=${() => follow(model)}>Pull again</button>`}</div>
    ${isRunning && html`<progress max=${total ?? undefined} value=${total ? done : undefined} aria-label=${`Pull of ${model}`}></progress>`}
    <p class=${status === "failed" ? "problem" : "facts"} role=${status === "failed" ? "alert" : "status"}>${words}</p>
  </div>`;
}

// Everything there is, offered ones first: a row each with what can be done with it.
function List() {
  const onDisk = stored.value?.data ?? [];
  const offered = models.value.filter((one) => !one.parent);
  const facts = new Map((stored.value?.offered ?? []).map((one) => [one.id, one]));
  const others = reader.value ? [] : onDisk.filter((one) => one.id === null);
  return html`<section class="card"><h2>On this server</h2>
    <ul class="model-list">
      ${offered.map((one) => html`<${Offered} key=${one.id} model=${one} facts=${facts.get(one.id)} file=${onDisk.find((row) => row.id === one.id)} />`)}
      ${others.map((one) => html`<${Kept} key=${`file ${one.name}`} file=${one} />`)}
    </ul></section>`;
}

function Row({ name, state, isOn, facts, action, children }) {
  return html`<li><div class="model-row"><div><p class="model-title">${name}<span class=${isOn ? "chip is-on" : "chip"}>${state}</span></p><p class="facts">${facts}</p></div><span class="spacer" />${action}</div>${children}</li>`;
}

function Offered({ model, facts, file }) {
  const { isBusy, refusal, run } = useAction();
  const isLoaded = facts?.is_loaded ?? model.is_loaded;
  const told = [model.is_diffusion ? "diffusion" : { generate: "text", embed: "embeddings", rerank: "reranking" }[model.kind], facts && `${size(facts.needed_bytes)} of memory`, file && `${size(file.bytes)} on disk`, `context\u00a0${model.max_model_len.toLocaleString("en")}`, facts?.num_users > 0 && `${plural(facts.num_users, "request")} now`];
  const unload = (drain) => run(() => getJson("v1/models/unload", { body: { model: model.id, ...(drain ? { drain } : {}) } }));
  const canUnload = !reader.value && facts && !facts.is_pinned;
  const button = isLoaded ? canUnload && html`<button type="button" class="plain" disabled=${isBusy} onClick=${() => unload(false)} aria-label=${`Unload ${model.id}`}>${isBusy ? "Unloading…" : "Unload"}</button>` : null;
  return html`<${Row} name=${model.id} state=${facts?.is_pinned ? "pinned" : isLoaded ? "in memory" : "not loaded"} isOn=${isLoaded} facts=${told.filter(Boolean).join(", ")} action=${button}>
    ${refusal && html`<div class="problem" role="alert"><p>${refusal.message}</p>${refusal.code === "model_in_use" && html`<button type="button" class="plain" onClick=${() => unload(true)}>Unload when they have ended</button>`}</div>`}
    ${!isLoaded && !reader.value && facts && html`<${Loader} name=${model.id} />`}
  <//>`;
}

function Kept({ file }) {
  const facts = [`${size(file.bytes)} on disk`, file.version && `version ${file.version.slice(0, 12)}`, !file.source && "part of the package"];
  return html`<${Row} name=${file.name} state="on disk" facts=${facts.filter(Boolean).join(", ")}><${Loader} name=${file.name} /><//>`;
}

// The first press tells the memory plan, the second loads.
function Loader({ name }) {
  const [plan, setPlan] = useState(null);
  const { isBusy, refusal, run } = useAction();
  const load = (dry_run) => run(async () => {
    const told = await getJson("v1/models/load", { body: { model: name, ...(dry_run ? { dry_run } : {}) } });
    setPlan(dry_run ? told : null);
  });
  return html`<div class="loader">
    ${plan && html`<p class="facts" role="status">Takes ${size(plan.needed_bytes)} of ${size(plan.budget_bytes)}, context ${plan.context.toLocaleString("en")}. ${plan.unloads.length ? `Unloads ${plan.unloads.join(", ")}.` : "Nothing has to leave."}</p>`}
    ${refusal && html`<p class="problem" role="alert">${refusal.message}</p>`}
    <button type="button" class=${plan ? "primary" : "plain"} disabled=${isBusy} onClick=${() => load(!plan)} aria-label=${plan ? `Load ${name} now` : `Load ${name}`}>${isBusy ? (plan ? "Loading…" : "Planning…") : plan ? "Load now" : html`<${Icon} name="down" />Load`}</button>
    ${plan && !isBusy && html`<button type="button" class="plain" onClick=${() => setPlan(null)}>Not now</button>`}
  </div>`;
}

function useAction() {
  const [isBusy, setBusy] = useState(false);
  const [refusal, setRefusal] = useState(null);
  const run = async (work) => {
    setBusy(true);
    setRefusal(null);
    try {
      await work();
      await look();
    } catch (error) {
      setRefusal({ message: error.message, code: error.code });
    }
    setBusy(false);
  };
  return { isBusy, refusal, run };
}
