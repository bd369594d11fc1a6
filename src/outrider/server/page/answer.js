// An answer on the page: its tokens by origin, and the draft of each step, by pointer, touch or arrow keys.

import { drawTree, make, visible } from "./draw.js";
import { rejected, summary } from "./trace.js";

const KINDS = { kept: "drafted and accepted", corrected: "corrected", bonus: "bonus", plain: "plain" };

/** Shows `answer` inside `place`. `onStep(step)` is called with the selected step, or null. */
export class AnswerView {
  constructor(place, answer, onStep, tip) {
    this.place = place;
    this.answer = answer;
    this.onStep = onStep;
    this.tip = tip;
    this.groups = []; // an element for each step
    this.seen = 0; // steps that are drawn and complete
    this.chosen = null;
    place.replaceChildren();
    place.tabIndex = 0;
    place.setAttribute("role", "group");
    place.setAttribute("aria-label", "Answer; the arrow keys select its steps");
    // A touch ends when the finger is lifted, so only taps count.
    place.onpointerover = (event) => event.pointerType === "mouse" && this.#look(event.target);
    place.onpointerleave = (event) => event.pointerType === "mouse" && this.#leave();
    place.onclick = (event) => this.#pin(event.target);
    place.onkeydown = (event) => this.#walk(event);
    place.onblur = () => this.tip.hide();
  }

  /** Draw what is new since the last call. `until`: steps to show; default: all. */
  draw(until = this.answer.steps.length) {
    const steps = this.answer.steps;
    if (!steps.length) {
      this.place.textContent = this.answer.text;
      return;
    }
    for (let number = this.seen; number < until; number += 1) {
      const group = this.groups[number] ?? this.#open(number);
      group.replaceChildren(...steps[number].tokens.map(drawToken));
      // A token that has no text yet may get some with the next step.
      if (number === this.seen && steps[number].end <= this.answer.settled) this.seen = number + 1;
    }
  }

  /** Show the first `count` steps only, for a replay. */
  reveal(count) {
    this.groups.forEach((group, number) => {
      group.hidden = number >= count;
    });
  }

  /** Scroll to the end, if the answer has its own scroll area. */
  follow() {
    this.place.scrollTop = this.place.scrollHeight;
  }

  #open(number) {
    const group = make("span", { class: "step", "data-step": number });
    if (this.answer.steps[number].drafted.length) group.classList.add("drafted");
    this.groups[number] = group;
    this.place.append(group);
    return group;
  }

  #groupOf(target) {
    return target instanceof Element ? target.closest(".step") : null;
  }

  #look(target) {
    const group = this.#groupOf(target);
    if (!group) return;
    const step = this.answer.steps[Number(group.dataset.step)];
    this.tip.show(group, step);
    this.#mark(step.number);
  }

  #leave() {
    this.tip.hide();
    this.#mark(this.chosen);
  }

  #pin(target) {
    const group = this.#groupOf(target);
    if (!group) return;
    this.choose(Number(group.dataset.step));
    this.tip.show(group, this.answer.steps[this.chosen]);
  }

  #walk(event) {
    const last = this.groups.length - 1;
    const at = this.chosen;
    const moves = { ArrowRight: (at ?? -1) + 1, ArrowLeft: (at ?? last + 1) - 1, Home: 0, End: last };
    if (!(event.key in moves) || last < 0) return;
    event.preventDefault();
    const next = Math.min(Math.max(moves[event.key], 0), last);
    this.choose(next);
    this.groups[next].scrollIntoView({ block: "nearest" });
    this.tip.show(this.groups[next], this.answer.steps[next]);
  }

  choose(number) {
    this.chosen = number;
    this.#mark(number);
    this.onStep(number === null ? null : this.answer.steps[number]);
  }

  #mark(number) {
    for (const marked of this.place.querySelectorAll(".looked-at")) marked.classList.remove("looked-at");
    if (number !== null) this.groups[number]?.classList.add("looked-at");
  }
}

function drawToken(token) {
  return make("span", { class: `token ${token.kind}` }, token.shown);
}

/** Describe one step: the draft, the accepted and rejected tokens, and the tree if it is one. */
export function describe(step) {
  const parts = [make("p", { class: "summary" }, `Step ${step.number + 1}. ${summary(step)}`)];
  const list = make("dl", { class: "fates" });
  const row = (name, ...words) => list.append(make("div", {}, make("dt", {}, name), make("dd", {}, ...words)));
  const kept = step.tokens.filter((token) => token.kind === "kept");
  const own = step.tokens.filter((token) => token.kind !== "kept");
  if (kept.length) row("accepted", ...kept.map((token) => chip(token.label, "kept")));
  const gone = rejected(step);
  const branches = gone.map((words) => make("span", { class: "branch" }, ...words.map(struck)));
  if (gone.length) row("rejected", ...branches);
  if (own.length) row(KINDS[step.own], ...own.map((token) => chip(token.label, step.own)));
  parts.push(list);
  if (step.tree) parts.push(drawTree(step));
  return parts;
}

function chip(words, kind) {
  return make("span", { class: `token chip ${kind}` }, visible(words));
}

function struck(words) {
  return make("s", { class: "chip thrown" }, visible(words));
}

/** The tip beside the pointer. The panel shows the same, for keyboard and touch. */
export class Tip {
  constructor(element) {
    this.element = element;
  }

  show(beside, step) {
    this.element.replaceChildren(...describe(step));
    this.element.hidden = false;
    this.element.style.left = this.element.style.top = "0"; // near the edge its width would be measured too small
    const lines = beside.getClientRects();
    const line = lines[lines.length - 1] ?? beside.getBoundingClientRect();
    const { width, height } = this.element.getBoundingClientRect();
    const left = Math.min(Math.max(line.left, 8), document.documentElement.clientWidth - width - 8);
    const below = line.bottom + 8;
    const top = below + height < window.innerHeight ? below : lines[0].top - height - 8;
    this.element.style.left = `${Math.max(left, 8)}px`;
    this.element.style.top = `${Math.max(top, 8)}px`;
  }

  hide() {
    this.element.hidden = true;
  }
}
