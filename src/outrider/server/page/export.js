// A conversation as a file: JSON with the traces, or Markdown.

import { make } from "./draw.js";

const NAMES = { system: "System", user: "You", assistant: "Model" };

export function asMarkdown({ title, messages }, model) {
  const parts = messages.map(({ role, content }) => `## ${NAMES[role] ?? role}\n\n${content.trim()}\n`);
  return [`# ${title || "Conversation"}\n`, `Model: ${model}\n`, ...parts].join("\n");
}

export function asJson(conversation, model) {
  return `${JSON.stringify({ model, ...conversation }, null, 2)}\n`;
}

/** Offer a text as a file. */
export function download(name, type, text) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** A title as a file name. */
export function fileName(title, ending) {
  const plain = title.toLowerCase().replace(/[^\p{Letter}\p{Number}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 40);
  return `${plain || "conversation"}.${ending}`;
}
