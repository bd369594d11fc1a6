"""The page of `outrider trace` in a real Chromium, without scripts. `make test-browser` runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser
OVERFLOW = "document.documentElement.scrollWidth - window.innerWidth"


@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (1100, "dark"), (360, "dark")])
def test_the_page_fits_any_screen(
    outrider: Callable[..., Any], model: Path, tmp_path: Path, chromium: Any, width: int, scheme: str
) -> None:
    file = tmp_path / "trace.html"
    drafter = "suffix:branches=3,width=9,adaptive=false,least=0"
    asked = ("abcabcabcabc", "-m", model, "--backend", "cpu", "--max-tokens", 24, "--raw")
    assert outrider("trace", *asked, "--speculate", drafter, "--html", file).exit_code == 0
    context = chromium.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme, java_script_enabled=False
    )
    page = context.new_page()
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url))
    page.goto(file.as_uri())
    assert fetched == [file.as_uri()]
    paper = page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
    assert (max(map(int, paper[4:-1].split(","))) < 64) == (scheme == "dark")
    assert page.evaluate(OVERFLOW) <= 0, "the page is wider than the screen"
    cards = page.locator(".card")
    everything = cards.count()
    page.locator("label", has_text="no draft").click()
    seen = [card for card in cards.all() if card.is_visible()]
    assert 0 < len(seen) < everything
    page.locator("label", has_text="all").first.click()
    page.locator(".answer .step").nth(3).click()
    assert page.url.endswith("#s4") and page.locator("#s4").is_visible()
    context.close()
