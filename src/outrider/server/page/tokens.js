// An answer token by token: an element for each step, and in it one for each token.

import { make } from "./draw.js";

export class TokensFace {
  constructor(place, answer) {
    this.place = place;
    this.answer = answer;
    this.groups = []; // an element for each step
    this.seen = 0; // steps that are drawn and complete
  }

  draw() {
    const steps = this.answer.steps;
    if (!steps.length) {
      this.place.textContent = this.answer.text;
      return;
    }
    for (let number = this.seen; number < steps.length; number += 1) {
      const group = this.groups[number] ?? this.#open(number);
      const tokens = steps[number].tokens;
      group.replaceChildren(...tokens.map((token) => make("span", { class: `token ${token.paint}` }, token.shown)));
      // A token that has no text yet may get some with the next step.
      if (number === this.seen && steps[number].end <= this.answer.settled) this.seen = number + 1;
    }
  }

  reveal(count) {
    this.groups.forEach((group, number) => {
      group.hidden = number >= count;
    });
  }

  stepAt(event) {
    const group = event.target instanceof Element ? event.target.closest(".step") : null;
    return group ? Number(group.dataset.step) : null;
  }

  mark(number) {
    for (const marked of this.place.querySelectorAll(".looked-at")) marked.classList.remove("looked-at");
    if (number !== null) this.groups[number]?.classList.add("looked-at");
  }

  boxes(number) {
    return [...this.groups[number].getClientRects()];
  }

  scrollTo(number) {
    this.groups[number].scrollIntoView({ block: "nearest" });
  }

  dispose() {
    this.groups = [];
  }

  #open(number) {
    const group = make("span", { class: "step", "data-step": number });
    if (this.answer.steps[number].drafted.length) group.classList.add("drafted");
    this.groups[number] = group;
    this.place.append(group);
    return group;
  }
}
