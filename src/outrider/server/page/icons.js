// Buttons with a small drawing.

import { make, shape } from "./draw.js";

const DRAWINGS = {
  copy: "M7 7h9v10H7z M4 13V3h9",
  done: "M4 10.5l4 4 8-9",
  edit: "M4 16l1-4 8.5-8.5 3 3L8 15z",
  again: "M15.5 7A6 6 0 1 0 16 11.5 M16 3.5V7.5h-4",
  remove: "M4 6h12 M8 6V4h4v2 M6 6l1 11h6l1-11",
};

/** A button with a drawing and a name for the tooltip and screen readers. */
export function iconButton(drawing, name, onClick) {
  const button = make("button", { type: "button", class: "icon-button", title: name, "aria-label": name });
  draw(button, drawing);
  button.addEventListener("click", onClick);
  return button;
}

function draw(button, drawing) {
  const path = shape("path", { d: DRAWINGS[drawing] });
  button.replaceChildren(shape("svg", { viewBox: "0 0 20 20", class: "icon", "aria-hidden": "true" }, path));
}

/** A button that copies `text()` and confirms it for a moment. */
export function copyButton(name, text) {
  const button = iconButton("copy", name, async () => {
    await copy(text());
    draw(button, "done");
    button.title = "Copied";
    setTimeout(() => {
      draw(button, "copy");
      button.title = name;
    }, 1500);
  });
  return button;
}

/** Copy a text. Browsers offer the clipboard to https and localhost only; elsewhere a selection is copied. */
async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = make("textarea", { class: "hidden" }, text);
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
