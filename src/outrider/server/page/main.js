// The page: a conversation, a race, and the figures of the last run.

import { AnswerView, Tip, describe } from "./answer.js";
import { drawPositions, drawSpark, make, percent } from "./draw.js";
import { EXAMPLE, Race } from "./race.js";
import { Settings } from "./settings.js";
import { chat, complete, fetchInfo, Trouble } from "./stream.js";
import { Answer } from "./trace.js";

const byId = (id) => document.getElementById(id);
const settings = new Settings();
const tip = new Tip(byId("tip"));
const race = new Race(time, showStep, tip);
let history = []; // messages as the API wants them
let running = null; // the AbortController of the current run
let racing = false; // which of the two views is open

// ---- runs ----

/** Stream one answer; `onFrame` is called at most once a frame while it grows, and once at the end. */
async function run(request, answer, onFrame) {
  let waiting = 0;
  const paint = (live = true) => {
    waiting = 0;
    onFrame();
    showFigures(answer, live);
  };
  answer.started = performance.now();
  try {
    for await (const chunk of chat(request, settings.key, running.signal)) {
      answer.add(chunk, performance.now());
      waiting ||= requestAnimationFrame(() => paint());
    }
  } finally {
    cancelAnimationFrame(waiting);
    answer.finish();
    paint(false);
  }
}

/**
 * Fetch one answer as a whole. Receiving and drawing every token would take processor time from an engine on the same
 * machine, from plain decoding most, so the page is idle until the end and then reads the engine's own clock.
 */
async function time(request, answer) {
  answer.load(await complete(request, settings.key, running.signal));
  showFigures(answer);
}

/** Run one request from Send to its end or failure. */
async function engage(work) {
  running = new AbortController();
  byId("error").hidden = true;
  byId("send").hidden = true;
  byId("stop").hidden = false;
  byId("log").setAttribute("aria-busy", "true");
  try {
    await work();
  } catch (error) {
    if (error.name === "AbortError") return "stopped";
    showTrouble(error instanceof Trouble ? error : new Trouble(`The page failed: ${error.message}.`));
    return "failed";
  } finally {
    running = null;
    byId("send").hidden = false;
    byId("stop").hidden = true;
    byId("log").setAttribute("aria-busy", "false");
  }
  return "done";
}

function showTrouble(trouble) {
  byId("error").textContent = trouble.message;
  byId("error").hidden = false;
  byId("status").textContent = "";
  if (trouble.status === 401) settings.askForKey();
}

// ---- chat ----

async function say(text) {
  byId("empty")?.remove();
  const question = make("article", { class: "turn user" }, make("h2", { class: "hidden" }, "You"), make("p", {}, text));
  const place = make("div", { class: "answer" });
  const note = make("p", { class: "note quiet" });
  const reply = make("article", { class: "turn model" }, make("h2", { class: "hidden" }, "Model"), place, note);
  byId("log").append(question, reply);
  const answer = new Answer();
  const view = new AnswerView(place, answer, (step) => showStep(step, answer), tip);
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const messages = [...system, ...history, { role: "user", content: text }];
  const width = settings.method && settings.width ? { speculate_width: settings.width } : {};
  byId("status").textContent = "Answering …";
  scrollDown(true);
  const end = await engage(() =>
    run({ ...settings.request(), messages, speculate: settings.method, ...width }, answer, () => {
      view.draw();
      scrollDown();
    }),
  );
  if (answer.text) {
    history.push({ role: "user", content: text }, { role: "assistant", content: answer.text });
    note.textContent = summary(answer) + (end === "done" ? "" : ` · ${end}`);
  } else if (end !== "done") {
    question.remove();
    reply.remove();
    byId("prompt").value ||= text;
  } else {
    note.textContent = "The model returned no text.";
  }
  if (end !== "failed") byId("status").textContent = end === "stopped" ? "Stopped." : "";
  scrollDown();
}

function summary(answer) {
  const count = `${answer.tokens} tokens in ${answer.steps.length} steps`;
  const kept = answer.drafted ? ` · ${percent(answer.kept / answer.drafted)} of ${answer.drafted} drafted kept` : "";
  return `${count}${kept} · ${answer.rate.toFixed(1)} tokens/s`;
}

/** Follow the text, unless the reader went back up. */
function scrollDown(always = false) {
  const page = document.scrollingElement;
  const left = page.scrollHeight - page.scrollTop - page.clientHeight;
  if (always || left < 160) page.scrollTop = page.scrollHeight;
}

// ---- race ----

async function compete(text) {
  const request = settings.request();
  // Both runs need the same seed to give the same text.
  if (request.temperature > 0) request.seed ??= Math.floor(Math.random() * 1e6);
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const messages = [...system, { role: "user", content: text }];
  byId("status").textContent = "";
  const asked = { ...request, messages, width: settings.width };
  const end = await engage(() => race.start(asked, settings.racer, settings.exact));
  scrollDown(true);
  if (end !== "done") race.stopped(end === "stopped" ? "Stopped before the end." : "");
}

// ---- figures ----

/** Show the current speed while it runs (`live`), then the mean speed. */
function showFigures(answer, live = false) {
  const rates = answer.rates;
  byId("rate").textContent = rates.length ? (live ? rates[rates.length - 1].rate : answer.rate).toFixed(1) : "–";
  drawSpark(byId("spark"), rates, answer.rate);
  byId("per-step").textContent = answer.steps.length ? (answer.tokens / answer.steps.length).toFixed(2) : "–";
  const share = percent(answer.kept / answer.drafted);
  byId("kept-share").textContent = answer.drafted ? `${share} of ${answer.drafted}` : "–";
  const first = answer.arrivals[0];
  const delay = first && answer.started !== null ? `${Math.round(first.time - answer.started)} ms` : "–";
  byId("first-token").textContent = delay;
  if (answer.positions.length) drawPositions(byId("positions"), answer.positions);
  else byId("positions").replaceChildren(make("p", { class: "quiet" }, "Nothing was drafted yet."));
}

function showStep(step, answer) {
  if (answer && !running) showFigures(answer);
  byId("step").replaceChildren(...describe(step));
}

// ---- input ----

function submit() {
  const text = byId("prompt").value.trim();
  if (!text || running || !settings.valid()) return;
  byId("prompt").value = racing ? text : "";
  if (racing) compete(text);
  else say(text);
}

function show(view) {
  racing = view === "race";
  byId("chat").hidden = racing;
  byId("race").hidden = !racing;
  byId("show-chat").setAttribute("aria-pressed", String(!racing));
  byId("show-race").setAttribute("aria-pressed", String(racing));
  byId("send").textContent = racing ? "Race" : "Send";
  const prompt = byId("prompt");
  prompt.rows = racing ? 6 : 2;
  if (racing) prompt.value ||= EXAMPLE;
  else if (prompt.value === EXAMPLE) prompt.value = "";
  prompt.focus();
  if (prompt.value === EXAMPLE) prompt.select(); // typing replaces it
  prompt.scrollTop = 0;
}

function clear() {
  running?.abort();
  history = [];
  byId("log").replaceChildren(make("p", { id: "empty", class: "quiet" }, "A new conversation."));
  byId("prompt").focus();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
byId("controls").addEventListener("submit", (event) => event.preventDefault());
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  tip.hide();
  running?.abort();
});
document.addEventListener("pointerdown", (event) => event.target.closest(".answer") || tip.hide());
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", clear);
byId("show-chat").addEventListener("click", () => show("chat"));
byId("show-race").addEventListener("click", () => show("race"));
byId("key").addEventListener("change", learn);

async function learn() {
  try {
    settings.learn(await fetchInfo(settings.key));
    byId("error").hidden = true;
  } catch (error) {
    showTrouble(error instanceof Trouble ? error : new Trouble(`The page failed: ${error.message}.`));
  }
}

learn();
if (!matchMedia("(pointer: coarse)").matches) byId("prompt").focus();
