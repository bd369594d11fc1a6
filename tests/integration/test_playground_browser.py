"""The playground in a real Chromium. `make test-browser` runs it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playground_page import ask, expect, in_tokens, ready
from scripted_server import ANSWER, KEY, REPEATS, ScriptedServer

from outrider import AsyncLLM
from outrider.server.app import build_app
from outrider.server.options import ServerOptions

pytestmark = pytest.mark.browser
WHOLE = " ".join([ANSWER] * REPEATS)
REPLAY = 'document.getElementById("replay").click(), document.querySelectorAll(".clock.finished").length'
Opener = Callable[..., Any]


def test_a_conversation_is_shown_with_its_drafts(server: ScriptedServer, visit: Opener) -> None:
    page = in_tokens(ready(visit(server.app)))
    assert page.input_value("#temperature") == "0.7"
    page.fill("#width", "5")
    page.fill("#seed", "7")
    page.fill("#max-tokens", "99")
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0.5")
    page.fill("#top-p", "0.9")
    page.fill("#top-k", "40")
    ask(page, "Why is the sky blue?")
    answer = page.locator(".turn.model .answer")
    expect(page.locator(".note")).to_contain_text(f"{15 * REPEATS} tokens in {7 * REPEATS} steps")
    assert answer.text_content() == WHOLE
    first = page.locator(".answer .token")
    kinds = [re.sub("token ", "", str(first.nth(index).get_attribute("class"))) for index in range(7)]
    assert kinds == ["plain", "kept", "by-1", "corrected", "kept", "by-1", "bonus"]
    sent = server.requests[0]
    assert sent["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why is the sky blue?"},
    ]
    expected = {"speculate": "ngram", "speculate_width": 5, "seed": 7, "max_tokens": 99, "temperature": 0.5}
    expected |= {"top_p": 0.9, "top_k": 40}
    assert {name: sent[name] for name in expected} == expected
    assert sent["stream"] and sent["trace"] and sent["stream_options"] == {"include_usage": True}
    page.select_option("#method", "none")
    ask(page, "And at night?")
    expect(page.locator(".note")).to_have_count(2)
    expect(page.locator(".note").nth(1)).to_contain_text("tokens/s")
    assert server.requests[1]["speculate"] is False
    assert "speculate_width" not in server.requests[1]
    roles = [message["role"] for message in server.requests[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    page.click("#new-conversation")
    expect(page.locator(".turn")).to_have_count(0)


def test_rejected_tokens_are_shown(server: ScriptedServer, visit: Opener) -> None:
    page = in_tokens(ready(visit(server.app)))
    ask(page, "Why?")
    expect(page.locator(".note")).to_contain_text("tokens/s")
    page.locator(".step").nth(1).hover()
    expect(page.locator("#tip")).to_be_visible()
    expect(page.locator("#tip .summary")).to_have_text("Step 2. Drafted 3 tokens, 2 accepted.")
    assert page.locator("#tip s").all_text_contents() == ["\u00a0green"]
    assert "line-through" in page.locator("#tip s").evaluate("one => getComputedStyle(one).textDecorationLine")
    expect(page.locator("#tip svg.tree")).to_have_count(0)
    page.locator(".step").nth(3).click()
    page.mouse.move(0, 0)
    expect(page.locator("#tip")).to_be_hidden()
    tree = page.locator("#step svg.tree")
    expect(tree).to_be_visible()
    assert tree.locator(".node").count() == 6
    assert tree.locator(".node.kept").all_text_contents() == ["\u00a0scatters", "\u00a0blue", "\u00a0light"]
    assert page.locator("#step s").all_text_contents() == ["\u00a0is", "\u00a0was", "\u00a0red"]


def test_acceptance_rates_are_shown(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    ask(page, "Why?")
    expect(page.locator(".note")).to_contain_text("tokens/s")
    shares = page.locator(".positions li").all_text_contents()
    # Five drafts per repetition: accepted are 4 of 5 at the first position, 3 of 4 at the second, 1 of 2 at the third.
    assert shares == [f"180 %{4 * REPEATS} of {5 * REPEATS}", f"275 %{3 * REPEATS} of {4 * REPEATS}", "350 %4 of 8"]
    assert page.locator("#kept-share").text_content() == f"57 % of {14 * REPEATS}"
    assert page.locator("#per-step").text_content() == "2.14"
    assert float(page.locator("#rate").text_content()) > 1
    expect(page.locator("#spark .line")).to_be_visible()


def test_the_race_compares_both_modes(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    page.click("#show-race")
    page.fill("#temperature", "1")
    ask(page, "Why?")
    expect(page.locator("#verdict[data-state=done]")).to_contain_text("The same text, character by character")
    expect(page.locator("#verdict")).to_contain_text(re.compile(r"\d\.\d\d times as fast"))
    expect(page.locator(".clock.finished")).to_have_count(2)
    plain, drafted = server.requests
    assert (plain["speculate"], drafted["speculate"]) == (False, "ngram")
    assert not plain.get("stream") and not drafted.get("stream"), "the page would compete with the engine"
    assert plain["seed"] == drafted["seed"], "without the same dice the texts could not be the same"
    assert page.locator("#text-plain").text_content() == page.locator("#text-drafted").text_content() == WHOLE
    clocks = [float(str(text).split()[0]) for text in page.locator(".clock").all_text_contents()]
    assert clocks == [round((steps - 1) * server.pause, 2) for steps in (15 * REPEATS, 7 * REPEATS)], "engine's times"
    expect(page.locator("svg.axis .course")).to_have_count(2)
    assert page.evaluate(REPLAY) == 0, "both start again"
    expect(page.locator(".clock.finished")).to_have_count(2)


def test_a_race_without_drafts_claims_no_speedup(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    page.click("#show-race")
    ask(page, "draft nothing")
    expect(page.locator("#verdict[data-state=done]")).to_contain_text("Nothing was drafted")
    expect(page.locator("#verdict")).not_to_contain_text("times as fast")
    expect(page.locator("#ratio")).to_be_hidden()


def test_the_race_begins_with_an_edit_as_prompt(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    page.click("#show-race")
    expect(page.locator("#prompt")).to_have_value(re.compile(r"^Rename the parameter"))
    page.click("#show-chat")
    expect(page.locator("#prompt")).to_have_value("")
    page.fill("#prompt", "my own")
    page.click("#show-race")
    expect(page.locator("#prompt")).to_have_value("my own")


def test_a_race_can_be_stopped(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    page.click("#show-race")
    ask(page, "be long")
    expect(page.locator("#clock-plain")).to_have_text(re.compile(r"\d\.\d s …"))
    page.keyboard.press("Escape")
    expect(page.locator("#verdict[data-state=stopped]")).to_have_text("Stopped before the end.")
    expect(page.locator("#send")).to_be_visible()


def test_a_race_with_different_texts_is_reported(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app, reduced_motion="reduce"))
    page.click("#show-race")
    ask(page, "disagree")
    expect(page.locator("#verdict[data-state=done]")).to_contain_text("The texts differ from character 12 on")
    assert page.evaluate(REPLAY) == 2, "nothing moves for those who do not want it"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("be full", "The server is full: try again in 7 seconds."),
        ("be strict", "The server rejected the request: `temperature` is 9: it must be below 3."),
    ],
)
def test_an_error_is_shown_as_a_sentence(server: ScriptedServer, visit: Opener, text: str, sentence: str) -> None:
    page = ready(visit(server.app))
    ask(page, text)
    expect(page.get_by_role("alert")).to_have_text(sentence)
    expect(page.locator("#prompt")).to_have_value(text)
    expect(page.locator(".turn")).to_have_count(0)
    ask(page, "Why?")
    expect(page.locator(".note")).to_contain_text("tokens/s")
    expect(page.get_by_role("alert")).to_have_count(0)
    assert len(server.requests[1]["messages"]) == 1, "what was refused is not part of the conversation"


def test_a_broken_stream_keeps_the_text_so_far(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    ask(page, "break")
    expect(page.get_by_role("alert")).to_have_text("The connection was lost during the answer.")
    expect(page.locator("#log .answer")).to_have_text("Half")
    expect(page.locator(".note")).to_contain_text("failed")


def test_an_unreachable_server_is_reported(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    page.route("**/v1/**", lambda route: route.abort())
    ask(page, "Why?")
    expect(page.get_by_role("alert")).to_contain_text("The server does not answer")
    expect(page.locator("#send")).to_be_visible()


def test_the_api_key_is_requested_and_stored_for_the_session(visit: Opener) -> None:
    page = visit(ScriptedServer(key=KEY).app)
    expect(page.get_by_role("alert")).to_contain_text("requires an API key")
    expect(page.locator("#key")).to_be_focused()
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    ready(page)
    expect(page.get_by_role("alert")).to_have_count(0)
    ask(page, "Why?")
    expect(page.locator(".note")).to_contain_text("tokens/s")
    page.reload()
    ready(page)
    assert KEY not in page.evaluate("JSON.stringify(localStorage)")


def test_the_page_works_with_the_keyboard(server: ScriptedServer, visit: Opener) -> None:
    page = in_tokens(ready(visit(server.app)))
    keys = page.keyboard
    page.focus("#prompt")
    expect(page.locator("#prompt")).to_be_focused()
    keys.type("One line")
    keys.press("Shift+Enter")
    keys.type("and another")
    keys.press("Enter")
    expect(page.locator(".note")).to_contain_text("tokens/s")
    assert server.requests[0]["messages"][0]["content"] == "One line\nand another"
    for _ in range(3):  # the buttons of the answer come after it
        keys.press("Shift+Tab")
    expect(page.locator("#log .answer")).to_be_focused()
    assert page.locator("#log .answer").evaluate("one => getComputedStyle(one).outlineStyle") == "solid"
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        keys.press(key)
    expect(page.locator("#step .summary")).to_have_text("Step 2. Drafted 3 tokens, 2 accepted.")
    expect(page.locator("#tip s")).to_be_visible()
    keys.press("End")
    expect(page.locator("#step .summary")).to_contain_text(f"Step {7 * REPEATS}.")
    page.focus("#show-race")
    keys.press("Enter")
    expect(page.locator("#race")).to_be_visible()
    expect(page.locator("#prompt")).to_be_focused()


def test_escape_stops_the_stream_on_the_server(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    page.check("#tokens-while-streaming")
    ask(page, "be long")
    expect(page.locator(".step").nth(10)).to_be_attached()
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator("#log")).to_have_attribute("aria-busy", "true")
    page.keyboard.press("Escape")
    expect(page.locator(".note")).to_contain_text("stopped")
    expect(page.locator("#log")).to_have_attribute("aria-busy", "false")
    expect(page.locator("#send")).to_be_visible()
    page.wait_for_timeout(200)
    assert server.hung_up == 1
    ask(page, "Why?")
    expect(page.locator(".note").nth(1)).to_contain_text("tokens/s")
    assert [message["role"] for message in server.requests[1]["messages"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_schemes_have_contrast(server: ScriptedServer, visit: Opener, scheme: str) -> None:
    page = visit(server.app, color_scheme=scheme)

    def darkness() -> bool:
        red = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
        return int(red) < 128

    assert darkness() == (scheme == "dark")
    page.click("#theme")
    assert darkness() == (scheme == "light")
    page.reload()
    assert darkness() == (scheme == "light")


def test_a_width_beyond_the_maximum_is_not_sent(server: ScriptedServer, visit: Opener) -> None:
    page = visit(server.app)
    page.fill("#width", "65")
    page.locator("#settings summary").click()
    ask(page, "Why?")
    assert page.locator("#settings").get_attribute("open") is not None
    assert page.evaluate("document.getElementById('width').validationMessage") != ""
    assert page.input_value("#prompt") == "Why?" and page.locator(".turn").count() == 0
    page.fill("#width", "4")
    ask(page, "Why?")
    expect(page.locator(".note")).to_contain_text("tokens/s")


def test_the_number_of_tokens_fits_the_limit_of_the_server(visit: Opener) -> None:
    server = ScriptedServer(max_tokens=100)
    page = ready(visit(server.app))
    expect(page.locator("#max-tokens")).to_have_value("50")
    ask(page, "Why?")
    expect(page.locator(".note")).to_contain_text("tokens/s")
    page.fill("#max-tokens", "101")
    ask(page, "Why?")
    assert page.evaluate("document.getElementById('max-tokens').validationMessage") != ""
    assert len(server.requests) == 1


def test_arrow_keys_scroll_to_the_step_and_show_its_draft(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app, height=400))
    for count in range(3):
        ask(page, "Why?")
        expect(page.locator(".note", has_text="tokens/s")).to_have_count(count + 1)
    page.locator("#log .answer").first.focus()
    page.evaluate("document.getElementById('scroll').scrollTop = 1e6")
    page.keyboard.press("Home")
    page.wait_for_timeout(100)  # the page reports the scrolling later
    expect(page.locator("#tip")).to_be_visible()
    assert page.evaluate("document.getElementById('scroll').scrollTop") < 200


def test_no_character_between_tokens_is_lost(server: ScriptedServer, visit: Opener) -> None:
    page = visit(server.app)
    shown = page.evaluate(
        """async () => {
          const { Answer } = await import("./page/trace.js");
          const answer = new Answer();
          const add = (content, text) => answer.add({
            choices: [{ delta: { content } }],
            speculation: { steps: [{ drafted: [], parents: null, drafted_text: [], tokens: [], text, accepted: 0 }] },
          }, 0);
          add("So", ["So"]);
          add("", ["\\ufffd"]);
          add(" \\u{1f30a}!", ["\\ufffd", "!"]);
          add("", [" sto"]);
          add("", ["p<end>"]);
          answer.text += " st";
          answer.finish();
          return [answer.flow.map((token) => token.shown), answer.text];
        }"""
    )
    assert shown == [["So", " \U0001f30a", "", "!", " st", ""], "So \U0001f30a! st"]


def test_a_character_has_the_color_of_the_token_that_completes_it(server: ScriptedServer, visit: Opener) -> None:
    page = visit(server.app)
    flow = page.evaluate(
        """async () => {
          const { Answer } = await import("./page/trace.js");
          const answer = new Answer();
          const waves = "\\u{1f30a}".repeat(40);
          const step = { drafted: [7, 9], parents: null, drafted_text: ["", "\\u{1f30b}"],
            drafted_bytes: [[240, 159], [140, 139]], tokens: [7, 8], text: ["", "\\u{1f30a}"],
            bytes: [[240, 159], [140, 138]], accepted: 1 };
          for (let count = 0; count < 40; count += 1) {
            answer.add({ choices: [{ delta: { content: "\\u{1f30a}" } }], speculation: { steps: [step] } }, count);
          }
          const settled = answer.settled;
          return [settled, answer.flow.slice(-2), answer.steps[0].drafted, answer.text === waves];
        }"""
    )
    first = {"text": "", "label": "<0xF0><0x9F>", "shown": "", "kind": "kept", "paint": "kept"}
    wave = "\U0001f30a"
    last = {"text": wave, "label": wave, "shown": wave, "kind": "corrected", "paint": "corrected"}
    assert flow == [80, [first, last], ["<0xF0><0x9F>", "\U0001f30b"], True]


def test_the_page_works_with_a_real_engine(model: Path, visit: Opener) -> None:
    llm = AsyncLLM(str(model), speculate="ngram", cache_tokens=2048)
    try:
        page = ready(visit(build_app(llm, ServerOptions(names=("tiny",)))))
        expect(page.locator("#model")).to_have_text("tiny")
        page.fill("#max-tokens", "48")
        ask(page, "abab")
        expect(page.locator(".note")).to_contain_text("tokens/s")
        page.click("#show-race")
        page.fill("#temperature", "0.3")
        page.select_option("#method", "suffix")
        page.check("#always-draft")  # the latency of a loaded machine must not decide whether there are drafts
        ask(page, "abab")
        expect(page.locator("#verdict[data-state=done]")).to_contain_text("The same text, character by character")
        expect(page.locator("#clock-plain")).to_contain_text(" 48 tokens")
        expect(page.locator("#text-drafted .step.drafted").first).to_be_attached()
        assert "NaN" not in page.locator("#verdict").text_content()
    finally:
        llm.close()
