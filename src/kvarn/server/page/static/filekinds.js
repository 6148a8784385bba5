// Which files the server reads, and as what; which of a folder are worth it. The lists are those of
// kvarn/retrieval/ingest/files.py, which a test compares. Knows names, never a request.
export const KINDS = {
  markdown: "md markdown mdx",
  html: "html htm xhtml",
  pdf: "pdf",
  docx: "docx",
  epub: "epub",
  notebook: "ipynb",
  rst: "rst",
  csv: "csv tsv",
  text: "txt text adoc org tex log json jsonl yaml yml toml ini cfg xml conf properties bib",
  code:
    "py pyi js mjs cjs jsx ts mts tsx vue svelte c h cc cxx cpp hh hpp hxx inl cu cuh m mm java kt kts groovy " +
    "gradle go rs rb php cs fs vb swift scala clj ex exs erl hs ml mli lua r jl sh bash zsh fish ps1 bat sql pl pm zig " +
    "nim d dart v sv vhd f90 f95 asm s proto thrift graphql tf cmake mk mako jinja j2 css scss less",
};
export const NAMES = {
  code: "makefile dockerfile containerfile jenkinsfile rakefile gemfile justfile",
  text: "readme license copying authors changelog changes news notice todo",
};
export const SKIPPED_FOLDERS = new Set("node_modules __pycache__ build dist target venv".split(" "));
export const GENERATED = [".min.js", ".min.css", "package-lock.json", "composer.lock", "pnpm-lock.yaml"];
const IN_BYTES = new Set(["pdf", "docx", "epub", "notebook"]); // the server reads these itself
const MAX_TREE = 4000; // files of one folder

const table = (lists) => new Map(Object.entries(lists).flatMap(([kind, words]) => words.split(" ").map((word) => [word, kind])));
const bySuffix = table(KINDS);
const byName = table(NAMES);

// How a file of this name is read; undefined: of no kind that is known.
export function kindOf(path) {
  const name = path.split("/").pop().toLowerCase();
  return (name.includes(".") ? bySuffix.get(name.split(".").pop()) : undefined) ?? byName.get(name);
}

export const isInBytes = (kind) => IN_BYTES.has(kind);

function isWorthIt(path) {
  const parts = path.split("/");
  const name = parts.pop();
  if (parts.some((folder) => folder.startsWith(".") || SKIPPED_FOLDERS.has(folder))) return false;
  return !name.startsWith(".") && !name.startsWith("~$") && kindOf(name) !== undefined && !GENERATED.some((end) => name.toLowerCase().endsWith(end));
}

// What was chosen in a file dialog: [{path, file}]; of folders only what is of a known kind, not hidden and not made by tools.
export const chosenFiles = (list) =>
  [...list].map((file) => ({ path: file.webkitRelativePath || file.name, file })).filter(({ path }) => !path.includes("/") || isWorthIt(path));

// What was dropped, folders included. Asked at once: what is dropped is gone after the event.
export function droppedFiles(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  return entries.some((entry) => entry.isDirectory) ? walked(entries) : Promise.resolve(chosenFiles(transfer.files));
}

async function walked(entries) {
  const found = [];
  const ahead = [...entries];
  while (ahead.length && found.length < MAX_TREE) {
    const entry = ahead.shift();
    const path = entry.fullPath.replace(/^\//, "");
    if (entry.isDirectory) {
      if (isWorthIt(`${path}/readme`)) ahead.push(...(await children(entry)));
    } else if (!path.includes("/") || isWorthIt(path)) {
      found.push({ path, file: await new Promise((resolve, reject) => entry.file(resolve, reject)) });
    }
  }
  return found;
}

// A reader gives a hundred at a time.
async function children(folder) {
  const reader = folder.createReader();
  const all = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) return all.sort((one, other) => (one.name < other.name ? -1 : 1));
    all.push(...some);
  }
}
