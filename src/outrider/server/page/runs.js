// One request at a time, from Send to its end or failure.

import { showFigures } from "./figures.js";
import { chat, complete, Trouble } from "./stream.js";

const byId = (id) => document.getElementById(id);
// Milliseconds between two drawings of a growing answer and of its figures. Drawing takes processor time from an engine
// on the same machine.
const FRAME = 50;
const FIGURES = 250;

export class Runs {
  constructor(settings) {
    this.settings = settings;
    this.current = null; // the AbortController of the current run
  }

  /** Run `work` with the buttons and errors that belong to it. Returns "done", "stopped" or "failed". */
  async engage(work) {
    this.current = new AbortController();
    byId("error").hidden = true;
    byId("send").hidden = true;
    byId("stop").hidden = false;
    byId("log").setAttribute("aria-busy", "true");
    try {
      await work();
    } catch (error) {
      if (error.name === "AbortError") return "stopped";
      this.report(error);
      return "failed";
    } finally {
      this.current = null;
      byId("send").hidden = false;
      byId("stop").hidden = true;
      byId("log").setAttribute("aria-busy", "false");
    }
    return "done";
  }

  /** Stream one answer; `onFrame(live)` is called now and then while it grows, and once at the end. */
  async stream(request, answer, onFrame) {
    let waiting = 0;
    let measured = 0;
    const paint = () => {
      waiting = 0;
      onFrame(true);
      if (performance.now() - measured < FIGURES) return;
      measured = performance.now();
      showFigures(answer, true);
    };
    answer.started = performance.now();
    try {
      for await (const chunk of chat(request, this.settings.key, this.current.signal)) {
        answer.add(chunk, performance.now());
        waiting ||= setTimeout(paint, FRAME);
      }
    } finally {
      clearTimeout(waiting);
      answer.finish();
      onFrame(false);
      showFigures(answer);
    }
  }

  /**
   * Fetch one answer as a whole. Receiving and drawing every token would take processor time from an engine on the same
   * machine, from plain decoding most, so the page is idle until the end and then reads the engine's own clock.
   */
  async time(request, answer) {
    answer.load(await complete(request, this.settings.key, this.current.signal));
    showFigures(answer);
  }

  stop() {
    this.current?.abort();
  }

  /** Show an error as a sentence. */
  report(error) {
    const trouble = error instanceof Trouble ? error : new Trouble(`The page failed: ${error.message}.`);
    byId("error").textContent = trouble.message;
    byId("error").hidden = false;
    byId("status").textContent = "";
    if (trouble.status === 401) this.settings.askForKey();
  }
}
