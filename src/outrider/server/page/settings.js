// The controls: drafting method, sampling, API key, light and dark.

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

  /** Fill the controls with the server's model and methods. */
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

  /** Whether every field has a valid value; the browser says what is wrong with the first that has not. */
  valid() {
    if (byId("controls").checkValidity()) return true;
    byId("settings").open = true; // a field in a closed panel cannot show its message
    return byId("controls").reportValidity();
  }

  askForKey() {
    for (const part of document.querySelectorAll(".key")) part.hidden = false;
    byId("settings").open = true;
    byId("key").focus();
  }

  /** The fields of a request besides its messages. */
  request() {
    const whole = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
    return {
      model: this.info?.model,
      temperature: Number(byId("temperature").value),
      seed: whole("seed"),
      max_tokens: whole("max-tokens") ?? 256,
    };
  }

  /** The field `speculate` of a request: a method, or false; undefined until the server has listed its methods. */
  get method() {
    const value = byId("method").value;
    return value === "none" ? false : value || undefined;
  }

  /** The drafting method of a race, which needs one. */
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

  /** Whether verification is exact, so that drafts do not change the text. */
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
