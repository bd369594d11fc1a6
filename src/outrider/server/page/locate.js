// Where the characters of a rendered Markdown text stand in its source.

const REACH = 2000; // characters of markup that may stand between two pieces of text, such as the address of a link

/**
 * List the pieces of text in `root` in order: {node, at, length, start}. `length` characters from `at` in the text node
 * are those from `start` in the source. Characters that the source spells otherwise, such as entities, are left out.
 */
export function locate(root, source) {
  const pieces = [];
  let cursor = 0;
  for (const run of runs(root)) {
    for (const { offset, text } of parts(run.text, source, () => cursor)) {
      const found = source.indexOf(text, cursor);
      if (found < 0 || found - cursor > REACH) continue;
      cursor = found + text.length;
      pieces.push(...spread(run.nodes, offset, text.length, found));
    }
  }
  return pieces;
}

/** Texts that the source most probably has in one piece: a code block, else a text node. */
function* runs(root) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  let block = null;
  let nodes = [];
  const joined = () => ({ nodes, text: nodes.map((node) => node.data).join("") });
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (node.parentElement.closest(".code-head, summary")) continue;
    const code = node.parentElement.closest("pre");
    if (nodes.length && (code === null || code !== block)) {
      yield joined();
      nodes = [];
    }
    block = code;
    nodes.push(node);
  }
  if (nodes.length) yield joined();
}

/** The whole text if the source has it next, else its lines, else its words: indentation may have been removed. */
function* parts(text, source, cursor) {
  const trimmed = text.replace(/\n+$/, "");
  if (!trimmed.trim()) return;
  const near = (piece) => {
    const found = source.indexOf(piece, cursor());
    return found >= 0 && found - cursor() <= REACH;
  };
  if (near(trimmed)) {
    yield { offset: 0, text: trimmed };
    return;
  }
  for (const line of trimmed.matchAll(/[^\n]+/g)) {
    if (near(line[0])) {
      yield { offset: line.index, text: line[0] };
      continue;
    }
    for (const word of line[0].matchAll(/\S+/g)) yield { offset: line.index + word.index, text: word[0] };
  }
}

/** Spread a piece of a run over the text nodes that it covers. */
function* spread(nodes, offset, length, start) {
  let before = 0;
  for (const node of nodes) {
    const from = Math.max(offset, before);
    const to = Math.min(offset + length, before + node.length);
    if (from < to) yield { node, at: from - before, length: to - from, start: start + from - offset };
    before += node.length;
  }
}
