// The panels beside the text. On a narrow screen they are drawers: one at a time, over the text.

const byId = (id) => document.getElementById(id);
const DRAWERS = { conversations: "open-conversations", side: "open-side" };

export class Panels {
  constructor() {
    this.open = null;
    for (const [panel, button] of Object.entries(DRAWERS)) {
      byId(button).addEventListener("click", () => (this.open === panel ? this.close() : this.show(panel)));
    }
    byId("backdrop").addEventListener("click", () => this.close());
    window.addEventListener("resize", () => this.open && !this.isDrawer(this.open) && this.close());
  }

  /** Whether a panel is a drawer at this width: then its button is visible. */
  isDrawer(panel) {
    return byId(DRAWERS[panel]).offsetParent !== null;
  }

  /** Open a drawer; a panel that is always visible stays as it is. */
  show(panel) {
    if (!this.isDrawer(panel)) return;
    if (this.open) this.close();
    this.open = panel;
    byId(panel).classList.add("open");
    byId(DRAWERS[panel]).setAttribute("aria-expanded", "true");
    byId("backdrop").hidden = false;
    byId("main").inert = true;
    byId(panel).focus();
  }

  /** Close the open drawer. Returns whether there was one. */
  close() {
    if (!this.open) return false;
    const panel = this.open;
    this.open = null;
    byId(panel).classList.remove("open");
    byId(DRAWERS[panel]).setAttribute("aria-expanded", "false");
    byId("backdrop").hidden = true;
    byId("main").inert = false;
    if (byId(panel).contains(document.activeElement)) byId(DRAWERS[panel]).focus();
    return true;
  }
}
