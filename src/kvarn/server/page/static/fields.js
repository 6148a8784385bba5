// The sampling fields of a request: names, ranges, defaults, and how what was typed becomes JSON. Knows no element.
// [name, label, kind, default as shown, what it does]; kinds: number, integer, text, lines, flag, json, choice:a|b
const INT = "integer";
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
export const DIFFUSION = ["Diffusion", [
  ["diffusion.steps", "Steps", INT, "one per token", "Over the whole answer; fewer is faster."],
  ["diffusion.block_length", "Block length", INT, "the model's", "Blocks are filled one after another."],
  ["diffusion.policy", "Policy", "choice:low_confidence|random|origin|maskgit_plus|topk_margin|entropy|threshold|factor|entropy_exit|local_leap|hierarchy|joint_threshold", "low_confidence", "Which positions a step fills."],
  ["diffusion.threshold", "Threshold", "number", "the policy's", "Of the policies that have one."],
  ["diffusion.cache", "Cache", "choice:none|prefix|dual|sparse|block|sub_block", "the model's", "Which keys and values are kept between steps."],
  ["diffusion.cfg_scale", "Guidance", "number", "0", "Classifier-free guidance; 0 is off."],
  ["diffusion.alg_temp", "Order temperature", "number", "0", "Noise on the order of filling."],
]];

export const ALTERNATIVES = 5; // shown beside each token

export const fieldsFor = (model) => [...GROUPS, ...(model?.is_diffusion ? [DIFFUSION] : [])];

// The value of one field, from what was typed; an error names it.
export function parsed([name, label, kind], text) {
  if (kind === "flag") return text === "true" ? true : undefined;
  const given = text ?? "";
  if (!given.trim()) return undefined;
  if (kind === "lines") return given.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  if (kind === "json") return fromJson(label, given);
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
      const [first, second] = field[0].split(".");
      if (second) (body[first] ??= {})[second] = value;
      else body[first] = value;
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
