// The trace of an answer as data, without the page.

const WINDOW = 1000; // milliseconds over which the current speed is averaged
const LEAST = 50; // milliseconds that are averaged at least: chunks that arrive together would make a peak

/** One forward pass of the target: the draft, the accepted tokens, and the origin of each token. */
export function readStep(raw) {
  const drafted = (raw.drafted_text ?? []).map((text, place) => spelled(text, raw.drafted_bytes?.[place]));
  const parents = raw.parents ?? drafted.map((_, place) => place - 1);
  const kept = raw.accepted ?? 0;
  const path = keptPath(raw.drafted ?? [], parents, (raw.tokens ?? []).slice(0, kept));
  const last = path.length ? path[path.length - 1] : -1;
  const ended = drafted.length > 0 && !parents.includes(last);
  const own = drafted.length === 0 ? "plain" : ended ? "bonus" : "corrected";
  const tokens = (raw.text ?? []).map((text, place) => ({
    text,
    label: spelled(text, raw.bytes?.[place]),
    shown: "",
    kind: place < kept ? "kept" : own,
    paint: place < kept ? paintOf(raw.origins?.[path[place]]) : own,
  }));
  return { drafted, parents, path, kept, tokens, own, tree: isTree(parents), depths: depths(parents) };
}

/** The class of an accepted token: by its drafter, if several are combined. `mask`: bit i is set for drafter i. */
export function paintOf(mask = 1) {
  if (mask & (mask - 1)) return "by-several";
  const drafter = Math.min(Math.log2(mask), 2);
  return drafter ? `by-${drafter}` : "kept";
}

/** The text of a token for display: the characters that it completes, else its bytes. */
function spelled(text, bytes = []) {
  return text || bytes.map((byte) => `<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`).join("");
}

/** The indices of these tokens in the draft. */
function keptPath(drafted, parents, tokens) {
  const path = [];
  let last = -1;
  for (const token of tokens) {
    last = drafted.findIndex((id, place) => id === token && parents[place] === last);
    if (last < 0) break;
    path.push(last);
  }
  return path;
}

function isTree(parents) {
  return parents.some((parent, place) => parent !== place - 1);
}

function depths(parents) {
  const found = [];
  for (const parent of parents) found.push(parent < 0 ? 0 : found[parent] + 1);
  return found;
}

/** The rejected words, one list per branch. */
export function rejected(step) {
  const indices = step.drafted.map((_, index) => index).filter((index) => !step.path.includes(index));
  const ends = indices.filter((index) => !step.parents.includes(index));
  const listed = new Set();
  return ends.map((end) => {
    const words = [];
    for (let index = end; index >= 0 && !step.path.includes(index) && !listed.has(index); index = step.parents[index]) {
      listed.add(index);
      words.unshift(step.drafted[index]);
    }
    return words;
  });
}

/** Describe a step in one sentence. */
export function summary(step) {
  const count = step.drafted.length;
  if (!count) return "Nothing was drafted.";
  const shape = step.tree ? "a tree of " : "";
  if (count === 1) return `Drafted 1 token, ${step.kept ? "accepted" : "rejected"}.`;
  const accepted = step.kept === 0 ? "none accepted" : step.kept === count ? "all accepted" : `${step.kept} accepted`;
  return `Drafted ${shape}${count} tokens, ${accepted}.`;
}

/** Text and steps of one answer as they arrive. Every token gets its part of the text, and no character is lost. */
export class Answer {
  /** format: "text", or "json" if the answer is JSON. drafters: names of combined drafters. */
  constructor({ format = "text", drafters = [] } = {}) {
    this.format = format;
    this.drafters = drafters;
    this.text = ""; // reasoning, then the answer itself
    this.thought = 0; // characters of reasoning
    this.steps = [];
    this.flow = []; // all tokens in order
    this.settled = 0; // tokens whose part of the text is known
    this.cursor = 0; // characters of the text that they have
    this.arrivals = []; // {time, tokens, steps} of each chunk
    this.positions = []; // {tried, kept} by depth in the draft
    this.started = null;
    this.drafted = this.kept = 0;
    this.raw = []; // the steps as the server sent them
    this.byDrafter = []; // {drafted, kept} of combined drafters
    this.metrics = null; // the server's speculation stats, which come with the end
  }

  add(chunk, time) {
    const delta = chunk.choices?.[0]?.delta ?? {};
    const thought = delta.reasoning_content ?? "";
    const piece = thought + (delta.content ?? "");
    const raw = chunk.speculation?.steps ?? [];
    const fresh = raw.map(readStep);
    this.text += piece;
    this.thought += thought.length;
    this.metrics = chunk.metrics?.speculative_decoding ?? this.metrics;
    fresh.forEach((step, index) => this.#count(step, raw[index]));
    const tokens = fresh.reduce((sum, step) => sum + step.tokens.length, 0);
    const steps = fresh.length;
    if (tokens) this.arrivals.push({ time, tokens, steps });
    else if (piece && !this.steps.length) this.arrivals.push({ time, tokens: 1, steps }); // a response without a trace
    this.#settle();
  }

  /** Fill in a complete response. Its steps have the engine's times, from the end of the first step on. */
  load(body) {
    const [choice] = body.choices;
    const { reasoning_content: thought, content } = choice.message;
    this.thought = (thought ?? "").length;
    this.text = (thought ?? "") + (content ?? "");
    this.metrics = body.metrics?.speculative_decoding ?? null;
    for (const raw of choice.speculation?.steps ?? []) {
      const step = readStep(raw);
      this.#count(step, raw);
      this.arrivals.push({ time: 1000 * raw.seconds, tokens: step.tokens.length, steps: 1 });
    }
    this.#settle();
    this.finish();
  }

  #count(step, raw) {
    step.number = this.steps.length;
    this.steps.push(step);
    this.raw.push(raw);
    this.#countDrafters(step, raw.origins);
    this.flow.push(...step.tokens);
    step.end = this.flow.length;
    this.drafted += step.drafted.length;
    this.kept += step.path.length;
    const deepest = Math.max(-1, ...step.depths);
    for (let depth = 0; depth <= deepest; depth += 1) {
      this.positions[depth] ??= { tried: 0, kept: 0 };
      this.positions[depth].tried += 1;
      if (depth < step.path.length) this.positions[depth].kept += 1;
    }
  }

  /** Count for each combined drafter; a token that several proposed counts for each of them. */
  #countDrafters(step, origins) {
    (origins ?? []).forEach((mask, index) => {
      for (let bit = 0; mask >> bit; bit += 1) {
        this.byDrafter[bit] ??= { drafted: 0, kept: 0 };
        if (!((mask >> bit) & 1)) continue;
        this.byDrafter[bit].drafted += 1;
        if (step.path.includes(index)) this.byDrafter[bit].kept += 1;
      }
    });
  }

  /** A token without text of its own, such as part of a character, shares the text up to the next token that has. */
  #settle() {
    for (let at = this.settled; at < this.flow.length; at += 1) {
      const words = this.flow[at].text;
      const found = words ? this.text.indexOf(words, this.cursor) : -1;
      if (found < 0 || found - this.cursor > 64) continue;
      this.flow[at].shown = words;
      if (found > this.cursor) {
        const heir = this.flow[this.settled];
        heir.shown = this.text.slice(this.cursor, found) + heir.shown;
      }
      this.settled = at + 1;
      this.cursor = found + words.length;
    }
  }

  /** Assign the rest of the text to the last token that has none. */
  finish() {
    const rest = this.text.slice(this.cursor);
    const heir = this.flow[this.settled] ?? this.flow[this.flow.length - 1];
    if (rest && heir) heir.shown += rest;
    this.cursor = this.text.length;
    this.settled = this.flow.length;
  }

  get reasoning() {
    return this.text.slice(0, this.thought);
  }

  /** The answer without its reasoning. */
  get content() {
    return this.text.slice(this.thought);
  }

  /** Why drafts were suspended, in one sentence; empty if they were not. */
  get suspension() {
    const { num_suspended_steps: count, suspension } = this.metrics ?? {};
    if (!count || !suspension) return "";
    return `Drafts were suspended in ${count} of ${this.steps.length} steps: ${suspension.reason}.`;
  }

  get tokens() {
    return this.arrivals.reduce((sum, arrival) => sum + arrival.tokens, 0);
  }

  /** Milliseconds between the first tokens and the last. */
  get span() {
    return this.arrivals.length ? this.arrivals[this.arrivals.length - 1].time - this.arrivals[0].time : 0;
  }

  /** Count the steps and tokens that had arrived this many milliseconds after the first. */
  reached(passed) {
    const arrived = this.arrivals.filter((arrival) => arrival.time - this.arrivals[0].time <= passed);
    const count = (key) => arrived.reduce((sum, arrival) => sum + arrival[key], 0);
    return { steps: count("steps"), tokens: count("tokens") };
  }

  /** Tokens per second after the first chunk, whose time includes the prompt. */
  get rate() {
    return this.span > 0 ? (1000 * (this.tokens - this.arrivals[0].tokens)) / this.span : 0;
  }

  /** Current tokens per second, after each chunk but the first ones. */
  get rates() {
    const rates = [];
    let from = 0;
    let sum = 0; // tokens of chunks from + 1 ... at
    for (let at = 1; at < this.arrivals.length; at += 1) {
      sum += this.arrivals[at].tokens;
      while (from + 1 < at && this.arrivals[at].time - this.arrivals[from + 1].time >= WINDOW) {
        from += 1;
        sum -= this.arrivals[from].tokens;
      }
      const passed = this.arrivals[at].time - this.arrivals[from].time;
      if (passed < LEAST) continue;
      rates.push({ time: this.arrivals[at].time, rate: (1000 * sum) / passed });
    }
    return rates;
  }
}
