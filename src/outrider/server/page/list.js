// The list of conversations: open, rename, delete with a way back.

import * as conversations from "./conversations.js";
import { make } from "./draw.js";
import { iconButton } from "./icons.js";

const byId = (id) => document.getElementById(id);
const UNDO = 10_000; // milliseconds in which a deleted conversation can be restored

export class ConversationList {
  /** `onOpen(conversation)`: one was selected. `onDelete(id)`: one was deleted. */
  constructor(onOpen, onDelete) {
    this.onOpen = onOpen;
    this.onDelete = onDelete;
    this.current = null; // id of the open conversation
    conversations.watch(() => this.draw());
    this.draw();
  }

  select(id) {
    this.current = id;
    this.draw();
  }

  draw() {
    const found = conversations.list();
    byId("no-conversations").hidden = found.length > 0;
    byId("conversation-list").replaceChildren(...found.map((one) => this.#row(one)));
  }

  #row(conversation) {
    const { id, title, updated } = conversation;
    const open = make("button", { type: "button", class: "title", title }, make("span", {}, title));
    const day = new Date(updated).toLocaleDateString(undefined, { day: "numeric", month: "short" });
    open.append(make("span", { class: "quiet" }, day));
    open.addEventListener("click", () => {
      const stored = conversations.find(id);
      if (stored) this.onOpen(stored);
    });
    const row = make("li", {}, open);
    if (id === this.current) open.setAttribute("aria-current", "true");
    row.append(
      iconButton("edit", `Rename “${title}”`, () => this.#rename(row, conversation)),
      iconButton("remove", `Delete “${title}”`, () => this.#remove(id)),
    );
    return row;
  }

  #rename(row, conversation) {
    const input = make("input", { type: "text", "aria-label": "Title", maxlength: "120", value: conversation.title });
    let open = true;
    const end = (accepted) => {
      if (!open) return;
      open = false;
      const stored = conversations.find(conversation.id);
      const title = input.value.trim();
      if (accepted && title && stored) {
        stored.title = title;
        conversations.save(stored, { touch: false });
      }
      this.draw();
      this.onRename?.(conversation.id, title);
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(true);
      if (event.key !== "Escape") return;
      event.stopPropagation();
      end(false);
    });
    input.addEventListener("blur", () => end(true));
    row.replaceChildren(input);
    input.focus();
    input.select();
  }

  #remove(id) {
    const stored = conversations.find(id);
    conversations.remove(id);
    this.onDelete(id);
    this.draw();
    const undo = make("button", { type: "button" }, "Undo");
    undo.addEventListener("click", () => {
      if (stored) conversations.save(stored, { touch: false });
      byId("deleted").replaceChildren();
      this.draw();
    });
    byId("deleted").replaceChildren(make("span", {}, "Deleted."), undo);
    undo.focus();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => byId("deleted").replaceChildren(), UNDO);
  }
}
