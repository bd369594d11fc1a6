// The panel with the figures of one answer, and the legend.

import { drawDrafters, drawPositions, drawSpark, make, percent } from "./draw.js";
import { describe } from "./step.js";
import { paintOf } from "./trace.js";

const byId = (id) => document.getElementById(id);

/** Show the current speed while it runs (`live`), then the mean speed. */
export function showFigures(answer, live = false) {
  const rates = answer.rates;
  const speed = live ? rates[rates.length - 1]?.rate : answer.rate;
  byId("rate").textContent = speed ? speed.toFixed(1) : "–";
  drawSpark(byId("spark"), rates, answer.rate);
  byId("per-step").textContent = answer.steps.length ? (answer.tokens / answer.steps.length).toFixed(2) : "–";
  const share = percent(answer.kept / answer.drafted);
  byId("kept-share").textContent = answer.drafted ? `${share} of ${answer.drafted}` : "–";
  const first = answer.arrivals[0];
  const delay = first && answer.started !== null ? `${Math.round(first.time - answer.started)} ms` : "–";
  byId("first-token").textContent = delay;
  showReason(byId("reason"), answer);
  drawDrafters(byId("drafters"), answer.byDrafter, answer.drafters);
  if (answer.positions.length) drawPositions(byId("positions"), answer.positions);
  else byId("positions").replaceChildren(make("p", { class: "quiet" }, "Nothing was drafted yet."));
}

export function showStep(step) {
  byId("step").replaceChildren(...describe(step));
}

/** Say why drafts were suspended, in the engine's numbers, and how to force them. */
export function showReason(into, answer) {
  const reason = answer.suspension;
  into.hidden = !reason;
  into.textContent = reason && `${reason} “Always draft” in the settings forces them.`;
}

/** Name the colors of accepted tokens: one, or one for each combined drafter. */
export function showLegend(drafters) {
  const item = (paint, name, title) => make("span", { class: `token ${paint}`, title }, name);
  const single = [item("kept", "accepted", "drafted and accepted")];
  const named = drafters.map((name, bit) => item(paintOf(1 << bit), name, `drafted by ${name} and accepted`));
  const several = item("by-several", "several", "drafted by several and accepted");
  byId("legend-kept").replaceChildren(...(drafters.length > 1 ? [...named, several] : single));
}

/** One line under an answer. */
export function summary(answer) {
  const count = `${answer.tokens} tokens in ${answer.steps.length} steps`;
  const kept = answer.drafted ? ` · ${percent(answer.kept / answer.drafted)} of ${answer.drafted} drafted accepted` : "";
  return `${count}${kept} · ${answer.rate.toFixed(1)} tokens/s`;
}
