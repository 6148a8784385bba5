// The engine, watched: one stream of /v1/live while this view is shown, drawn as figures, steps and a map of blocks.
import { html, plural, seconds, signal, size, useEffect, useRef } from "./base.js";
import { events, needsKey, request } from "./api.js";
import { Panel } from "./panel.js";
import { theme } from "./state.js";

const HISTORY = 240; // steps that are drawn
const RETRY_MS = 1500;
const frame = signal(null);
const problem = signal(null);
const steps = new Map(); // model id -> [[number, requests, prompt, generated, seconds], ...]

const KINDS = [["o", "yours", "own"], ["s", "shared", "shared"], ["u", "others", "used"], ["c", "cached", "cached"], ["f", "free", "free"]];

async function watch(abort) {
  while (!abort.aborted) {
    if (needsKey.value !== null) {
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS)); // until the dialog has another one
      continue;
    }
    try {
      for await (const event of events(await request("v1/live", { signal: abort }))) if (event) take(event);
      problem.value = null;
    } catch (error) {
      if (abort.aborted) return;
      problem.value = error.message;
      await new Promise((resolve) => setTimeout(resolve, (error.retryAfter ?? 0) * 1000 || RETRY_MS));
    }
  }
}

function take(event) {
  for (const { id, engine } of event.models) {
    if (!engine) continue;
    const known = (steps.get(id) ?? []).filter(([number]) => number <= engine.num_steps);
    const last = known.at(-1)?.[0] ?? 0;
    steps.set(id, [...known, ...engine.steps.filter(([number]) => number > last)].slice(-HISTORY));
  }
  problem.value = null;
  frame.value = event;
}

export function Live() {
  useEffect(() => {
    let abort = null;
    const look = () => {
      abort?.abort();
      abort = new AbortController();
      if (!document.hidden) watch(abort.signal); // a browser has six connections for all tabs: one that nobody sees takes none
    };
    look();
    document.addEventListener("visibilitychange", look);
    return () => {
      document.removeEventListener("visibilitychange", look);
      abort.abort();
    };
  }, []);
  const shown = frame.value;
  return html`<${Panel} title="Engine" label="The engine now">
      ${problem.value && html`<p class="problem" role="alert">${problem.value}</p>`}
      ${!shown && !problem.value && html`<p class="empty" role="status">Waiting for the first figures…</p>`}
      ${shown && html`<${Requests} requests=${shown.requests} models=${shown.models} />`}
      ${shown?.models.map((model) => html`<${Model} key=${model.id} model=${model} />`)}
  <//>`;
}

const count = (number) => number.toLocaleString("en");
// What models have beside the blocks of the map: layers that see a window only, and recurrent ones.
const POOLS = [["window_blocks", "window blocks"], ["state_slots", "state slots"]];

function Model({ model }) {
  const { engine } = model;
  const facts = `${model.kind}, ${size(model.needed_bytes)}, context ${count(model.context)}`;
  if (!engine) return html`<section class="card"><h2>${model.id}</h2><p class="facts">${facts}, ${model.is_loaded ? "busy" : "not loaded"}</p></section>`;
  const { kv } = engine;
  const hits = engine.prefix_query_tokens ? Math.round((100 * engine.prefix_hit_tokens) / engine.prefix_query_tokens) : 0;
  return html`<section class="card">
    <div class="card-head"><h2>${model.id}</h2><p class="facts">${facts}</p></div>
    <dl class="numbers">
      <${Number_} name="tokens/s" value=${engine.tokens_per_s.toFixed(engine.tokens_per_s < 100 ? 1 : 0)} />
      <${Number_} name="running" value=${engine.running} more=${engine.others_running && `${engine.others_running} of others`} />
      <${Number_} name="waiting" value=${engine.waiting} more=${engine.others_waiting && `${engine.others_waiting} of others`} />
      <${Number_} name="prefix hits" value=${`${hits}%`} more=${engine.prefix_hit_tokens > 0 && `${count(engine.prefix_hit_tokens)} tokens`} />
      <${Number_} name="step" value=${seconds(engine.step_s)} />
      <${Number_} name="preemptions" value=${engine.preemptions} />
      ${POOLS.map(([field, name]) => engine[field][1] > 0 && html`<${Number_} key=${field} name=${name} value=${count(engine[field][0])} more=${`of ${count(engine[field][1])}`} />`)}
    </dl>
    <h3>Batch, step by step</h3>
    <${Steps} id=${model.id} number=${engine.num_steps} />
    ${kv.num_blocks > 0 && html`<h3>KV cache</h3>
      <${BlockMap} runs=${kv.map} total=${kv.num_blocks} label=${`${kv.own} blocks yours, ${kv.shared} shared, ${kv.cached} cached, ${kv.free} free`} />
      <${Legend} kv=${kv} />`}
  </section>`;
}

function Number_({ name, value, more }) {
  return html`<div><dt>${name}</dt><dd>${value}${more ? html`<small>${more}</small>` : null}</dd></div>`;
}

function Legend({ kv }) {
  const counts = { own: kv.own, shared: kv.shared, used: kv.used - kv.own - kv.shared, cached: kv.cached, free: kv.free };
  return html`<p class="legend">${KINDS.map(([letter, word, name]) => html`<span key=${letter}><i class=${`block-${letter}`}></i>${word} ${count(counts[name])}</span>`)}
    <span class="facts">${plural(kv.num_blocks, "block")} of ${kv.block_size} tokens</span></p>`;
}

// Colours come from the style sheet, so that both themes have their own.
const colour = (element, name) => getComputedStyle(element).getPropertyValue(name).trim();

function fitted(canvas, height) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return [pen, width];
}

// Each step is a bar: rows of prompts above rows of answers.
function Steps({ id, number }) {
  const canvas = useRef(null);
  const known = steps.get(id) ?? [];
  useEffect(() => {
    const height = 64;
    const [pen, width] = fitted(canvas.current, height);
    const most = Math.max(4, ...known.map(([, , prompt, generated]) => prompt + generated));
    const scale = (rows) => (height * Math.log1p(rows)) / Math.log1p(most); // a prompt has hundreds of rows, an answer one
    const step = width / HISTORY;
    known.forEach(([, , prompt, generated], place) => {
      const x = width - (known.length - place) * step;
      const below = scale(generated);
      const above = scale(prompt + generated) - below;
      pen.fillStyle = colour(canvas.current, "--accent");
      pen.fillRect(x, height - below, Math.max(1, step - 0.6), below);
      pen.fillStyle = colour(canvas.current, "--prompt");
      pen.fillRect(x, height - below - above, Math.max(1, step - 0.6), above);
    });
  }, [number, theme.value]);
  const last = known.at(-1);
  const words = last ? `last step: ${plural(last[1], "request")}, ${plural(last[2], "prompt token")}, ${plural(last[3], "answer token")}` : "no step yet";
  return html`<canvas ref=${canvas} class="steps" role="img" aria-label=${`Rows of the last ${known.length} steps; ${words}`}></canvas>
    <p class="legend"><span><i class="prompt-rows"></i>prompt</span><span><i class="block-o"></i>answers</span><span class="facts">${words}</span></p>`;
}

function BlockMap({ runs, total, label }) {
  const canvas = useRef(null);
  useEffect(() => {
    const area = canvas.current.clientWidth * 130;
    const cell = Math.max(1, Math.min(14, Math.floor(Math.sqrt(area / total))));
    const gap = cell > 4 ? 1.5 : 0;
    const perRow = Math.max(1, Math.floor(canvas.current.clientWidth / cell));
    const [pen] = fitted(canvas.current, Math.min(400, Math.ceil(total / perRow) * cell));
    let place = 0;
    for (const [, letter, length] of runs.matchAll(/([fcuso])(\d+)/g)) {
      pen.fillStyle = colour(canvas.current, `--block-${letter}`);
      const end = place + Number(length);
      while (place < end) {
        const row = Math.floor(place / perRow);
        const column = place % perRow;
        const run = gap ? 1 : Math.min(end - place, perRow - column); // without gaps a run is one rectangle
        pen.fillRect(column * cell, row * cell, run * cell - gap, cell - gap);
        place += run;
      }
    }
  }, [runs, total, theme.value]);
  return html`<canvas ref=${canvas} class="map" role="img" aria-label=${label}></canvas>`;
}

function Requests({ requests, models }) {
  const others = models.reduce((sum, { engine }) => sum + (engine ? engine.others_running + engine.others_waiting : 0), 0);
  return html`<section class="card"><div class="card-head"><h2>Your requests</h2><p class="facts">${others ? `${plural(others, "request")} of other keys` : "no other key asks now"}</p></div>
    ${requests.length === 0 ? html`<p class="facts">None runs. Ask something in another tab and watch it here.</p>` : html`<div class="table" tabindex="0" role="region" aria-label="Your requests"><table>
      <thead><tr><th scope="col">request</th><th scope="col">model</th><th scope="col">phase</th><th scope="col">prompt</th><th scope="col">cached</th><th scope="col">answer</th><th scope="col">elapsed</th><th scope="col">deadline in</th></tr></thead>
      <tbody>${requests.map((one) => html`<tr key=${one.id}><td class="mono-text">${one.id.slice(-8)}</td><td>${one.model}</td><td>${one.phase}</td>
        <td>${count(one.prompt_tokens_computed)} / ${count(one.prompt_tokens)}</td><td>${count(one.cached_tokens)}</td><td>${count(one.completion_tokens)}</td><td>${seconds(one.elapsed_s)}</td><td>${seconds(one.deadline_s)}</td></tr>`)}</tbody>
    </table></div>`}</section>`;
}
