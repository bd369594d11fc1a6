// The page: connects the controls with the chat, the race and the list of conversations.

import { Chat } from "./chat.js";
import * as conversations from "./conversations.js";
import { asJson, asMarkdown, download, fileName } from "./export.js";
import { showFigures, showLegend, showStep } from "./figures.js";
import { ConversationList } from "./list.js";
import { Panels } from "./panels.js";
import { drawPresets, EDIT } from "./presets.js";
import { Race } from "./race.js";
import { canColor, colorRendered } from "./rendered.js";
import { Runs } from "./runs.js";
import { Settings } from "./settings.js";
import { Tip } from "./step.js";
import { fetchInfo } from "./stream.js";

const byId = (id) => document.getElementById(id);
const MOST_ROWS = 14; // lines to which the prompt grows with its text
const RACE_ROWS = 3;

const panels = new Panels();
const settings = new Settings(panels);
const tip = new Tip(byId("tip"));
const runs = new Runs(settings);
const chat = new Chat(settings, runs, tip, () => list.select(chat.conversation.id));
const race = new Race(settings, runs, tip, (step, answer) => {
  if (!runs.current) showFigures(answer);
  showStep(step);
});
const list = new ConversationList(open, forget);
let racing = false; // which of the two views is open

// ---- conversations ----

function open(conversation) {
  runs.stop();
  showView("chat");
  // A stopped answer ends, and is stored, before its conversation is closed.
  whenIdle(() => {
    chat.open(conversation);
    list.select(conversation.id);
    byId("status").textContent = "";
    byId("error").hidden = true;
    showInvitation();
    panels.close();
    focusPrompt();
  });
}

function whenIdle(work) {
  if (runs.current) setTimeout(() => whenIdle(work), 20);
  else setTimeout(work);
}

/** Leave a conversation that was deleted. */
function forget(id) {
  if (id !== chat.conversation.id) return;
  chat.open(conversations.create());
  list.current = null;
  showInvitation();
}

function save(ending, type, format) {
  const { conversation } = chat;
  if (!conversation.messages.length) {
    byId("status").textContent = "There is nothing to export yet.";
    return;
  }
  const text = format(conversation, settings.info?.model ?? "unknown");
  download(fileName(conversation.title, ending), type, text);
}

// ---- input ----

function submit() {
  const text = byId("prompt").value.trim();
  if (!text || runs.current || !settings.valid()) return;
  byId("prompt").value = racing ? text : "";
  fit();
  if (racing) race.start(text);
  else chat.say(text).then(showInvitation);
  showInvitation();
}

function showView(view) {
  racing = view === "race";
  byId("main").dataset.view = view;
  byId("chat").hidden = racing;
  byId("race").hidden = !racing;
  byId("view-switch").hidden = racing;
  byId("color-switch").hidden = racing || !canColor || chat.mode === "tokens";
  byId("show-chat").setAttribute("aria-pressed", String(!racing));
  byId("show-race").setAttribute("aria-pressed", String(racing));
  byId("send").textContent = racing ? "Race" : "Send";
  const prompt = byId("prompt");
  if (racing) prompt.value ||= EDIT;
  else if (prompt.value === EDIT) prompt.value = "";
  showInvitation();
  fit();
  focusPrompt();
  if (prompt.value === EDIT) prompt.select(); // typing replaces it
  prompt.scrollTop = 0;
}

/** Offer examples in the race and in an empty conversation. */
function showInvitation() {
  const empty = !chat.conversation.messages.length && !runs.current;
  byId("presets").hidden = !(racing || empty);
}

function showAnswersAs(mode) {
  chat.show(mode);
  byId("view-rendered").setAttribute("aria-pressed", String(mode === "rendered"));
  byId("view-tokens").setAttribute("aria-pressed", String(mode === "tokens"));
  byId("color-switch").hidden = !canColor || mode === "tokens";
}

/** Let the prompt grow with its text. */
function fit() {
  const prompt = byId("prompt");
  prompt.rows = Math.min(Math.max(prompt.value.split("\n").length, 1), racing ? RACE_ROWS : MOST_ROWS);
}

function focusPrompt() {
  if (!matchMedia("(pointer: coarse)").matches) byId("prompt").focus();
}

drawPresets(byId("presets"), ({ prompt, fields }) => {
  settings.fill(fields);
  byId("prompt").value = prompt;
  fit();
  byId("prompt").focus();
  byId("prompt").scrollTop = 0;
});

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
byId("controls").addEventListener("submit", (event) => event.preventDefault());
byId("prompt").addEventListener("input", fit);
byId("prompt").addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "ArrowUp" && !byId("prompt").value && !racing && chat.editLast()) event.preventDefault();
  if (event.key !== "Enter" || event.shiftKey) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  tip.hide();
  if (!panels.close()) runs.stop();
});
document.addEventListener("pointerdown", (event) => event.target.closest(".answer") || tip.hide());
byId("scroll").addEventListener("scroll", () => tip.leave(), { passive: true });
byId("stop").addEventListener("click", () => runs.stop());
byId("new-conversation").addEventListener("click", () => {
  settings.fill({});
  open(conversations.create());
});
byId("export-markdown").addEventListener("click", () => save("md", "text/markdown", asMarkdown));
byId("export-json").addEventListener("click", () => save("json", "application/json", asJson));
byId("show-chat").addEventListener("click", () => showView("chat"));
byId("show-race").addEventListener("click", () => showView("race"));
byId("view-rendered").addEventListener("click", () => showAnswersAs("rendered"));
byId("view-tokens").addEventListener("click", () => showAnswersAs("tokens"));
byId("colors").addEventListener("change", (event) => colorRendered(event.target.checked));
byId("key").addEventListener("change", learn);
list.onRename = (id, title) => {
  if (id === chat.conversation.id && title) chat.conversation.title = title;
};
settings.onMethod = () => showLegend(settings.drafters);

async function learn() {
  try {
    settings.learn(await fetchInfo(settings.key));
    byId("error").hidden = true;
  } catch (error) {
    runs.report(error);
  }
}

colorRendered(true);
byId("color-switch").hidden = !canColor;
learn();
showInvitation();
fit();
focusPrompt();
