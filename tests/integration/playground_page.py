"""Actions on the playground's page in a browser, for tests."""

from __future__ import annotations

from typing import Any


def expect(locator: Any) -> Any:
    from playwright.sync_api import expect

    expect.set_options(timeout=20_000)
    return expect(locator)


def ready(page: Any) -> Any:
    """Wait until the page knows the model's methods."""
    expect(page.locator("#method option")).not_to_have_count(0)
    return page


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answered(page: Any, count: int = 1) -> Any:
    """Wait until this number of answers is complete; return the last one."""
    expect(page.locator(".note", has_text="tokens/s")).to_have_count(count)
    return page.locator(".turn.model .answer").nth(count - 1)


def in_tokens(page: Any) -> Any:
    """Show answers token by token."""
    page.click("#view-tokens")
    return page
