// The open conversation: its messages on the page and in the storage, and new answers.

import * as conversations from "./conversations.js";
import { showFigures, showLegend, showStep, summary } from "./figures.js";
import { Answer } from "./trace.js";
import { ModelTurn, UserTurn } from "./turn.js";

const byId = (id) => document.getElementById(id);
const NEAR = 160; // pixels from the end within which the page follows a growing answer

export class Chat {
  /** `onSave()` is called when the conversation was stored. */
  constructor(settings, runs, tip, onSave) {
    this.settings = settings;
    this.runs = runs;
    this.tip = tip;
    this.onSave = onSave;
    this.mode = "rendered"; // of finished answers
    this.turns = []; // one for each message
    this.follows = true; // a growing answer, unless the reader has gone back up
    const area = byId("scroll");
    area.addEventListener("scroll", () => {
      this.follows = area.scrollHeight - area.scrollTop - area.clientHeight < NEAR;
    });
    this.open(conversations.create());
  }

  /** Show another conversation. A running answer must have ended. */
  open(conversation) {
    this.#cut(0);
    this.conversation = conversation;
    for (const message of conversation.messages) this.#add(message);
    byId("empty").hidden = this.turns.length > 0;
    this.#scrollDown(true);
  }

  /** Send a new message. */
  async say(text) {
    const done = await this.#send(text, this.turns.length);
    if (!done) byId("prompt").value ||= text;
  }

  /** Show answers as "rendered" or "tokens". */
  show(mode) {
    this.mode = mode;
    for (const turn of this.turns) turn.view?.show(mode);
  }

  /** Open the last message of the user for editing. Returns whether there is one. */
  editLast() {
    const turn = this.turns.findLast((one) => one instanceof UserTurn);
    turn?.edit();
    return Boolean(turn);
  }

  /** Replace all from message `index` on by `text` (null: nothing) and a new answer; undo that if there is none. */
  async #send(text, index) {
    if (this.runs.current || !this.settings.valid()) return false;
    const replaced = this.conversation.messages.slice(index);
    this.#cut(index);
    if (text !== null) this.#push({ role: "user", content: text });
    const done = await this.#answer();
    if (!done) {
      this.#cut(index);
      for (const message of replaced) this.#push(message);
    }
    byId("empty").hidden = this.turns.length > 0;
    if (done) this.#save();
    return done;
  }

  /** Generate the answer to the messages. Returns false if there is no text. */
  async #answer() {
    const { settings, conversation } = this;
    byId("empty").hidden = true;
    const request = settings.request();
    const answer = new Answer({ format: settings.format, drafters: settings.drafters });
    const turn = this.#turn(answer, settings.streamsTokens ? "tokens" : this.mode);
    showLegend(answer.drafters);
    const messages = conversation.messages.map(({ role, content }) => ({ role, content }));
    byId("status").textContent = "Answering …";
    this.#scrollDown(true);
    const end = await this.runs.engage(() =>
      this.runs.stream({ ...request, messages: [...settings.opening(), ...messages] }, answer, (live) => {
        turn.view.draw(live);
        this.#scrollDown();
      }),
    );
    if (end !== "failed") byId("status").textContent = end === "stopped" ? "Stopped." : "";
    if (!answer.text && end !== "done") {
      turn.dispose();
      return false;
    }
    const note = answer.text ? summary(answer) + (end === "done" ? "" : ` · ${end}`) : "The model returned no text.";
    turn.note.textContent = note;
    if (turn.view.mode !== this.mode) turn.view.show(this.mode);
    const { content, reasoning, format, drafters, raw: steps, metrics } = answer;
    conversation.messages.push({ role: "assistant", content, reasoning, note, format, drafters, metrics, steps });
    this.turns.push(turn);
    this.#scrollDown();
    return true;
  }

  #push(message) {
    this.conversation.messages.push(message);
    this.#add(message);
  }

  /** Show a stored message. */
  #add({ role, content, reasoning, note = "", format, drafters, metrics, steps = [] }) {
    const index = this.turns.length;
    if (role === "user") {
      const turn = new UserTurn(content, (text) => this.#send(text, index));
      byId("log").append(turn.element);
      this.turns.push(turn);
      return;
    }
    const answer = new Answer({ format, drafters });
    const message = { content, reasoning_content: reasoning };
    answer.load({ choices: [{ message, speculation: { steps } }], metrics: { speculative_decoding: metrics } });
    const turn = this.#turn(answer, this.mode);
    turn.note.textContent = note;
    this.turns.push(turn);
  }

  /** Add an answer at the end of the page. */
  #turn(answer, mode) {
    const index = this.turns.length;
    const onStep = (step) => {
      if (!this.runs.current) showFigures(answer);
      showLegend(answer.drafters);
      showStep(step);
    };
    const turn = new ModelTurn(answer, mode, this.tip, onStep, () => this.#send(null, index));
    byId("log").append(turn.element);
    return turn;
  }

  /** Remove all messages from `index` on. */
  #cut(index) {
    for (const turn of this.turns.splice(index)) turn.dispose();
    this.conversation?.messages.splice(index);
  }

  #save() {
    const stored = conversations.save(this.conversation);
    if (!stored) byId("status").textContent = "This browser stores no conversations: export this one to keep it.";
    this.onSave();
  }

  /** Follow the text, unless the reader went back up. */
  #scrollDown(always = false) {
    this.follows ||= always;
    if (this.follows && !byId("chat").hidden) byId("scroll").scrollTop = byId("scroll").scrollHeight;
  }
}
