// Conversations in the browser's storage, one entry each, so that two windows do not overwrite each other's.

import { forget, keep, local, names, recall } from "./storage.js";

const PREFIX = "conversation:";
const MOST = 100; // conversations that are kept; the oldest are deleted first
const MOST_CHARACTERS = 2_000_000; // of all conversations; browsers store about 5 million for a page
const TITLE = 60; // characters of a title that is taken from the first message

/** A message: {role, content}; an answer also has `note`, `format`, `method` and `steps`, its trace. */
export function create() {
  const now = Date.now();
  const id = `${now.toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
  return { id, title: "", created: now, updated: now, messages: [] };
}

/** All stored conversations, the newest first. */
export function list() {
  const found = names(local, PREFIX).map((name) => parse(recall(local, name)));
  return found.filter(Boolean).sort((one, other) => other.updated - one.updated);
}

export function find(id) {
  return parse(recall(local, PREFIX + id));
}

/** Store a conversation, as the newest one unless `updated` is kept. Returns false if the browser stores nothing. */
export function save(conversation, { touch = true } = {}) {
  if (touch) conversation.updated = Date.now();
  conversation.title ||= titleOf(conversation);
  makeSpace(conversation);
  const text = JSON.stringify(conversation);
  if (keep(local, PREFIX + conversation.id, text)) return true;
  return keep(local, PREFIX + conversation.id, JSON.stringify(withoutTraces(conversation)));
}

export function remove(id) {
  forget(local, PREFIX + id);
}

/** Call `onChange` when another window stores or deletes a conversation. */
export function watch(onChange) {
  window.addEventListener("storage", (event) => {
    if (event.key === null || event.key.startsWith(PREFIX)) onChange();
  });
}

function titleOf(conversation) {
  const asked = conversation.messages.find((message) => message.role === "user")?.content ?? "";
  const line = asked.trim().split("\n")[0].replace(/\s+/g, " ");
  return line.length > TITLE ? `${line.slice(0, TITLE - 1)}…` : line || "Untitled";
}

/** Drop the traces of the oldest conversations, then the oldest conversations, until there is space for this one. */
function makeSpace(conversation) {
  const others = list().filter((one) => one.id !== conversation.id);
  for (const old of others.splice(MOST - 1)) remove(old.id);
  let total = [conversation, ...others].reduce((sum, one) => sum + JSON.stringify(one).length, 0);
  for (const old of others.toReversed()) {
    if (total <= MOST_CHARACTERS) return;
    const before = JSON.stringify(old).length;
    const after = JSON.stringify(withoutTraces(old));
    if (after.length < before) keep(local, PREFIX + old.id, after);
    total -= before - after.length;
  }
  for (const old of others.toReversed()) {
    if (total <= MOST_CHARACTERS) return;
    total -= JSON.stringify(withoutTraces(old)).length;
    remove(old.id);
  }
}

function withoutTraces(conversation) {
  const messages = conversation.messages.map(({ steps, ...message }) => message);
  return { ...conversation, messages };
}

/** A stored conversation; null if it is damaged. */
function parse(text) {
  try {
    const found = JSON.parse(text);
    return found && Array.isArray(found.messages) && typeof found.id === "string" ? found : null;
  } catch {
    return null;
  }
}
