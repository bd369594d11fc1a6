// The controls: who drafts, how tokens are chosen, the key, light and dark.

import { make } from "./draw.js";

const byId = (id) => document.getElementById(id);
const KEY = "api-key";

export class Settings {
  constructor() {
    this.info = null;
    byId("temperature").addEventListener("input", () => this.#showTemperature());
    byId("method").addEventListener("change", () => this.#showWidth());
    byId("theme").addEventListener("click", switchTheme);
    byId("key").addEventListener("change", () => keep(sessionStorage, KEY, byId("key").value));
    byId("key").value = recall(sessionStorage, KEY) ?? "";
    if (matchMedia("(max-width: 60rem)").matches) {
      for (const panel of document.querySelectorAll("aside details")) panel.open = false;
    }
    this.#showTemperature();
  }

  get key() {
    return byId("key").value.trim();
  }

  /** The server's facts are there: offer what it has. */
  learn(info) {
    this.info = info;
    const name = info.model.split("/").pop();
    byId("model").textContent = name;
    byId("model").title = info.model;
    document.title = `${name} · Outrider playground`;
    byId("max-tokens").max = info.context;
    const chosen = byId("method").value || info.method;
    const choices = info.methods.map((method) =>
      make("option", { value: method.name }, method.name + (method.name === info.method ? " (default)" : "")),
    );
    byId("method").replaceChildren(...choices, make("option", { value: "none" }, "nobody (plain decoding)"));
    byId("method").value = chosen;
    this.#showWidth();
  }

  askForKey() {
    for (const part of document.querySelectorAll(".key")) part.hidden = false;
    byId("settings").open = true;
    byId("key").focus();
  }

  /** What a request says beside its messages. */
  request() {
    const whole = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
    return {
      model: this.info?.model,
      temperature: Number(byId("temperature").value),
      seed: whole("seed"),
      max_tokens: whole("max-tokens") ?? 256,
    };
  }

  /** Who drafts, as the request says it: a name, or false. Before the server told what it has: as it likes. */
  get method() {
    const value = byId("method").value;
    return value === "none" ? false : value || undefined;
  }

  /** Who drafts in a race, where nobody is no answer. */
  get racer() {
    return this.method || this.info?.methods[0]?.name || "ngram";
  }

  get width() {
    const value = byId("width").value;
    return value === "" || byId("width").disabled ? undefined : Number(value);
  }

  get system() {
    return byId("system").value.trim();
  }

  /** Whether drafts are checked so that the text stays the same to the last character. */
  get exact() {
    return (this.info?.verification ?? "exact") === "exact";
  }

  #showTemperature() {
    const value = Number(byId("temperature").value);
    byId("temperature-value").textContent = value === 0 ? "0, greedy" : value.toFixed(2);
  }

  #showWidth() {
    const method = this.info?.methods.find((one) => one.name === byId("method").value);
    byId("width").disabled = !method;
    byId("width").max = method?.width ?? 64;
    byId("width").placeholder = method ? `up to ${method.width}` : "–";
  }
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  keep(localStorage, "theme", root.dataset.theme);
}

// Storage may be forbidden; the page works without.
function keep(storage, name, value) {
  try {
    storage.setItem(name, value);
  } catch {
    return;
  }
}

function recall(storage, name) {
  try {
    return storage.getItem(name);
  } catch {
    return null;
  }
}
