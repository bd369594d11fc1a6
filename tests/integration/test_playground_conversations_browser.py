"""Conversations on the playground's page in a real Chromium: stored, edited, exported; examples and settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playground_page import answered, ask, expect, ready
from scripted_server import ANSWER, REPEATS, ScriptedServer

pytestmark = pytest.mark.browser
Opener = Callable[..., Any]
STORED = "Object.keys(localStorage).filter((name) => name.startsWith('conversation:')).length"


def contents(request: dict[str, Any]) -> list[str]:
    return [message["content"] for message in request["messages"] if message["role"] == "user"]


def test_conversations_are_kept_in_the_browser(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    ask(page, "First question")
    answered(page)
    page.click("#new-conversation")
    expect(page.locator(".turn")).to_have_count(0)
    ask(page, "Second question")
    answered(page)
    page.reload()
    ready(page)
    titles = page.locator("#conversation-list .title")
    expect(titles).to_contain_text(["Second question", "First question"])
    titles.nth(1).click()
    expect(titles.nth(1)).to_have_attribute("aria-current", "true")
    expect(page.locator(".typed")).to_have_text("First question")
    expect(page.locator(".turn.model .answer")).to_contain_text(ANSWER)
    page.click("#view-tokens")
    expect(page.locator(".answer .token.corrected").first).to_be_visible()  # the trace is stored too
    ask(page, "Follow-up")
    answered(page, 2)
    assert contents(server.requests[2]) == ["First question", "Follow-up"]
    expect(titles).to_contain_text(["First question", "Second question"])


def test_a_conversation_can_be_renamed_and_deleted(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    ask(page, "A question")
    answered(page)
    row = page.locator("#conversation-list li")
    row.hover()
    row.get_by_role("button", name="Rename").click()
    page.keyboard.type("Sky")
    page.keyboard.press("Enter")
    expect(row.locator(".title")).to_contain_text("Sky")
    ask(page, "Again")
    answered(page, 2)
    expect(row.locator(".title")).to_contain_text("Sky")  # the name survives the next answer
    row.hover()
    row.get_by_role("button", name="Delete").click()
    expect(page.locator(".turn")).to_have_count(0)
    expect(row).to_have_count(0)
    assert page.evaluate(STORED) == 0
    page.get_by_role("button", name="Undo").click()
    expect(row).to_have_count(1)
    row.locator(".title").click()
    expect(page.locator(".turn")).to_have_count(4)


def test_a_message_can_be_edited(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    ask(page, "First")
    answered(page)
    ask(page, "Second")
    answered(page, 2)
    page.get_by_role("button", name="Edit this message").first.click()
    area = page.get_by_label("Edit the message")
    expect(area).to_be_focused()
    area.press("Escape")
    expect(area).to_have_count(0)
    page.get_by_role("button", name="Edit this message").first.click()
    area.fill("Changed")
    area.press("Enter")
    answered(page)
    expect(page.locator(".turn")).to_have_count(2)
    assert contents(server.requests[2]) == ["Changed"]
    page.focus("#prompt")
    page.keyboard.press("ArrowUp")
    expect(area).to_have_value("Changed")


def test_an_answer_can_be_generated_again(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    ask(page, "First")
    answered(page)
    page.get_by_role("button", name="Generate this answer again").click()
    expect(page.locator("#status")).to_have_text("")
    answered(page)
    assert server.requests[0]["messages"] == server.requests[1]["messages"]
    expect(page.locator(".turn")).to_have_count(2)


def test_a_failed_answer_restores_what_it_replaced(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    ask(page, "First")
    answered(page)
    page.get_by_role("button", name="Edit this message").click()
    area = page.get_by_label("Edit the message")
    area.fill("be full")
    area.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("The server is full")
    expect(page.locator(".typed")).to_have_text("First")
    expect(page.locator(".turn.model .answer")).to_contain_text(ANSWER)


def test_another_conversation_stops_the_answer(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    ask(page, "be long")
    expect(page.locator(".turn.model .answer")).to_contain_text("The sky")
    page.click("#new-conversation")
    expect(page.locator(".turn")).to_have_count(0)
    page.locator("#conversation-list .title").click()
    expect(page.locator(".note")).to_contain_text("stopped")
    assert server.hung_up == 1


def test_a_conversation_is_exported(server: ScriptedServer, visit: Opener, tmp_path: Path) -> None:
    page = ready(visit(server.app))
    page.click("#export-json")
    expect(page.locator("#status")).to_have_text("There is nothing to export yet.")
    ask(page, "Why is it blue?")
    answered(page)
    texts = {}
    for kind in ("markdown", "json"):
        with page.expect_download() as caught:
            page.click(f"#export-{kind}")
        texts[caught.value.suggested_filename] = Path(caught.value.path()).read_text()
    assert list(texts) == ["why-is-it-blue.md", "why-is-it-blue.json"]
    assert "## You\n\nWhy is it blue?\n" in texts["why-is-it-blue.md"]
    assert f"## Model\n\n{ANSWER}" in texts["why-is-it-blue.md"]
    stored = json.loads(texts["why-is-it-blue.json"])
    assert stored["model"] == "folder/tiny-model"
    assert [message["role"] for message in stored["messages"]] == ["user", "assistant"]
    assert len(stored["messages"][1]["steps"]) == 7 * REPEATS


def test_the_storage_is_bounded(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    result = page.evaluate(
        """async () => {
          const { create, list, save } = await import("./page/conversations.js");
          const steps = [{ text: ["x".repeat(20000)] }];
          const ids = [];
          for (let count = 0; count < 130; count += 1) {
            const one = create();
            one.messages = [{ role: "user", content: "y".repeat(30000) }, { role: "assistant", content: "z", steps }];
            one.updated = count;
            save(one, { touch: false });
            ids.push(one.id);
          }
          const stored = list();
          return {
            count: stored.length,
            size: JSON.stringify(stored).length,
            newest: stored[0].id === ids[129] && Boolean(stored[0].messages[1].steps),
            oldest: Boolean(stored[stored.length - 1].messages[1].steps),
          };
        }"""
    )
    assert result["newest"] and not result["oldest"]
    assert 50 < result["count"] <= 100 and result["size"] < 2_100_000


def test_damaged_and_forbidden_storage_do_not_break_the_page(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    page.evaluate("localStorage.setItem('conversation:x', '{broken'), localStorage.setItem('conversation:y', '7')")
    page.reload()
    ready(page)
    expect(page.locator("#conversation-list li")).to_have_count(0)
    page.evaluate("() => { Storage.prototype.setItem = () => { throw new Error('full'); }; }")
    ask(page, "Why?")
    answered(page)
    expect(page.locator("#status")).to_contain_text("This browser stores no conversations")


def test_settings_survive_a_reload(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    page.select_option("#method", "none")
    page.fill("#temperature", "0.25")
    page.dispatch_event("#temperature", "change")
    page.fill("#seed", "7")
    page.fill("#system", "Be brief.")
    page.check("#tokens-while-streaming")
    page.reload()
    ready(page)
    expect(page.locator("#method")).to_have_value("none")
    expect(page.locator("#temperature-value")).to_have_text("0.25")
    expect(page.locator("#tokens-while-streaming")).to_be_checked()
    ask(page, "Hello")
    answered(page)
    sent = server.requests[-1]
    assert (sent["speculate"], sent["temperature"], sent["seed"]) == (False, 0.25, 7)
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    page.evaluate("localStorage.setItem('settings', '[1')")
    page.reload()
    expect(ready(page).locator("#temperature-value")).to_have_text("0.70")


def test_examples_fill_in_the_prompt_and_its_settings(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    page.get_by_role("button", name="Edit with a prediction").click()
    page.press("#prompt", "Enter")
    answered(page)
    sent = server.requests[0]
    assert "def count_words" in sent["prediction"]["content"] and "speculate" not in sent
    expect(page.locator("#presets")).to_be_hidden()
    page.click("#new-conversation")
    expect(page.locator("#prediction")).to_have_value("")
    page.locator("#presets").get_by_role("button", name="JSON").click()
    page.press("#prompt", "Enter")
    answered(page)
    sent = server.requests[1]
    assert sent["response_format"]["type"] == "json_schema"
    assert sent["response_format"]["json_schema"]["schema"]["required"] == ["people"]
    assert "prediction" not in sent
    page.get_by_role("button", name="Remove: JSON schema").click()
    ask(page, "Thanks")
    answered(page, 2)
    assert "response_format" not in server.requests[2]


def test_a_broken_schema_is_not_sent(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    page.select_option("#format", "schema")
    page.fill("#schema", '{"type": ')
    ask(page, "Why?")
    assert "The schema is not JSON" in page.evaluate("document.getElementById('schema').validationMessage")
    assert not server.requests
    page.fill("#schema", '{"type": "object"}')
    ask(page, "Why?")
    answered(page)
    assert server.requests[0]["response_format"]["json_schema"] == {"name": "answer", "schema": {"type": "object"}}


def test_a_race_drafts_from_the_prediction_in_one_lane_only(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    page.fill("#prediction", "The sky")
    page.click("#show-race")
    ask(page, "Why?")
    expect(page.locator("#verdict[data-state=done]")).to_be_visible()
    plain, drafted = server.requests
    assert plain["speculate"] is False and "prediction" not in plain
    assert drafted["prediction"] == {"type": "content", "content": "The sky"} and "speculate" not in drafted
    expect(page.locator("#lane-drafted")).to_have_text("Drafts by prediction")


def test_a_race_says_that_suffix_has_seen_the_answer(visit: Opener) -> None:
    page = ready(visit(ScriptedServer(method="suffix+ngram").app))
    page.click("#show-race")
    ask(page, "Why?")
    expect(page.locator("#verdict[data-state=done]")).to_contain_text("suffix had seen this answer in the plain run.")
    page.select_option("#method", "ngram")
    ask(page, "Why?")
    expect(page.locator("#lane-drafted")).to_have_text("Drafts by ngram")
    expect(page.locator("#verdict[data-state=done]")).not_to_contain_text("suffix had seen")
