// What every part of the page is made of: Preact through tagged templates, hooks and signals. No build step.
import { Component, Fragment, h, render } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export { Fragment, h, render };
export { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
export { batch, computed, effect, signal, useComputed, useSignal, useSignalEffect } from "./vendor/signals.js";

export const html = htm.bind(h);

// A component that is drawn again only when one of its properties is another value, or as differs() says.
export function memo(Inner, differs = hasChanged) {
  return class extends Component {
    shouldComponentUpdate(next) {
      return differs(this.props, next);
    }
    render(props) {
      return h(Inner, props);
    }
  };
}

// What is inside may fail, on a broken record or by a fault of ours: the rest of the page goes on.
export class Guard extends Component {
  componentDidCatch(error) {
    this.setState({ error });
  }
  render({ says, children }, { error }) {
    return error ? h("p", { class: "problem", role: "alert" }, `${says} (${error.message})`) : children;
  }
}

function hasChanged(before, next) {
  return [...new Set([...Object.keys(before), ...Object.keys(next)])].some((name) => before[name] !== next[name]);
}

export const newId = () => crypto.randomUUID?.() ?? [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, "0")).join("");

export const plural = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

export function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 60 ? `${value.toFixed(1)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

// Controls that make text look like another one (Trojan Source) are shown by their names, wherever it is not the user's own.
const BIDI = /[\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c]/g;
export const named = (text) => (text ?? "").replace(BIDI, (mark) => `[U+${mark.charCodeAt(0).toString(16).toUpperCase()}]`);

// What is seen as one character may be many: an emoji of four people has eleven.
const letters = "Segmenter" in Intl ? new Intl.Segmenter() : null;

export function clip(text, length) {
  const line = text.slice(0, 40 * length).replace(/\s+/g, " ").trim();
  const all = letters ? Array.from(letters.segment(line), (one) => one.segment) : Array.from(line);
  return all.length > length ? `${all.slice(0, length - 1).join("")}…` : line;
}

// A file for the user, made here: nothing is sent anywhere.
export function download(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export const size = (bytes) => (bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : bytes >= 1e6 ? `${Math.round(bytes / 1e6)} MB` : `${Math.max(1, Math.round(bytes / 1e3))} kB`);
