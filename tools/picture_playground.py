"""Take the screenshot of the playground for the README: an answer of a real model with the tree of one step.

    python tools/picture_playground.py --speculate eagle3:width=6,branches=2,adaptive=false docs/images/playground.png

Needs playwright and chromium (or `OUTRIDER_CHROMIUM`). The picture shows the speed of this machine: keep it idle.
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
MAX_TOP = 520  # pixels from the top: below, the window has no space for the tooltip


@contextmanager
def served(model: str, speculate: str) -> Iterator[str]:
    """Run a server and yield the address of the playground."""
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


def ask(page: Any, text: str, tokens: int, repeats: int) -> None:
    """Ask the same question several times; all answers but the last warm up the server."""
    page.fill("#max-tokens", str(tokens))
    page.locator("#temperature").fill("0")
    for number in range(repeats):
        if number:
            page.get_by_role("button", name="New conversation").click()
        page.fill("#prompt", text)
        page.press("#prompt", "Enter")
        page.locator(".note", has_text="tokens/s").wait_for(timeout=300_000)


def open_draft(page: Any) -> None:
    """Hover over the step with the largest tree that has accepted and rejected tokens and space for its tooltip."""
    steps = page.locator(".step:visible")  # steps that add only a line break are invisible
    page.evaluate("window.scrollTo(0, 0)")
    best, most = steps.first, 0
    for step in steps.all():
        if step.bounding_box()["y"] > MAX_TOP:
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
        ask(page, QUESTION, arguments.tokens, repeats=2)
        page.evaluate("document.activeElement.blur()")
        open_draft(page)
        page.screenshot(path=arguments.file)
        browser.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
