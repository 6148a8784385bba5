// A model's text as Markdown. It is hostile: HTML in it is shown as text, images are never fetched, and whatever markup
// is made of it goes through DOMPurify, the only way into the document that Trusted Types leave open.
import { html, memo, named, signal, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./base.js";
import { CopyButton } from "./icons.js";
import { Lexer, Marked } from "./vendor/marked.js";
import DOMPurify from "./vendor/purify.js";

const MAX_INLINE = 20_000; // characters of one paragraph that are searched for emphasis and links
const MAX_TAIL = 200_000; // characters after the last finished block: beyond that they are plain text
const MAX_BLOCKS = 400; // shown at once
const MAX_ROWS = 100; // of a table
const PLAIN_PIECE = 20_000;

const escaped = (text) => text.replace(/[&<>"']/g, (one) => `&#${one.charCodeAt(0)};`);

const words = (text) => text.trim().split(/\s+/);
const TAGS = words("a b blockquote br code del em h3 h4 h5 h6 hr li ol p pre span strong table tbody td th thead tr ul input");
const MATH_TAGS = words(`
  math maction merror mfrac mi mmultiscripts mn mo mover mpadded mphantom mprescripts mroot mrow ms mspace msqrt mstyle
  msub msubsup msup mtable mtd mtext mtr munder munderover semantics none`);
const ATTRIBUTES = words("class start align checked disabled type scope");
const MATH_ATTRIBUTES = words(`
  accent accentunder columnalign columnlines columnspacing columnspan depth display displaystyle fence form height largeop
  linethickness lspace mathvariant maxsize minsize movablelimits notation rowalign rowlines rowspacing rowspan rspace
  scriptlevel separator stretchy symmetric voffset width`);
const CLEAN = {
  ALLOWED_TAGS: [...TAGS, ...MATH_TAGS],
  ALLOWED_ATTR: ["href", ...ATTRIBUTES, ...MATH_ATTRIBUTES],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i, // of href; without the next line every attribute would have to be an address
  ADD_URI_SAFE_ATTR: [...ATTRIBUTES, ...MATH_ATTRIBUTES],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_TRUSTED_TYPE: true,
};
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow ugc");
  }
  if (node.tagName === "INPUT") {
    // Of a list of tasks; whatever else it was, it is now a box that nobody can change.
    node.setAttribute("type", "checkbox");
    node.setAttribute("disabled", "");
    node.setAttribute("aria-label", node.hasAttribute("checked") ? "done" : "to do");
  }
});

// Math: Temml is fetched when the first formula appears, and every block with one is drawn again then.
const temml = signal(null);
let isTemmlAsked = false;

function formula(tex, display) {
  if (temml.value) {
    const markup = temml.value.renderToString(tex, { displayMode: display, maxSize: [20, 40], maxExpand: 200, throwOnError: false });
    return markup.replace(/ style="[^"]*"/g, ""); // colours: the policy allows no style in markup
  }
  if (!isTemmlAsked) import("./vendor/temml.js").then((module) => (temml.value = module.default)).catch(() => {});
  isTemmlAsked = true;
  return `<code>${escaped(tex)}</code>`;
}

const blockMath = {
  name: "blockMath",
  level: "block",
  start: (text) => text.match(/(^|\n) {0,3}(\$\$|\\\[)/)?.index,
  tokenizer(text) {
    const found = /^ {0,3}(?:\$\$([\s\S]{1,4000}?)\$\$|\\\[([\s\S]{1,4000}?)\\\])\s*(?:\n|$)/.exec(text);
    return found ? { type: "blockMath", raw: found[0], tex: (found[1] ?? found[2]).trim() } : undefined;
  },
  renderer: (token) => `<p>${formula(token.tex, true)}</p>`,
};
const inlineMath = {
  name: "inlineMath",
  level: "inline",
  start: (text) => text.match(/\$|\\\(/)?.index,
  tokenizer(text) {
    // $5 and $6 are prices: the dollar signs of a formula touch it, and no digit follows the second.
    const found = /^(?:\$(?=\S)((?:\\.|[^$\n\\]){1,1000}?)(?<=\S)\$(?!\d)|\\\(([^\n]{1,1000}?)\\\))/.exec(text);
    return found ? { type: "inlineMath", raw: found[0], tex: found[1] ?? found[2] } : undefined;
  },
  renderer: (token) => formula(token.tex, false),
};

const marked = new Marked({ gfm: true, breaks: false, extensions: [blockMath, inlineMath] }, {
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<span class="no-image">image not loaded: ${escaped(text || "")} ${escaped(named(String(href)).slice(0, 200))}</span>`,
    heading({ tokens, depth }) {
      const level = Math.min(depth + 2, 6);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>\n`;
    },
    link({ href, tokens }) {
      const text = this.parser.parseInline(tokens);
      return /^(?:https?|mailto):/i.test(href) ? `<a href="${escaped(href)}">${text}</a>` : text;
    },
  },
});
const OPTIONS = marked.defaults;

// The top-level blocks of a text that grows: those that are finished are not read again.
export class Blocks {
  constructor() {
    this.text = "";
    this.finished = [];
    this.length = 0; // characters in finished blocks
  }

  update(text) {
    const clean = named(text.replace(/\r\n?/g, "\n"));
    if (!clean.startsWith(this.text)) {
      this.finished = [];
      this.length = 0;
    }
    this.text = clean;
    const tail = clean.slice(this.length);
    if (tail.length > MAX_TAIL) return [...this.finished, ...plainPieces(tail)];
    const tokens = blockTokens(tail);
    const last = tokens.findLastIndex((token) => token.type !== "space");
    for (const token of tokens.slice(0, Math.max(last, 0))) {
      this.length += token.raw.length;
      if (token.type !== "space") this.finished.push(token);
    }
    return last < 0 ? this.finished : [...this.finished, tokens[last]];
  }
}

function blockTokens(text) {
  try {
    const lexer = new Lexer(OPTIONS);
    lexer.blockTokens(text, lexer.tokens);
    for (const { src, tokens } of lexer.inlineQueue) {
      if (src.length > MAX_INLINE) tokens.push({ type: "text", raw: src, text: src, escaped: false });
      else lexer.inlineTokens(src, tokens);
    }
    return [...lexer.tokens];
  } catch {
    return plainPieces(text); // nested too deeply
  }
}

function plainPieces(text) {
  const pieces = [];
  for (let start = 0; start < text.length; start += PLAIN_PIECE) {
    const raw = text.slice(start, start + PLAIN_PIECE);
    pieces.push({ type: "plain", raw, text: raw });
  }
  return pieces;
}

// sources: of an answer that has some; "[1]" leads to the passage then.
export function Markdown({ text, sources }) {
  const blocks = useRef(null);
  blocks.current ??= new Blocks();
  const tokens = useMemo(() => blocks.current.update(text), [text]);
  const [shown, setShown] = useState(MAX_BLOCKS);
  return html`<div class="markdown">
    ${tokens.slice(0, shown).map((token, number) => html`<${Block} key=${number} raw=${token.raw} token=${token} sources=${sources} />`)}
    ${tokens.length > shown && html`<button class="quiet" onClick=${() => setShown(shown + MAX_BLOCKS)}>Show more of this answer (${(tokens.length - shown).toLocaleString("en")} blocks)</button>`}
  </div>`;
}

const Block = memo(({ token, sources }) => {
  if (token.type === "code") return html`<${CodeBlock} language=${token.lang ?? ""} text=${token.text} />`;
  if (token.type === "table") return html`<${Table} token=${token} sources=${sources} />`;
  if (token.type === "plain") return html`<p class="plain" dir="auto">${token.text}</p>`;
  return html`<${Markup} token=${token} sources=${sources} />`;
}, (before, next) => before.raw !== next.raw || before.token.type !== next.token.type || before.sources !== next.sources);

function Markup({ token, sources }) {
  const isReady = temml.value !== null;
  const element = useRef(null);
  const clean = useMemo(() => purified(token), [token.raw, isReady]);
  useLayoutEffect(() => sources && linkCitations(element.current, sources), [clean, sources]);
  return html`<div ref=${element} dir="auto" dangerouslySetInnerHTML=${{ __html: clean }} />`;
}

// Each "[1]" of a source becomes a button, made here and not of the model's markup.
function linkCitations(element, sources) {
  const known = new Map(sources.map((one) => [String(one.number), one.source]));
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) if (!walker.currentNode.parentElement.closest("code, pre, a, math, button")) texts.push(walker.currentNode);
  for (const node of texts) {
    const parts = node.data.split(/\[(\d{1,3})\]/);
    if (!parts.some((part, place) => place % 2 && known.has(part))) continue;
    node.replaceWith(...parts.map((part, place) => (place % 2 ? citation(part, known.get(part)) : part)));
  }
}

function citation(number, source) {
  if (source === undefined) return `[${number}]`;
  const button = document.createElement("button");
  Object.assign(button, { type: "button", className: "cite", textContent: `[${number}]`, title: source });
  button.dataset.number = number;
  return button;
}

function purified(token) {
  let markup;
  try {
    markup = marked.parser([token]);
  } catch {
    markup = `<p>${escaped(token.raw)}</p>`;
  }
  return DOMPurify.sanitize(markup, CLEAN);
}

function Table({ token, sources }) {
  const [shown, setShown] = useState(MAX_ROWS);
  const part = { ...token, rows: token.rows.slice(0, shown), raw: `${token.raw}${shown}` };
  return html`<div class="table" tabindex="0" role="region" aria-label="table"><${Markup} token=${part} sources=${sources} /></div>
    ${token.rows.length > shown && html`<button class="quiet" onClick=${() => setShown(shown + 1000)}>Show more of ${token.rows.length.toLocaleString("en")} rows</button>`}`;
}

// Code: highlight.js and a language are fetched when the first such block is finished.
const NAMES = { sh: "bash", shell: "bash", zsh: "bash", console: "bash", c: "cpp", "c++": "cpp", h: "cpp", cc: "cpp", js: "javascript", jsx: "javascript", ts: "javascript", typescript: "javascript", mjs: "javascript", py: "python", python3: "python", rs: "rust", html: "xml", svg: "xml", xhtml: "xml" };
const LANGUAGES = new Set(["bash", "cpp", "css", "javascript", "json", "python", "rust", "sql", "xml"]);
const MAX_CODE = 60_000;
const loaded = new Map();

function highlighter(language) {
  if (!loaded.has(language)) {
    const both = Promise.all([import("./vendor/highlight.js"), import(`./vendor/highlight-${language}.js`)]);
    loaded.set(language, both.then(([core, grammar]) => {
      core.default.registerLanguage(language, grammar.default);
      return core.default;
    }));
  }
  return loaded.get(language);
}

function CodeBlock({ language, text }) {
  const word = language.trim().split(/\s/)[0].toLowerCase();
  const name = NAMES[word] ?? word;
  const [markup, setMarkup] = useState(null);
  useEffect(() => {
    if (!LANGUAGES.has(name) || text.length > MAX_CODE) return undefined;
    let isWanted = true;
    const later = setTimeout(async () => {
      const core = await highlighter(name).catch(() => null);
      if (core && isWanted) setMarkup({ text, clean: DOMPurify.sanitize(core.highlight(text, { language: name }).value, CLEAN) });
    }, 60);
    return () => {
      isWanted = false;
      clearTimeout(later);
    };
  }, [name, text]);
  const code = markup?.text === text ? html`<code dangerouslySetInnerHTML=${{ __html: markup.clean }} />` : html`<code>${text}</code>`;
  return html`<div class="code">
    <div class="code-head"><span>${word || "text"}</span><${CopyButton} text=${() => text} label="Copy code" /></div>
    <pre tabindex="0" role="region" aria-label=${`code ${word}`} dir="ltr">${code}</pre>
  </div>`;
}
