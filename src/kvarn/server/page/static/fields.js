// The sampling fields of a request: names, ranges, defaults, and how what was typed becomes JSON. Knows no element.
// [name, label, kind, default as shown, what it does]; kinds: number, integer, text, lines, flag, json, choice:a|b
const INT = "integer";
const FLAGS = "choice:true|false";
export const GROUPS = [
  ["Sampling", [
    ["temperature", "Temperature", "number", "0.7", "Higher is more varied; 0 always takes the likeliest token."],
    ["top_p", "Top-p", "number", "0.95", "Only the likeliest tokens that together have this probability."],
    ["top_k", "Top-k", INT, "off", "Only this many of the likeliest tokens."],
    ["min_p", "Min-p", "number", "off", "Only tokens at least this likely, relative to the likeliest."],
    ["typical_p", "Typical-p", "number", "1", "Only tokens whose surprise is near what is expected."],
    ["seed", "Seed", INT, "random", "The same seed gives the same answer, byte by byte."],
  ]],
  ["Length and end", [
    ["max_tokens", "Max tokens", INT, "to the end of the context", "The answer ends after so many."],
    ["min_tokens", "Min tokens", INT, "0", "It does not end before so many."],
    ["stop", "Stop strings", "lines", "none", "One per line: the answer ends before any of them."],
    ["stop_token_ids", "Stop token ids", "json", "none", "A JSON list of ids."],
    ["ignore_eos", "Ignore the end token", "flag", "off", "Goes on until the length is reached."],
    ["truncate", "Truncate", "choice:left", "refuse", "left: drops the oldest prompt tokens that do not fit."],
  ]],
  ["Repetition", [
    ["repetition_penalty", "Repetition penalty", "number", "off", "Divides the scores of tokens that occurred."],
    ["presence_penalty", "Presence penalty", "number", "0", "Subtracted once from tokens that occurred."],
    ["frequency_penalty", "Frequency penalty", "number", "0", "Subtracted for every time they did."],
    ["penalty_window", "Penalty window", INT, "everything", "Penalties look at so many last tokens."],
    ["dry_multiplier", "DRY multiplier", "number", "0", "Penalises tokens that would repeat a run; 0 is off."],
    ["dry_base", "DRY base", "number", "1.75", "How fast that grows with the run's length."],
    ["dry_allowed_length", "DRY allowed length", INT, "2", "Runs up to this length are free."],
    ["dry_sequence_breakers", "DRY breakers", "lines", "\\n : \" *", "One per line: a run ends at these."],
    ["xtc_probability", "XTC probability", "number", "0", "How often the top choices are dropped; 0 is off."],
    ["xtc_threshold", "XTC threshold", "number", "0.1", "Which count as top choices."],
  ]],
  ["Request", [
    ["logit_bias", "Logit bias", "json", "none", "A JSON object from token id to a number from -100 to 100."],
    ["priority", "Priority", INT, "0", "Higher runs first, within what the key may."],
    ["cache_salt", "Cache salt", "text", "none", "Shares cached prefixes only with requests that have the same."],
    ["reasoning_effort", "Reasoning effort", "choice:none|minimal|low|medium|high|xhigh|max", "the template's", "Told to the chat template, if it reads one."],
    ["chat_template_kwargs", "Template variables", "json", "none", "A JSON object for the chat template."],
  ]],
];
const POLICIES =
  "low_confidence|random|origin|maskgit_plus|topk_margin|entropy|" +
  "threshold|factor|entropy_exit|local_leap|hierarchy|joint_threshold";
const CACHES = "none|prefix|dual|sparse|block|sub_block";
const CANVAS_STEPS = ["diffusion.steps", "Steps", INT, "as many as it needs", "At most so many for each canvas."];
// Of models whose canvas is masked. Those that denoise random tokens have steps alone.
export const DIFFUSION = [
  ["Diffusion", [
    ["diffusion.steps", "Steps", INT, "one per token", "Over the whole answer; fewer is faster."],
    ["diffusion.block_length", "Block length", INT, "32, or the model's", "Blocks are filled one after another."],
    ["diffusion.sub_block_length", "Sub-block length", INT, "off; 8 with cache sub_block", "Parts of a block, filled one by one."],
    ["diffusion.canvas", "Canvas", "choice:fixed|grow", "fixed; grow for block diffusion", "fixed: the whole answer at once; grow: block by block."],
    ["diffusion.policy", "Policy", `choice:${POLICIES}`, "low_confidence", "Which positions a step fills."],
    ["diffusion.alg_temp", "Order temperature", "number", "0", "Noise on the order of filling, of policies that count."],
    ["diffusion.cfg_scale", "Guidance", "number", "0", "Classifier-free guidance; 0 is off, else twice the work."],
    ["diffusion.pinned", "Pinned", "json", "nothing", "A JSON object from an index in the answer to a token id, or to the text that stands there."],
  ]],
  ["Diffusion: bounds of a policy", [
    ["diffusion.threshold", "Threshold", "number", "0.9; joint_threshold 0.5", "threshold, local_leap, hierarchy, joint_threshold: fills from this confidence on."],
    ["diffusion.factor", "Factor", "number", "1", "factor: the more, the more are filled at once."],
    ["diffusion.entropy_threshold", "Entropy threshold", "number", "1.5", "entropy_exit: fills below so many nats."],
    ["diffusion.relaxed_threshold", "Relaxed threshold", "number", "0.75", "local_leap: enough near a position that reaches the threshold."],
    ["diffusion.radius", "Radius", INT, "4", "local_leap: what counts as near."],
    ["diffusion.low_threshold", "Low threshold", "number", "0.4", "hierarchy: enough for the best of a run of masked ones."],
    ["diffusion.edit_threshold", "Edit threshold", "number", "0", "joint_threshold: above it a filled token is replaced."],
    ["diffusion.max_post_edit_steps", "Edits after filling", INT, "16", "joint_threshold: passes that only edit."],
  ]],
  ["Diffusion: cache", [
    ["diffusion.cache", "Cache", `choice:${CACHES}`, "dual; block for block diffusion", "Which keys and values are kept between steps."],
    ["diffusion.sparse.enabled", "Sparse", "choice:true|false", "with cache sparse", "Blocks see the part of the rest that matters most."],
    ["diffusion.sparse.retention_ratio", "Share kept", "number", "0.5", "Of the tokens outside the block."],
    ["diffusion.sparse.delay_step", "Chosen in step", INT, "1", "The steps before it see everything."],
    ["diffusion.sparse.default_block_len", "Block length", INT, "32", "Where none is given above."],
    ["diffusion.sparse.pool_kernel", "Neighbours", INT, "3", "An odd number of tokens that share the best of their scores."],
    ["diffusion.sparse.head_select", "By head", "choice:true|false", "true", "Every KV head keeps its own."],
  ]],
];

export const ALTERNATIVES = 5; // shown beside each token

function ofDiffusion(model) {
  if (!model?.is_diffusion) return [];
  return model.can_fill ? DIFFUSION : [["Diffusion", [CANVAS_STEPS]]];
}

export const fieldsFor = (model) => [...GROUPS, ...ofDiffusion(model)];

// The value of one field, from what was typed; an error names it.
export function parsed([name, label, kind], text) {
  if (kind === "flag") return text === "true" ? true : undefined;
  const given = text ?? "";
  if (!given.trim()) return undefined;
  if (kind === "lines") return given.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  if (kind === "json") return fromJson(label, given);
  if (kind === FLAGS) return given === "true";
  if (kind !== "number" && kind !== INT) return given;
  const number = Number(given);
  if (!Number.isFinite(number) || (kind === INT && !Number.isInteger(number))) {
    throw new Error(`${label} is “${given.slice(0, 40)}”; give ${kind === INT ? "a whole number" : "a number"}.`);
  }
  return number;
}

function fromJson(label, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${label} is not JSON: ${error.message}`);
  }
}

// All fields of a request that the settings of a conversation ask for.
export function parsedFields(settings, model) {
  const body = {};
  for (const [, fields] of fieldsFor(model)) {
    for (const field of fields) {
      const value = parsed(field, settings.params?.[field[0]]);
      if (value === undefined) continue;
      const path = field[0].split(".");
      const name = path.pop();
      let holder = body;
      for (const part of path) holder = holder[part] ??= {};
      holder[name] = value;
    }
  }
  if (model?.is_diffusion) (body.diffusion ??= {}).events = true;
  else if (settings.inspect) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
  if (settings.schema?.trim()) {
    const schema = fromJson("The JSON schema", settings.schema);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  }
  if (settings.tools?.trim()) body.tools = toolList(fromJson("Tools", settings.tools));
  return body;
}

function toolList(given) {
  const tools = Array.isArray(given) ? given : [given];
  return tools.map((tool) => (tool?.type === "function" ? tool : { type: "function", function: tool }));
}
