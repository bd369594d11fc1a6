// Markdown to elements: parsed by marked, sanitized by DOMPurify, code colored by highlight.js.

import { make } from "./draw.js";
import { copyButton } from "./icons.js";
import hljs from "./vendor/highlight.js";
import { Marked } from "./vendor/marked.js";
import "./vendor/purify.js"; // sets DOMPurify

const TAGS = "a b blockquote br code del em h3 h4 h5 h6 hr i li ol p pre s strong sub sup table tbody td th thead tr ul";
const RULES = {
  ALLOWED_TAGS: TAGS.split(" "),
  ALLOWED_ATTR: ["href", "title", "start", "align", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const CODE_RULES = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };
const CACHED = 64; // highlighted code blocks that are kept: a growing answer is rendered many times

const letters = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const escape = (text) => text.replace(/[&<>"]/g, (letter) => letters[letter]);
const cache = new Map();

// HTML in an answer is shown as text: it may be the subject of the answer, and no character should be lost.
const parser = new Marked({
  gfm: true,
  renderer: {
    html: ({ text, block }) => (block ? `<p>${escape(text)}</p>` : escape(text)),
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`, // nothing is loaded
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

/** The elements of a Markdown text. */
export function render(text) {
  const tokens = parser.lexer(text);
  shiftHeadings(tokens);
  const fragment = globalThis.DOMPurify.sanitize(parser.parser(tokens), RULES);
  for (const code of fragment.querySelectorAll("pre > code")) frame(code);
  for (const table of fragment.querySelectorAll("table")) {
    const box = make("div", { class: "table-box", tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(box);
    box.append(table);
  }
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  return fragment;
}

/** The headings of an answer begin below those of the page, and skip no level. */
function shiftHeadings(tokens) {
  const headings = tokens.filter((token) => token.type === "heading");
  const depths = [...new Set(headings.map((token) => token.depth))].sort();
  for (const heading of headings) heading.depth = Math.min(3 + depths.indexOf(heading.depth), 6);
}

/** Put a code block under a line with its language and a button that copies it. */
function frame(code) {
  const language = (code.className.match(/language-([\w+#.-]+)/)?.[1] ?? "").toLowerCase();
  const text = code.textContent.replace(/\n$/, "");
  code.removeAttribute("class");
  code.replaceChildren(highlight(text, language));
  const pre = code.parentElement;
  pre.tabIndex = 0; // long lines scroll, by keyboard too
  const name = make("span", { class: "quiet" }, language || "code");
  const box = make("div", { class: "code-box" });
  pre.replaceWith(box);
  box.append(make("div", { class: "code-head" }, name, copyButton("Copy this code", () => text)), pre);
}

function highlight(text, language) {
  if (!hljs.getLanguage(language)) return document.createTextNode(text);
  const key = `${language}\n${text}`;
  let html = cache.get(key);
  if (html === undefined) {
    html = hljs.highlight(text, { language, ignoreIllegals: true }).value;
    if (cache.size >= CACHED) cache.delete(cache.keys().next().value);
    cache.set(key, html);
  }
  return globalThis.DOMPurify.sanitize(html, CODE_RULES);
}
