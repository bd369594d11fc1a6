// Small drawings: the speed as it runs, the acceptance rate at each position, the tree of a step.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; text is a child too. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export function shape(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Make white space visible: a token may consist of spaces only. */
export function visible(words) {
  const short = words.replace(/ {4,}/g, (spaces) => `␣${spaces.length}`);
  return short.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "\u00a0") || "∅";
}

export function percent(share) {
  return `${Math.round(100 * share)} %`;
}

/** Tokens per second over time, from zero. */
export function drawSpark(into, rates, average) {
  const [width, height] = [280, 48];
  if (rates.length < 2) return into.replaceChildren();
  const top = 1.08 * Math.max(...rates.map((one) => one.rate));
  const [start, end] = [rates[0].time, rates[rates.length - 1].time];
  const across = (time) => (width * (time - start)) / Math.max(end - start, 1);
  const down = (rate) => height - (height * rate) / top;
  const points = rates.map((one) => `${across(one.time).toFixed(1)},${down(one.rate).toFixed(1)}`);
  into.replaceChildren(
    shape(
      "svg",
      {
        viewBox: `0 0 ${width} ${height}`,
        preserveAspectRatio: "none",
        class: "spark",
        role: "img",
        "aria-label": `Tokens per second over time, ${average.toFixed(0)} on average`,
      },
      shape("path", { d: `M0,${height} L${points.join(" L")} L${width},${height} Z`, class: "area" }),
      shape("line", { x1: 0, x2: width, y1: down(average), y2: down(average), class: "average" }),
      shape("polyline", { points: points.join(" "), class: "line" }),
    ),
  );
  return undefined;
}

/** A bar for each position in the draft: its acceptance rate. */
export function drawPositions(into, positions) {
  const rows = positions.slice(0, 16).map(({ tried, kept }, depth) => {
    const bar = make("span", { class: "bar-fill" });
    bar.style.setProperty("--share", kept / tried);
    return make(
      "li",
      {},
      make("span", { class: "place" }, `${depth + 1}`),
      make("span", { class: "track" }, bar),
      make("span", { class: "share" }, percent(kept / tried)),
      make("span", { class: "counts quiet" }, `${kept} of ${tried}`),
    );
  });
  const rest = positions.length - rows.length;
  into.replaceChildren(make("ol", { class: "positions" }, ...rows));
  if (rest > 0) into.append(make("p", { class: "quiet" }, `and ${rest} deeper, up to ${positions.length}`));
}

/** A line for each combined drafter: its share of accepted tokens. */
export function drawDrafters(into, counts, names) {
  const rows = counts.map(({ drafted, kept }, bit) =>
    make("div", {}, make("dt", {}, names[bit] ?? `drafter ${bit + 1}`), make("dd", {}, `${kept} of ${drafted} accepted`)),
  );
  into.replaceChildren(...(rows.length > 1 ? [make("dl", { class: "drafters" }, ...rows)] : []));
}

/** The tree of a step, from left to right: the accepted path in solid lines, the rest dashed and struck out. */
export function drawTree(step) {
  const [column, line, letter] = [12, 24, 7.3];
  const rows = rowsOf(step);
  const widths = [];
  step.drafted.forEach((words, place) => {
    const depth = step.depths[place];
    widths[depth] = Math.max(widths[depth] ?? 0, visible(words).length * letter + 12);
  });
  const starts = [14 + column];
  widths.forEach((width, depth) => starts.push(starts[depth] + width + 2 * column));
  const height = line * (Math.max(...rows) + 1);
  const total = starts[widths.length] - 2 * column + 2;
  const middle = (place) => line * rows[place] + line / 2;
  const edges = [];
  const nodes = [];
  step.drafted.forEach((words, place) => {
    const parent = step.parents[place];
    const x = starts[step.depths[place]];
    const from = parent < 0 ? { x: 8, y: line / 2 } : endOf(parent);
    const kept = step.path.includes(place) ? "kept" : "thrown";
    const bend = `C${from.x + column},${from.y} ${x - column},${middle(place)} ${x},${middle(place)}`;
    edges.push(shape("path", { d: `M${from.x},${from.y} ${bend}`, class: `edge ${kept}` }));
    const box = { x, y: middle(place) - 9, width: boxOf(place), height: 18, rx: 4 };
    const label = shape("text", { x: x + 6, y: middle(place) + 4 }, visible(words));
    nodes.push(shape("g", { class: `node ${kept}` }, shape("rect", box), label));
  });
  function boxOf(place) {
    return visible(step.drafted[place]).length * letter + 12;
  }
  function endOf(place) {
    return { x: starts[step.depths[place]] + boxOf(place), y: middle(place) };
  }
  const name = `A tree of ${step.drafted.length} drafted tokens, ${step.path.length} accepted`;
  const root = shape("circle", { cx: 6, cy: line / 2, r: 4, class: "root" });
  const picture = shape("svg", { class: "tree", role: "img", "aria-label": name }, ...edges, root, ...nodes);
  picture.setAttribute("viewBox", `0 0 ${total} ${height}`);
  picture.setAttribute("width", total);
  picture.setAttribute("height", height);
  return make("div", { class: "tree-box", tabindex: "0" }, picture);
}

/** One line per leaf; the first child stays on its parent's line. */
function rowsOf(step) {
  const children = new Map();
  step.parents.forEach((parent, place) => children.set(parent, [...(children.get(parent) ?? []), place]));
  const rows = [];
  let next = 0;
  const walk = (place, row) => {
    rows[place] = row;
    (children.get(place) ?? []).forEach((child, number) => walk(child, number ? (next += 1) : row));
  };
  (children.get(-1) ?? []).forEach((child, number) => walk(child, number ? (next += 1) : 0));
  return rows;
}
