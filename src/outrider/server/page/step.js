// One step in words and chips, in the panel and beside the pointer.

import { drawTree, make, visible } from "./draw.js";
import { rejected, summary } from "./trace.js";

const KINDS = { kept: "drafted and accepted", corrected: "corrected", bonus: "bonus", plain: "plain" };
const SCROLLED = 200; // milliseconds within which the page reports that it has scrolled to a selected step

/** Describe one step: the draft, the accepted and rejected tokens, and the tree if it is one. */
export function describe(step) {
  const parts = [make("p", { class: "summary" }, `Step ${step.number + 1}. ${summary(step)}`)];
  const list = make("dl", { class: "fates" });
  const row = (name, ...words) => list.append(make("div", {}, make("dt", {}, name), make("dd", {}, ...words)));
  const kept = step.tokens.filter((token) => token.kind === "kept");
  const own = step.tokens.filter((token) => token.kind !== "kept");
  if (kept.length) row("accepted", ...kept.map((token) => chip(token.label, token.paint)));
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

  /** `lines`: the boxes of the step's text, one for each line. */
  show(lines, step) {
    if (!lines.length) return;
    this.element.replaceChildren(...describe(step));
    this.element.hidden = false;
    this.shown = performance.now();
    this.element.style.left = this.element.style.top = "0"; // near the edge its width would be measured too small
    const line = lines[lines.length - 1];
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

  /** Hide, unless the text was scrolled to show this tip. */
  leave() {
    if (performance.now() - this.shown > SCROLLED) this.hide();
  }
}
