// Shows openapi.json and sends requests. Text goes into the page as text only; nothing is fetched from elsewhere.
"use strict";

const byId = (id) => document.getElementById(id);
const METHODS = ["get", "post", "put", "delete"];
let openapi = null;

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function headers() {
  const key = byId("key").value.trim();
  return key ? { authorization: `Bearer ${key}` } : {};
}

function tell(problem) {
  byId("problem").hidden = !problem;
  byId("problem").textContent = problem || "";
}

async function load() {
  const answer = await fetch("openapi.json", { headers: headers() });
  if (answer.status === 401) return tell("This server has API keys: give one above, then load.");
  if (!answer.ok) return tell(`openapi.json could not be loaded: status ${answer.status}`);
  tell("");
  openapi = await answer.json();
  byId("version").textContent = openapi.info.version;
  show();
}

function resolve(schema) {
  let found = schema || {};
  for (let hops = 0; found.$ref && hops < 8; hops += 1) {
    found = openapi.components.schemas[found.$ref.split("/").pop()] || {};
  }
  return found;
}

function typeName(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  const several = schema.anyOf || schema.oneOf;
  if (several) return [...new Set(several.filter((one) => one.type !== "null").map(typeName))].join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  if (schema.type === "array") return `list of ${typeName(schema.items) || "anything"}`;
  return schema.type || "anything";
}

function fieldTable(schema) {
  const { properties = {}, required = [] } = resolve(schema);
  const rows = Object.entries(properties).map(([name, field]) =>
    element("tr", {},
      element("td", required.includes(name) ? { class: "required" } : {}, element("code", {}, name)),
      element("td", {}, typeName(field)),
      element("td", {}, field.description || "")));
  const head = element("tr", {}, ...["field", "type", ""].map((word) => element("th", {}, word)));
  return rows.length ? element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)) : "";
}

function exampleOf(schema, name) {
  if (name === "model") return byId("operations").dataset.model || "smollm2";
  if (name === "messages") return [{ role: "user", content: "Hello" }];
  if (name === "input" || name === "prompt" || name === "query") return "Hello";
  const found = resolve(schema);
  if ("const" in found) return found.const;
  if (found.enum) return found.enum[0];
  const several = found.anyOf || found.oneOf;
  if (several) return exampleOf(several[0], "");
  if (found.type === "object" || found.properties) {
    return Object.fromEntries((found.required || []).map((one) => [one, exampleOf((found.properties || {})[one], one)]));
  }
  return { array: [], integer: found.minimum > 0 ? 16 : 0, number: 0, boolean: false }[found.type] ?? "";
}

function tryForm(method, path, operation, body) {
  const parameters = (operation.parameters || []).filter((one) => one.in === "path" || one.in === "query");
  const inputs = parameters.map((one) => [one, element("input", { "aria-label": one.name })]);
  const area = body && element("textarea", { "aria-label": "body", spellcheck: "false" });
  if (area) area.value = JSON.stringify(exampleOf(body, ""), null, 2);
  const out = element("pre", { hidden: "" });
  const button = element("button", { type: "button" }, "Send");
  button.addEventListener("click", () => send(method, path, inputs, area, out));
  const labels = inputs.map(([one, input]) => element("p", {}, element("label", {}, `${one.name} `, input)));
  return element("div", {}, ...labels, ...(area ? [area] : []), element("p", {}, button), out);
}

async function send(method, path, inputs, area, out) {
  const query = new URLSearchParams();
  let url = path.slice(1);
  for (const [parameter, input] of inputs) {
    const value = input.value;
    if (parameter.in === "path") url = url.replace(`{${parameter.name}}`, encodeURIComponent(value));
    else if (value) query.set(parameter.name, value);
  }
  out.hidden = false;
  out.textContent = "…";
  const options = { method: method.toUpperCase(), headers: headers() };
  if (area) Object.assign(options, { body: area.value, headers: { ...options.headers, "content-type": "application/json" } });
  try {
    await receive(await fetch(query.size ? `${url}?${query}` : url, options), out);
  } catch (error) {
    out.textContent = `not sent: ${error.message}`;
  }
}

async function receive(answer, out) {
  out.textContent = `${answer.status}\n\n`;
  const kind = answer.headers.get("content-type") || "";
  if (kind.startsWith("application/json")) {
    out.textContent += JSON.stringify(await answer.json(), null, 2);
    return;
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    out.append(part.value);
  }
}

function operationOf(method, path, operation) {
  const body = operation.requestBody?.content["application/json"]?.schema;
  const told = Object.values(operation.responses["200"]?.content || {})[0]?.schema;
  const summary = element("summary", {},
    element("span", { class: "method" }, method.toUpperCase()), element("span", { class: "path" }, path),
    element("span", { class: "words" }, operation.summary || ""));
  const details = element("details", { "data-words": `${method} ${path} ${operation.description || ""}`.toLowerCase() }, summary);
  details.addEventListener("toggle", () => {
    if (!details.open || details.children.length > 1) return;
    details.append(element("div", {},
      element("p", {}, operation.description || ""),
      ...(body ? [element("h3", {}, `Body: ${typeName(body)}`), fieldTable(body)] : []),
      ...(told ? [element("h3", {}, `Answer: ${typeName(told)}`), fieldTable(told)] : []),
      element("h3", {}, "Try it"), tryForm(method, path, operation, body)));
  });
  return details;
}

function show() {
  const groups = new Map();
  for (const [path, operations] of Object.entries(openapi.paths)) {
    for (const method of METHODS.filter((one) => one in operations)) {
      const tag = operations[method].tags?.[0] || "other";
      groups.set(tag, [...(groups.get(tag) || []), operationOf(method, path, operations[method])]);
    }
  }
  const sections = [...groups].map(([tag, shown]) => element("section", {}, element("h2", {}, tag), ...shown));
  byId("operations").replaceChildren(...sections);
  byId("operations").setAttribute("aria-busy", "false");
}

function find() {
  const wanted = byId("find").value.trim().toLowerCase();
  for (const section of document.querySelectorAll("section")) {
    const shown = [...section.querySelectorAll("details")].filter((one) => {
      one.hidden = !one.dataset.words.includes(wanted);
      return !one.hidden;
    });
    section.hidden = shown.length === 0;
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});
byId("find").addEventListener("input", find);

async function start() {
  try {
    await load();
    if (!openapi) return;
    const answer = await fetch("v1/models", { headers: headers() });
    if (answer.ok) byId("operations").dataset.model = (await answer.json()).data[0]?.id || "";
  } catch (error) {
    tell(`the server does not answer: ${error.message}`);
  }
}

start();
