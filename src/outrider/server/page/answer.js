// An answer on the page, rendered or token by token; its steps are selected by pointer, touch or arrow keys.

import { RenderedFace } from "./rendered.js";
import { TokensFace } from "./tokens.js";

/** Shows `answer` inside `place`. `onStep(step)` is called with the selected step. */
export class AnswerView {
  constructor(place, answer, onStep, tip, mode = "tokens") {
    this.place = place;
    this.answer = answer;
    this.onStep = onStep;
    this.tip = tip;
    this.chosen = null;
    place.tabIndex = 0;
    place.setAttribute("role", "group");
    place.setAttribute("aria-label", "Answer; the arrow keys select its steps");
    // A touch ends when the finger is lifted, so only taps count.
    place.onpointermove = (event) => event.pointerType === "mouse" && this.#look(event);
    place.onpointerleave = (event) => event.pointerType === "mouse" && this.#leave();
    place.onclick = (event) => this.#pin(event);
    place.onkeydown = (event) => this.#select(event);
    place.onblur = () => this.tip.hide();
    this.show(mode);
  }

  /** Switch to "rendered" or "tokens". */
  show(mode) {
    this.dispose();
    this.mode = mode;
    this.place.classList.toggle("tokens", mode === "tokens");
    this.place.classList.toggle("markdown", mode !== "tokens");
    this.place.replaceChildren();
    this.face = mode === "tokens" ? new TokensFace(this.place, this.answer) : new RenderedFace(this.place, this.answer);
    this.draw();
  }

  /** Draw what is new. `live`: more will come soon. */
  draw(live = false) {
    this.face.draw(live);
  }

  /** Show the first `count` steps only, for a replay. Tokens only. */
  reveal(count) {
    this.face.reveal(count);
  }

  /** Scroll to the end, if the answer has its own scroll area. */
  follow() {
    this.place.scrollTop = this.place.scrollHeight;
  }

  /** Release what the page holds for this answer. */
  dispose() {
    this.face?.dispose();
  }

  #look(event) {
    const number = this.face.stepAt(event);
    if (number === this.pointed) return;
    this.pointed = number;
    if (number === null) this.tip.hide();
    else this.tip.show(this.face.boxes(number), this.answer.steps[number]);
    this.face.mark(number ?? this.chosen);
  }

  #leave() {
    this.pointed = null;
    this.tip.hide();
    this.face.mark(this.chosen);
  }

  #pin(event) {
    const number = this.face.stepAt(event);
    if (number === null) return;
    this.choose(number);
    this.tip.show(this.face.boxes(number), this.answer.steps[number]);
  }

  #select(event) {
    const last = this.answer.steps.length - 1;
    const at = this.chosen;
    const moves = { ArrowRight: (at ?? -1) + 1, ArrowLeft: (at ?? last + 1) - 1, Home: 0, End: last };
    if (event.target !== this.place || !(event.key in moves) || last < 0) return;
    event.preventDefault();
    const next = Math.min(Math.max(moves[event.key], 0), last);
    this.choose(next);
    this.face.scrollTo(next);
    this.tip.show(this.face.boxes(next), this.answer.steps[next]);
  }

  choose(number) {
    this.chosen = number;
    this.face.mark(number);
    this.onStep(this.answer.steps[number]);
  }
}
