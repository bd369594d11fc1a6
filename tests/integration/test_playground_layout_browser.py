"""The playground's page in a real Chromium at four widths: no overlaps, no overflow, nothing for axe-core."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playground_page import answered, ask, expect, ready
from scripted_server import ScriptedServer
from test_playground_text_browser import MARKDOWN

pytestmark = pytest.mark.browser
Opener = Callable[..., Any]
WIDTHS = (360, 800, 1280, 1920)
AXE = Path(os.environ.get("OUTRIDER_AXE") or Path(__file__).parents[2] / "build/axe.min.js")
# Pairs of visible controls and texts whose boxes, as far as they are not scrolled away, overlap.
OVERLAPS = """() => {
  const clipped = (element) => {
    let { left, top, right, bottom } = element.getBoundingClientRect();
    for (let up = element.parentElement; up; up = up.parentElement) {
      if (getComputedStyle(up).overflowY === "visible") continue;
      const box = up.getBoundingClientRect();
      [left, top] = [Math.max(left, box.left), Math.max(top, box.top)];
      [right, bottom] = [Math.min(right, box.right), Math.min(bottom, box.bottom)];
    }
    return { element, left, top, right, bottom };
  };
  const open = document.querySelector(".panel.open");
  const layer = (element) => !open || open.contains(element) || element.closest("header");
  const controls = "button, input, select, textarea, summary, label";
  const texts = "h1, h2, p, dt, dd, pre, .said, .answer, .legend li";
  const found = [...document.querySelectorAll(`${controls}, ${texts}`)];
  const boxes = found.filter((one) => layer(one) && one.checkVisibility() && !one.matches(".hidden, .skip"))
    .map(clipped).filter((box) => box.right - box.left > 1 && box.bottom - box.top > 1);
  const name = ({ element }) => `${element.outerHTML.slice(0, 60)} ${element.textContent.slice(0, 20)}`;
  const pairs = [];
  boxes.forEach((one, index) => boxes.slice(index + 1).forEach((other) => {
    if (one.element.contains(other.element) || other.element.contains(one.element)) return;
    const across = Math.min(one.right, other.right) - Math.max(one.left, other.left);
    const down = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
    if (across > 1 && down > 1) pairs.push(`${name(one)} / ${name(other)}`);
  }));
  return pairs;
}"""


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer(method="suffix+ngram", answers={"render": MARKDOWN})


def check(page: Any, accessible: bool = True) -> None:
    """Check the page as it stands."""
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth"), "the page scrolls sideways"
    assert page.evaluate(OVERLAPS) == []
    if not accessible:
        return
    results = page.evaluate("() => axe.run(document, { resultTypes: ['violations'] })")
    assert [
        (one["id"], [node["html"][:160] for node in one["nodes"][:3]], one["nodes"][0]["failureSummary"][:400])
        for one in results["violations"]
    ] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overlaps_and_everything_is_accessible(
    server: ScriptedServer, visit: Opener, width: int, scheme: str
) -> None:
    assert AXE.exists(), "run `python tools/vendor_page.py --axe build/axe.min.js`, or set `OUTRIDER_AXE` to the file"
    page = ready(visit(server.app, width=width, height=800, has_touch=width < 500, color_scheme=scheme))
    page.evaluate(AXE.read_text())  # not as a script element, which the policy of the page forbids
    check(page)
    ask(page, "render")
    answered(page)
    check(page)
    page.click("#view-tokens")
    page.locator(".step").nth(3).click()
    expect(page.locator("#tip")).to_be_visible()
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width
    page.keyboard.press("Escape")
    check(page)
    page.get_by_role("button", name="Edit this message").click()
    check(page)
    page.get_by_role("button", name="Cancel").click()
    for panel in ("conversations", "side"):
        if page.locator(f"#open-{panel}").is_visible():
            page.click(f"#open-{panel}")
            expect(page.locator(f"#{panel}")).to_be_focused()
            check(page)
            page.keyboard.press("Escape")
            expect(page.locator(f"#open-{panel}")).to_be_focused()
    page.click("#show-race")
    ask(page, "Why?")
    expect(page.locator("#verdict[data-state=done]")).to_be_visible()
    expect(page.locator(".clock.finished")).to_have_count(2)
    check(page)


@pytest.mark.parametrize("width", [360, 700])
def test_long_words_do_not_overflow_a_small_screen(server: ScriptedServer, visit: Opener, width: int) -> None:
    page = ready(visit(server.app, width=width, height=700, has_touch=True))
    ask(page, "x" * 400)
    answered(page)
    check(page, accessible=False)
    page.locator("#show-race").tap()
    check(page, accessible=False)


def test_a_field_in_a_closed_panel_is_shown_if_it_is_wrong(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app, width=800, height=800))
    page.evaluate("document.getElementById('seed').value = -4")
    ask(page, "Why?")
    expect(page.locator("#seed")).to_be_visible()
    assert not server.requests
