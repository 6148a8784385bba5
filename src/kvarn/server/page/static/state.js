// What the page shows now, as signals. Knows no element.
import { computed, effect, signal } from "./base.js";
import { getJson, isReachable, needsKey } from "./api.js";
import { ofBrowser } from "./kept.js";

const THEMES = ["system", "light", "dark"];
const THEME = "kvarn.theme";
export const theme = signal(THEMES.find((name) => name === ofBrowser.get(THEME)) ?? "system");
effect(() => ofBrowser.set(THEME, theme.value));
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const dark = signal(prefersDark.matches);
prefersDark.addEventListener("change", () => (dark.value = prefersDark.matches));
effect(() => {
  const isDark = theme.value === "dark" || (theme.value === "system" && dark.value);
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
});

const hash = signal(location.hash);
addEventListener("hashchange", () => (hash.value = location.hash));
// The chat, as an entry of the browser's history of its own: Back leads to what was open before.
export function pushChat(id) {
  history.pushState({ conversation: id }, "", "#");
  hash.value = "";
}
const VIEWS = ["live", "models", "fill"];
export const view = computed(() => VIEWS.find((name) => hash.value === `#${name}`) ?? "chat");

export const isSidebarOpen = signal(false); // on narrow screens
export const isSettingsOpen = signal(false);
export const isHelpOpen = signal(false);
export const query = signal("");

export const toast = signal(null); // {text, action, onAction}
let toastTimer = 0;
export function say(text, action, onAction) {
  toast.value = { text, action, onAction };
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => (toast.value = null), action ? 8000 : 4000);
}

export const models = signal([]);
export const modelsProblem = signal(null);
export const chatModels = computed(() => models.value.filter((model) => model.kind === "generate"));

// A server that was away may have other models than before.
let wasAway = false;
isReachable.subscribe((isHere) => {
  if (isHere && wasAway) setTimeout(loadModels);
  wasAway = !isHere;
});

export async function loadModels() {
  try {
    models.value = (await getJson("v1/models")).data;
    modelsProblem.value = null;
  } catch (error) {
    modelsProblem.value = error.message;
    return !needsKey.value;
  }
  return true;
}
