// The controls: drafting method, sampling, format, API key, light and dark.

import { make } from "./draw.js";
import { keep, local, recall, session } from "./storage.js";

const byId = (id) => document.getElementById(id);
const KEY = "api-key";
// Settings of an example, which the next example replaces, and the names under which they are shown above the prompt.
const OPTIONAL = { prediction: "", format: "text", schema: "" };
// Settings that a reload keeps.
const STORED = "settings";
const REMEMBERED = [
  "method",
  "width",
  "temperature",
  "top-p",
  "top-k",
  "seed",
  "max-tokens",
  "system",
  "always-draft",
  "tokens-while-streaming",
];

export class Settings {
  /** `panels` opens the panel of the settings if a field needs attention. */
  constructor(panels) {
    this.panels = panels;
    this.info = null;
    this.remembered = remembered();
    this.#restore();
    byId("controls").addEventListener("change", () => this.#remember());
    byId("temperature").addEventListener("input", () => this.#showTemperature());
    byId("method").addEventListener("change", () => this.#showMethod());
    byId("theme").addEventListener("click", switchTheme);
    byId("key").addEventListener("change", () => keep(session, KEY, byId("key").value));
    byId("key").value = recall(session, KEY) ?? "";
    for (const name of Object.keys(OPTIONAL)) byId(name).addEventListener("input", () => this.#showActive());
    this.#showTemperature();
    this.#showActive();
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
    const most = Math.min(info.context, info.max_tokens ?? Infinity);
    byId("max-tokens").max = most;
    // The value that the page begins with leaves space for a prompt.
    if (Number(byId("max-tokens").value) > most) byId("max-tokens").value = Math.max(Math.floor(most / 2), 1);
    const names = [...info.methods.map((method) => method.name), "none"];
    const chosen = byId("method").value || names.find((name) => name === this.remembered.method) || info.method;
    const choices = info.methods.map((method) =>
      make("option", { value: method.name }, method.name + (method.name === info.method ? " (default)" : "")),
    );
    byId("method").replaceChildren(...choices, make("option", { value: "none" }, "none (plain decoding)"));
    byId("method").value = chosen;
    byId("always-draft").checked ||= !info.adaptive;
    byId("always-draft").disabled = !info.adaptive; // the server always drafts
    this.#showMethod();
  }

  /** Whether every field has a valid value; the browser says what is wrong with the first that has not. */
  valid() {
    if (byId("controls").checkValidity()) return true;
    this.#reveal();
    return byId("controls").reportValidity();
  }

  askForKey() {
    for (const part of document.querySelectorAll(".key")) part.hidden = false;
    this.#reveal();
    byId("key").focus();
  }

  /** Fill in the fields of an example, and empty the others of this kind. */
  fill(fields) {
    for (const [name, value] of Object.entries({ ...OPTIONAL, ...fields })) byId(name).value = value;
    this.#showActive();
  }

  /** The fields of a request besides its messages. */
  request() {
    const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
    const predicted = this.method !== false && this.prediction;
    return {
      model: this.info?.model,
      temperature: Number(byId("temperature").value),
      top_p: number("top-p"),
      top_k: number("top-k"),
      seed: number("seed"),
      max_tokens: number("max-tokens") ?? 512,
      response_format: this.#responseFormat(),
      speculate: predicted ? undefined : this.method, // the server drafts from a prediction by itself
      speculate_width: this.method ? this.width : undefined,
      always_draft: this.method !== false && byId("always-draft").checked ? true : undefined,
      prediction: predicted ? { type: "content", content: this.prediction } : undefined,
    };
  }

  /** The messages that come before the conversation. */
  opening() {
    const system = byId("system").value.trim();
    return system ? [{ role: "system", content: system }] : [];
  }

  /** The field `speculate` of a request: a method, or false; undefined until the server has listed its methods. */
  get method() {
    const value = byId("method").value;
    return value === "none" ? false : value || undefined;
  }

  /** The name of the drafter; a race needs one even if plain decoding is selected. */
  get racer() {
    if (this.prediction) return "prediction";
    return this.method || this.info?.methods[0]?.name || "ngram";
  }

  /** Names of the drafters that draft together, in the order of the bits of `origins`. */
  get drafters() {
    return this.method && !this.prediction ? this.method.split("+") : [];
  }

  get width() {
    const value = byId("width").value;
    return value === "" || byId("width").disabled ? undefined : Number(value);
  }

  get prediction() {
    return byId("prediction").value;
  }

  /** "json" if the answer is JSON, else "text". */
  get format() {
    return byId("format").value === "text" ? "text" : "json";
  }

  get streamsTokens() {
    return byId("tokens-while-streaming").checked;
  }

  /** Whether verification is exact, so that drafts do not change the text. */
  get exact() {
    return (this.info?.verification ?? "exact") === "exact";
  }

  /** Fill in the settings of the last visit; the methods are not known yet. */
  #restore() {
    for (const id of REMEMBERED) {
      const value = this.remembered[id];
      if (byId(id).type === "checkbox") byId(id).checked = value === true;
      else if (id !== "method" && typeof value === "string") byId(id).value = value;
    }
  }

  #remember() {
    const values = REMEMBERED.map((id) => [id, byId(id).type === "checkbox" ? byId(id).checked : byId(id).value]);
    keep(local, STORED, JSON.stringify(Object.fromEntries(values)));
  }

  #responseFormat() {
    const format = byId("format").value;
    if (format === "text") return undefined;
    if (format === "json") return { type: "json_object" };
    return { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(byId("schema").value) } };
  }

  /** Open the settings: a field in a closed panel cannot show its message. */
  #reveal() {
    byId("settings").open = true;
    this.panels.show("side");
  }

  /** List the settings above the prompt that would surprise with the next message, each with a way to empty it. */
  #showActive() {
    const format = byId("format").value;
    for (const part of document.querySelectorAll(".schema")) part.hidden = format !== "schema";
    byId("schema").setCustomValidity(format === "schema" ? schemaTrouble(byId("schema").value) : "");
    const chips = [];
    if (this.prediction) chips.push([`Prediction, ${this.prediction.length} characters`, "prediction"]);
    if (format !== "text") chips.push([byId("format").selectedOptions[0].textContent, "format"]);
    const buttons = chips.map(([name, field]) => {
      const button = make("button", { type: "button", class: "chip-button", "aria-label": `Remove: ${name}` }, `${name} ✕`);
      button.addEventListener("click", () => {
        byId(field).value = OPTIONAL[field];
        this.#showActive();
        byId("prompt").focus();
      });
      return button;
    });
    byId("active").replaceChildren(...buttons);
  }

  #showTemperature() {
    const value = Number(byId("temperature").value);
    byId("temperature-value").textContent = value === 0 ? "0, greedy" : value.toFixed(2);
  }

  #showMethod() {
    const method = this.info?.methods.find((one) => one.name === byId("method").value);
    byId("width").disabled = !method;
    byId("width").max = method?.width ?? 64;
    byId("width").placeholder = method ? `≤ ${method.width}` : "–";
    this.onMethod?.();
  }
}

/** The settings that the browser stores; none if they are damaged. */
function remembered() {
  try {
    return JSON.parse(recall(local, STORED)) ?? {};
  } catch {
    return {};
  }
}

/** What is wrong with a JSON schema; empty: nothing. */
function schemaTrouble(text) {
  try {
    const schema = JSON.parse(text);
    return schema && typeof schema === "object" && !Array.isArray(schema) ? "" : "A JSON schema is an object in braces.";
  } catch (error) {
    return `The schema is not JSON: ${error.message}.`;
  }
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  keep(local, "theme", root.dataset.theme);
}
