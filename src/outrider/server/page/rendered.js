// An answer as rendered Markdown. Highlights color its tokens without elements of their own, where the browser has them.

import { make } from "./draw.js";
import { locate } from "./locate.js";
import { render } from "./markdown.js";

const PAINTS = ["kept", "by-1", "by-2", "by-several", "corrected", "bonus"];
const PAUSE = 100; // milliseconds between two drawings of a growing answer; and at least
const SHARE = 8; // times as long as a drawing takes: the engine may need the same processor

export const canColor = typeof Highlight === "function" && Boolean(CSS.highlights);
const palette = new Map(canColor ? PAINTS.map((name) => [name, new Highlight()]) : []);
const pointer = canColor ? new Highlight() : null;
if (canColor) CSS.highlights.set("looked-at", pointer);

/** Switch the colors of all rendered answers on or off. */
export function colorRendered(on) {
  for (const [name, highlight] of palette) {
    if (on) CSS.highlights.set(name, highlight);
    else CSS.highlights.delete(name);
  }
}

export class RenderedFace {
  constructor(place, answer) {
    this.place = place;
    this.answer = answer;
    this.pieces = []; // text nodes and where they stand in the text of the answer
    this.starts = []; // of each step in the text of the answer, and its end
    this.ranges = []; // [highlight, range] pairs
    this.next = 0; // time before which a growing answer is not drawn again
  }

  draw(live = false) {
    const began = performance.now();
    if (live && began < this.next) return;
    this.dispose();
    const { content, format } = this.answer;
    const source = format === "text" ? content : `\`\`\`json\n${content}\n\`\`\``;
    this.place.replaceChildren(...this.#reasoning(), render(source));
    if (canColor) this.#color();
    const now = performance.now();
    this.next = now + Math.max(PAUSE, SHARE * (now - began));
  }

  /** The step at a pointer, or null. */
  stepAt({ clientX, clientY }) {
    const caret = caretAt(clientX, clientY);
    const found = this.pieces.find(({ node, at, length }) => node === caret?.node && caret.at >= at && caret.at <= at + length);
    if (!found) return null;
    const position = found.start + caret.at - found.at;
    // The caret stands between two characters: either of them may be the one at the pointer.
    for (const candidate of [position, position - 1]) {
      const number = this.starts.findLastIndex((start) => start <= candidate);
      const within = number >= 0 && number < this.answer.steps.length && this.boxes(number).some(contains(clientX, clientY));
      if (within) return number;
    }
    return null;
  }

  mark(number) {
    pointer?.clear();
    if (number !== null) for (const range of this.#rangesOf(number)) pointer?.add(range);
  }

  boxes(number) {
    return this.#rangesOf(number).flatMap((range) => [...range.getClientRects()]);
  }

  scrollTo(number) {
    this.#rangesOf(number)[0]?.startContainer.parentElement.scrollIntoView({ block: "nearest" });
  }

  dispose() {
    for (const [highlight, range] of this.ranges) highlight.delete(range);
    this.ranges = [];
    pointer?.clear();
  }

  /** The reasoning, folded unless it is all there is or the reader has unfolded it. */
  #reasoning() {
    const { reasoning, content } = this.answer;
    if (!reasoning) return [];
    const old = this.place.querySelector(".reasoning");
    const box = make("details", { class: "reasoning" }, make("summary", {}, "Reasoning"), render(reasoning));
    box.open = !content || Boolean(old?.open && old.dataset.by === "reader");
    box.firstChild.addEventListener("click", () => (box.dataset.by = "reader"));
    if (old?.dataset.by) box.dataset.by = old.dataset.by;
    return [box];
  }

  #color() {
    this.pieces = locate(this.place, this.answer.text);
    this.starts = [0];
    const spans = []; // {paint, start, end}: neighbors of one color are joined
    let end = 0;
    for (const step of this.answer.steps) {
      for (const { paint, shown } of step.tokens) {
        const last = spans[spans.length - 1];
        if (last?.paint === paint) last.end += shown.length;
        else spans.push({ paint, start: end, end: end + shown.length });
        end += shown.length;
      }
      this.starts.push(end);
    }
    let first = 0;
    for (const { paint, start, end: stop } of spans) {
      while (first < this.pieces.length && ends(this.pieces[first]) <= start) first += 1;
      if (!palette.has(paint)) continue;
      for (let index = first; index < this.pieces.length && this.pieces[index].start < stop; index += 1) {
        const range = new StaticRange(cut(this.pieces[index], start, stop));
        palette.get(paint).add(range);
        this.ranges.push([palette.get(paint), range]);
      }
    }
  }

  #rangesOf(number) {
    const [start, stop] = [this.starts[number], this.starts[number + 1]];
    const within = this.pieces.filter((piece) => piece.start < stop && ends(piece) > start);
    return within.map((piece) => {
      const { startContainer, startOffset, endOffset } = cut(piece, start, stop);
      const range = document.createRange();
      range.setStart(startContainer, startOffset);
      range.setEnd(startContainer, endOffset);
      return range;
    });
  }
}

function ends(piece) {
  return piece.start + piece.length;
}

/** The part of a piece between two positions in the text of the answer. */
function cut({ node, at, length, start }, from, to) {
  const startOffset = at + Math.max(from - start, 0);
  const endOffset = at + Math.min(to - start, length);
  return { startContainer: node, startOffset, endContainer: node, endOffset };
}

function caretAt(x, y) {
  if (document.caretPositionFromPoint) {
    const caret = document.caretPositionFromPoint(x, y);
    return caret && { node: caret.offsetNode, at: caret.offset };
  }
  const range = document.caretRangeFromPoint?.(x, y);
  return range && { node: range.startContainer, at: range.startOffset };
}

function contains(x, y) {
  return (box) => x >= box.left && x <= box.right && y >= box.top && y <= box.bottom;
}
