// Icons as paths of one weight, and the buttons that are the same everywhere.
import { html, useState } from "./base.js";

const PATHS = {
  plus: "M12 5v14M5 12h14",
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M8 8h8v8H8z",
  copy: "M9 9h10v10H9zM5 15V5h10",
  check: "M5 12.5l4.5 4.5L19 7.5",
  edit: "M5 19l1-4L16 5l3 3L9 18zM14 7l3 3",
  retry: "M19 12a7 7 0 1 1-2.05-4.95M19 4v4h-4",
  trash: "M5 7h14M10 7V5h4v2M7 7l1 12h8l1-12",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  sliders: "M4 8h9M17 8h3M4 16h3M11 16h9M13 6v4M7 14v4",
  pulse: "M3 12h4l3-7 4 14 3-7h4",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 3v2M12 19v2M3 12h2M19 12h2M5.6 5.6L7 7M17 17l1.4 1.4M5.6 18.4L7 17M17 7l1.4-1.4",
  moon: "M19 14.5A7.5 7.5 0 0 1 9.5 5 7.5 7.5 0 1 0 19 14.5",
  auto: "M12 4a8 8 0 1 0 0 16 8 8 0 0 0 0-16M12 4v16",
  key: "M8.500 10.500a4.500 4.500 0 1 0 0 5 4.500 4.500 0 0 0 .6-1.300H13l1.500 1.500L16 14.200l1.500 1.500 3-3-1.500-1.700H9.100a4.500 4.500 0 0 0-.6-.5M5.500 13h.01",
  down: "M12 5v12M7 12l5 5 5-5M5 20h14",
  up: "M12 16V5M7 9l5-5 5 5M5 20h14",
  tokens: "M4 8h5v8H4zM11 8h3v8h-3zM16 8h4v8h-4z",
  file: "M7 4h7l4 4v12H7zM14 4v4h4",
  folder: "M4 7h5l2 2h9v9H4z",
  clip: "M18 11l-6.5 6.5a4 4 0 0 1-5.6-5.6L13 4.8a2.7 2.7 0 0 1 3.8 3.8L9.9 15.4a1.3 1.3 0 0 1-1.9-1.9L14 7.6",
  cube: "M12 3.500l7.500 4.200v8.600L12 20.500l-7.500-4.200V7.700zM4.500 7.700L12 12l7.500-4.300M12 12v8.500",
  slots: "M4 6h16M4 12h3M17 12h3M4 18h16M9.500 9.500h5v5h-5z",
  save: "M5 5h11l3 3v11H5zM8 5v5h7V5M8 19v-5h8v5",
  goOn: "M4 12h12M11 7l5 5-5 5M20 6v12",
  end: "M12 5v14M6 13l6 6 6-6",
  search: "M11 5a6 6 0 1 0 0 12 6 6 0 0 0 0-12M15.5 15.5L20 20",
  play: "M8 6l10 6-10 6z",
  help: "M9.5 9a2.5 2.5 0 1 1 3.5 2.3c-.7.4-1 .9-1 1.7M12 16.5h.01M12 4a8 8 0 1 0 0 16 8 8 0 0 0 0-16",
  read: "M4 6h16M4 10h16M4 14h10M4 18h7",
};

export function Icon({ name }) {
  return html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true" focusable="false"><path d=${PATHS[name]} /></svg>`;
}

export function IconButton({ icon, label, onClick, ...rest }) {
  return html`<button type="button" class="icon-button" aria-label=${label} title=${label} onClick=${onClick} ...${rest}><${Icon} name=${icon} /></button>`;
}

export function CopyButton({ text, label = "Copy" }) {
  const [isDone, setDone] = useState(false);
  const copy = async () => {
    await copied(text());
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<${IconButton} icon=${isDone ? "check" : "copy"} label=${isDone ? "Copied" : label} onClick=${copy} />`;
}

// The clipboard of pages without TLS on other hosts than localhost is closed: then by selection.
async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).catch(() => {});
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  return undefined;
}

// The first press asks, the second does it; leaving takes the question back.
export function ConfirmButton({ icon, label, confirm, onConfirm }) {
  const [isAsked, setAsked] = useState(false);
  if (!isAsked) return html`<${IconButton} icon=${icon} label=${label} onClick=${(event) => { event.stopPropagation(); setAsked(true); }} />`;
  return html`<button type="button" class="confirm" ref=${(one) => one?.focus()} onBlur=${() => setAsked(false)} onClick=${(event) => { event.stopPropagation(); onConfirm(); }}>${confirm}</button>`;
}
