// The messages of a conversation on the page: the user's, which can be edited, and the model's.

import { AnswerView } from "./answer.js";
import { make } from "./draw.js";
import { copyButton, iconButton } from "./icons.js";
import { render } from "./markdown.js";

/** A message of the user. `onEdit(text)` is called with a changed text. */
export class UserTurn {
  constructor(text, onEdit) {
    this.text = text;
    this.onEdit = onEdit;
    this.element = make("article", { class: "turn user" });
    this.#show();
  }

  dispose() {
    this.element.remove();
  }

  /** Replace the text by a field. */
  edit() {
    const area = make("textarea", { "aria-label": "Edit the message", rows: "3" }, this.text);
    const send = make("button", { type: "submit", class: "strong" }, "Send");
    const cancel = make("button", { type: "button" }, "Cancel");
    const form = make("form", { class: "edit" }, area, make("div", { class: "row" }, send, cancel));
    const close = () => this.#show().focus();
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim()) this.onEdit(area.value.trim());
    });
    cancel.addEventListener("click", close);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
    });
    this.element.replaceChildren(this.#title(), form);
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  #title() {
    return make("h2", { class: "hidden" }, "You");
  }

  /** Show the text; returns the button that edits it. */
  #show() {
    const said = make("div", { class: "said" });
    // Code in a message is shown as code; other text as it was typed.
    if (this.text.includes("```")) {
      said.classList.add("markdown");
      said.append(render(this.text));
    } else {
      said.append(make("p", { class: "typed" }, this.text));
    }
    const change = iconButton("edit", "Edit this message", () => this.edit());
    const tools = make("div", { class: "tools" }, copyButton("Copy this message", () => this.text), change);
    this.element.replaceChildren(this.#title(), said, tools);
    return change;
  }
}

/** An answer. `onAgain()` is called to generate it again. */
export class ModelTurn {
  constructor(answer, mode, tip, onStep, onAgain) {
    this.answer = answer;
    const place = make("div", { class: "answer" });
    this.note = make("p", { class: "note quiet" });
    const again = iconButton("again", "Generate this answer again", onAgain);
    const tools = make("div", { class: "tools" }, copyButton("Copy this answer", () => answer.content), again);
    const foot = make("div", { class: "foot" }, this.note, tools);
    this.element = make("article", { class: "turn model" }, make("h2", { class: "hidden" }, "Model"), place, foot);
    this.view = new AnswerView(place, answer, (step) => onStep(step, answer), tip, mode);
  }

  dispose() {
    this.view.dispose();
    this.element.remove();
  }
}
