"""Take the README's picture of the playground: an answer by a real model, and one of its drafts opened.

    python tools/picture_playground.py --speculate eagle3:width=6,branches=2,adaptive=false docs/images/playground.png

Needs playwright, and chromium (or `OUTRIDER_CHROMIUM`). The rate in it is this machine's: let it do nothing else.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

QUESTION = "Write a Python class Stack with push, pop, peek and is_empty. Only code."
ROOM = 520  # pixels from the top: what is lower has no room for its tip


@contextmanager
def served(model: str, speculate: str) -> Iterator[str]:
    """The address of the page."""
    command = [sys.executable, "-m", "outrider.cli", "serve", model, "--port=0", f"--speculate={speculate}"]
    process = subprocess.Popen([*command, "--no-log-requests"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            if line.startswith("playground: "):
                yield line.split()[1]
                return
        raise SystemExit("the server did not start")
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def ask(page: Any, text: str, tokens: int, turns: int) -> None:
    """The last answer counts: those before it warm the server up."""
    page.fill("#max-tokens", str(tokens))
    page.locator("#temperature").fill("0")
    for turn in range(turns):
        if turn:
            page.get_by_role("button", name="New conversation").click()
        page.fill("#prompt", text)
        page.press("#prompt", "Enter")
        page.locator(".note", has_text="tokens/s").wait_for(timeout=300_000)


def open_draft(page: Any) -> None:
    """The step whose tree says most, among those with room for it below: some of it kept, some thrown away."""
    steps = page.locator(".step:visible")  # some are a line break and no more
    page.evaluate("window.scrollTo(0, 0)")
    best, most = steps.first, 0
    for step in steps.all():
        if step.bounding_box()["y"] > ROOM:
            break
        step.hover()
        page.locator("#tip").wait_for()
        kept, nodes = (page.locator(f"#tip svg.tree .node{kind}").count() for kind in (".kept", ""))
        if kept and nodes + kept > most:
            best, most = step, nodes + kept
    best.hover()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--speculate", default="eagle3:width=6,branches=2,adaptive=false")
    parser.add_argument("--tokens", type=int, default=140)
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    path = os.environ.get("OUTRIDER_CHROMIUM") or shutil.which("chromium")
    with served(arguments.model, arguments.speculate) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 860}, color_scheme="light")
        page.goto(url)
        page.locator("#method option").first.wait_for(state="attached")
        ask(page, QUESTION, arguments.tokens, turns=2)
        page.evaluate("document.activeElement.blur()")
        open_draft(page)
        page.screenshot(path=arguments.file)
        browser.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
