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

QUESTIONS = (  # the first ones warm up the server and fill the list; the picture shows the answer to the last
    "Why is the sky blue?",
    "Explain how a bicycle stays upright.",
    "Write a Python class Stack with push, pop, peek and is_empty. Only code.",
)
MAX_TOP = 430  # pixels from the top: below, the window has no space for the tooltip
# Of the first line of the selected step: pixels from the top, and its middle.
BOX = "[...CSS.highlights.get('looked-at')][0]?.getClientRects()[0]"
TOP = f"{BOX}?.top ?? innerHeight"
MIDDLE = f"(({{ left, width, top, height }}) => [left + width / 2, top + height / 2])({BOX})"


@contextmanager
def served(model: str, speculate: str) -> Iterator[str]:
    """Run a server and yield the address of the playground."""
    command = [sys.executable, "-m", "outrider", "serve", model, "--port=0", f"--speculate={speculate}"]
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


def ask(page: Any, tokens: int) -> None:
    """Ask all questions, each in a conversation of its own."""
    page.fill("#max-tokens", str(tokens))
    page.locator("#temperature").fill("0")
    for number, question in enumerate(QUESTIONS):
        if number:
            page.get_by_role("button", name="New conversation").click()
            page.locator(".turn").first.wait_for(state="detached")
        page.fill("#prompt", question)
        page.press("#prompt", "Enter")
        page.locator(".note", has_text="tokens/s").wait_for(timeout=300_000)
    page.evaluate("document.getElementById('scroll').scrollTop = 0")


def open_draft(page: Any) -> None:
    """Point at the step with the largest tree that has accepted and rejected tokens and space for its tooltip."""
    answer = page.locator(".turn.model .answer")
    steps = int(page.locator(".note").text_content().split(" steps")[0].split()[-1])
    answer.focus()
    page.keyboard.press("Home")
    best, most = 0, 0
    for number in range(steps):
        kept, nodes = (page.locator(f"#step svg.tree .node{kind}").count() for kind in (".kept", ""))
        if kept and nodes + kept > most and page.evaluate(TOP) < MAX_TOP:
            best, most = number, nodes + kept
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Home")
    for _ in range(best):
        page.keyboard.press("ArrowRight")
    page.evaluate("document.activeElement.blur()")
    page.mouse.move(*page.evaluate(MIDDLE))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--speculate", default="eagle3:width=6,branches=2,adaptive=false")
    parser.add_argument("--tokens", type=int, default=134)
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    path = os.environ.get("OUTRIDER_CHROMIUM") or shutil.which("chromium")
    with served(arguments.model, arguments.speculate) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 920}, color_scheme="light")
        page.goto(url)
        page.locator("#method option").first.wait_for(state="attached")
        ask(page, arguments.tokens)
        page.locator("#settings summary").click()  # the figures take its place
        open_draft(page)
        page.screenshot(path=arguments.file)
        browser.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
