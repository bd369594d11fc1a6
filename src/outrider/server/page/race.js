// The race: the same prompt plain and with drafts, one after the other, then both replayed together.

import { AnswerView } from "./answer.js";
import { make, shape } from "./draw.js";
import { showReason } from "./figures.js";
import { Answer } from "./trace.js";

const byId = (id) => document.getElementById(id);
const LEARNER = "suffix"; // the drafter that learns from all answers of the server
const TICK = 500; // milliseconds between two updates of a running clock: seldom, so that the page stays idle

export class Race {
  /** `onStep(step, answer)` is called with a selected step. */
  constructor(settings, runs, tip, onStep) {
    this.settings = settings;
    this.runs = runs;
    this.tip = tip;
    this.onStep = onStep;
    this.lanes = [];
    this.frame = 0;
    byId("replay").addEventListener("click", () => this.replay());
  }

  /** Answer a prompt plainly and with drafts. */
  async start(text) {
    const { settings } = this;
    const request = { ...settings.request(), messages: [...settings.opening(), { role: "user", content: text }] };
    // Both runs need the same seed to give the same text.
    if (request.temperature > 0) request.seed ??= Math.floor(Math.random() * 1e6);
    byId("status").textContent = "";
    byId("scroll").scrollTop = 0;
    const end = await this.runs.engage(() => this.#run(request));
    if (end !== "done") this.#say(end === "stopped" ? "Stopped before the end." : "", "stopped");
  }

  async #run(request) {
    const { prediction, speculate, speculate_width, always_draft, ...plainly } = request;
    const method = this.settings.racer;
    const drafting = { speculate_width, always_draft, ...(prediction ? { prediction } : { speculate: speculate || method }) };
    cancelAnimationFrame(this.frame);
    for (const name of ["race-intro", "ratio", "replay", "race-reason"]) byId(name).hidden = true;
    byId("axis").replaceChildren();
    byId("lane-drafted").textContent = `Drafts by ${method}`;
    this.lanes = [this.#lane("plain", "Plain"), this.#lane("drafted", method)];
    const [plain, drafted] = this.lanes;
    this.#say("Running plain decoding …");
    await this.#drive(plain, { ...plainly, speculate: false });
    this.#say(`Running with drafts by ${method} …`);
    await this.#drive(drafted, { ...plainly, ...drafting });
    byId("ratio").textContent = `${(drafted.answer.rate / plain.answer.rate).toFixed(2)}×`;
    byId("ratio").hidden = drafted.answer.drafted === 0;
    byId("replay").hidden = false;
    this.replay();
    const learned = method.split("+").includes(LEARNER) ? ` ${LEARNER} had seen this answer in the plain run.` : "";
    this.#say(verdict(plain.answer, drafted.answer, this.settings.exact, request.seed) + learned, "done");
    showReason(byId("race-reason"), drafted.answer);
  }

  #say(sentence, state = "running") {
    byId("verdict").textContent = sentence;
    byId("verdict").dataset.state = state;
  }

  #lane(name, title) {
    const answer = new Answer({ drafters: this.settings.drafters });
    const clock = byId(`clock-${name}`);
    clock.textContent = "–";
    const onStep = (step) => this.onStep(step, answer);
    return { name, title, answer, clock, view: new AnswerView(byId(`text-${name}`), answer, onStep, this.tip) };
  }

  async #drive(lane, request) {
    const started = performance.now();
    const passed = () => `${((performance.now() - started) / 1000).toFixed(1)} s …`;
    const timer = setInterval(() => (lane.clock.textContent = passed()), TICK);
    try {
      await this.runs.time(request, lane.answer);
    } finally {
      clearInterval(timer);
    }
    lane.view.draw();
    this.#clock(lane, lane.answer.span, lane.answer.tokens);
  }

  #clock(lane, span, tokens) {
    lane.clock.textContent = `${(span / 1000).toFixed(2)} s · ${tokens} tokens`;
  }

  /** Replay both from the first token at their original speed. */
  replay() {
    cancelAnimationFrame(this.frame);
    const longest = Math.max(...this.lanes.map((lane) => lane.answer.span));
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
      this.#at(longest);
      return;
    }
    const started = performance.now();
    const turn = () => {
      const passed = Math.min(performance.now() - started, longest);
      this.#at(passed);
      if (passed < longest) this.frame = requestAnimationFrame(turn);
    };
    turn();
  }

  #at(passed) {
    for (const lane of this.lanes) {
      const { answer } = lane;
      const time = Math.min(passed, answer.span);
      const reached = answer.reached(time);
      lane.view.reveal(reached.steps);
      lane.view.follow();
      this.#clock(lane, time, reached.tokens);
      lane.clock.classList.toggle("finished", passed >= answer.span);
    }
    byId("axis").replaceChildren(drawAxis(this.lanes, passed));
  }
}

/** Describe the result: the speed-up, and whether the texts are equal. */
function verdict(plain, drafted, exact, seed) {
  const share = drafted.rate / plain.rate;
  const speeds = `${drafted.rate.toFixed(0)} tokens/s with drafts, ${plain.rate.toFixed(0)} without`;
  const times = drafted.drafted
    ? `${share.toFixed(2)} times as fast: ${speeds}`
    : `Nothing was drafted, so the difference is that of two equal runs: ${speeds}`;
  const seedNote = seed === undefined ? "" : ` (seed ${seed})`;
  if (plain.text === drafted.text) return `✓ The same text, character by character${seedNote}. ${times}.`;
  const first = [...plain.text].findIndex((letter, index) => letter !== [...drafted.text][index]);
  const index = first < 0 ? Math.min([...plain.text].length, [...drafted.text].length) : first;
  const reason = exact ? "" : " This server verifies by rejection sampling, which preserves the distribution but not the text.";
  return `✗ The texts differ from character ${index + 1} on${seedNote}.${reason} ${times}.`;
}

/** Tokens over time, one line per lane, and the progress of the replay. */
function drawAxis(lanes, passed) {
  const [width, height, left, bottom] = [byId("axis").clientWidth || 600, 150, 34, 22];
  const longest = Math.max(...lanes.map((lane) => lane.answer.span), 1);
  const most = Math.max(...lanes.map((lane) => lane.answer.tokens), 1);
  const across = (time) => left + ((width - left - 8) * time) / longest;
  const down = (tokens) => height - bottom - ((height - bottom - 10) * tokens) / most;
  const parts = [
    shape("line", { x1: left, x2: width - 8, y1: down(0), y2: down(0), class: "rule" }),
    shape("text", { x: left - 6, y: down(most) + 4, "text-anchor": "end" }, `${most}`),
    shape("text", { x: left - 6, y: down(0) + 4, "text-anchor": "end" }, "0"),
    shape("text", { x: left, y: height - 5 }, "0 s"),
    shape("text", { x: width - 8, y: height - 5, "text-anchor": "end" }, `${(longest / 1000).toFixed(2)} s`),
  ];
  for (const lane of lanes) {
    let sum = 0;
    const first = lane.answer.arrivals[0]?.time ?? 0;
    const points = [`${left},${down(0)}`];
    for (const { time, tokens } of lane.answer.arrivals) {
      sum += tokens;
      points.push(`${across(time - first).toFixed(1)},${down(sum).toFixed(1)}`);
    }
    parts.push(shape("polyline", { points: points.join(" "), class: `course ${lane.name}` }));
  }
  parts.push(shape("line", { x1: across(passed), x2: across(passed), y1: 6, y2: down(0), class: "now" }));
  const seconds = (lane) => (lane.answer.span / 1000).toFixed(2);
  const label = lanes.map((lane) => `${lane.title}: ${lane.answer.tokens} tokens in ${seconds(lane)} s`).join("; ");
  const box = `0 0 ${width} ${height}`;
  const picture = shape("svg", { viewBox: box, class: "axis", role: "img", "aria-label": label }, ...parts);
  const key = lanes.map((lane) => make("span", { class: `line-key ${lane.name}` }, lane.title));
  return make("figure", {}, picture, make("figcaption", { class: "quiet" }, "Tokens over time: ", ...key));
}
