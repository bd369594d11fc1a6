"""Answers on the playground's page in a real Chromium: Markdown, sanitizing, colors of tokens in rendered text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playground_page import answered, ask, expect, in_tokens, ready
from scripted_server import REPEATS, ScriptedServer

pytestmark = pytest.mark.browser
Opener = Callable[..., Any]
CODE = 'def area(width, height):\n    """Multiply."""\n    return width * height  # both'
MARKDOWN = f"""# Result

The **new** function with `width`:

```python
{CODE}
```

1. First point
2. Second point
   ```js
   let nested = 1;
   ```

| name | value |
|---|---:|
| width | 3 |

See [the docs](https://docs.example/page) & more.
"""
ATTACKS = (
    '<img src="x" onerror="window.attacked = 1">',
    "<script>window.attacked = 2</script>",
    "[link](javascript:window.attacked=3)",
    "![picture](https://elsewhere.example/pixel.png)",
    '<iframe src="https://elsewhere.example"></iframe>',
    '<a href="#" onclick="window.attacked = 4">click</a>',
    "<style>body { display: none }</style>",
    '```<img src=x onerror="window.attacked=5">\ncode <img src=x onerror="window.attacked=6">\n```',
    "<svg><a xlink:href='javascript:window.attacked=7'><text>x</text></a></svg>",
)
# The text under each highlight, in order.
PAINTED = """() => Object.fromEntries([...CSS.highlights].map(([name, ranges]) => [name, [...ranges].map((one) => {
  const range = document.createRange();
  range.setStart(one.startContainer, one.startOffset);
  range.setEnd(one.endContainer, one.endOffset);
  return range.toString();
})]))"""


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer(answers={"render": MARKDOWN, "attack": "\n\n".join(ATTACKS), "json": '{"a": 1}'})


def test_an_answer_is_rendered_as_markdown(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    ask(page, "render")
    answer = answered(page)
    expect(answer.locator("h3")).to_have_text("Result")
    expect(answer.locator("strong")).to_have_text("new")
    block = answer.locator("pre code").first
    assert block.text_content() == CODE
    assert "mono" in block.evaluate("one => getComputedStyle(one).fontFamily")
    expect(block.locator(".hljs-keyword").first).to_have_text("def")
    assert answer.locator("td").all_text_contents() == ["width", "3"]
    assert answer.locator("ol > li").count() == 2
    link = answer.locator("a")
    assert link.get_attribute("href") == "https://docs.example/page"
    assert "noopener" in str(link.get_attribute("rel"))


def test_code_and_answers_can_be_copied(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app, permissions=["clipboard-read", "clipboard-write"]))
    ask(page, "render")
    answer = answered(page)
    answer.get_by_role("button", name="Copy this code").first.click()
    expect(answer.get_by_title("Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == CODE
    page.get_by_role("button", name="Copy this answer").click()
    expect(page.get_by_title("Copied")).to_have_count(2)
    assert page.evaluate("navigator.clipboard.readText()") == MARKDOWN


@pytest.mark.parametrize("view", ["#view-rendered", "#view-tokens"])
def test_html_in_an_answer_is_text(server: ScriptedServer, visit: Opener, view: str) -> None:
    page = ready(visit(server.app))
    page.click(view)
    ask(page, "attack")
    answer = answered(page)
    page.wait_for_timeout(200)
    assert page.evaluate("window.attacked") is None
    assert answer.locator("img, script, iframe, style, svg:not(.icon), [onerror], [onclick]").count() == 0
    assert "javascript:" not in answer.evaluate("one => [...one.querySelectorAll('a')].map((a) => a.href).join()")
    assert '<img src="x" onerror="window.attacked = 1">' in str(answer.text_content())
    page.reload()  # from the storage
    ready(page)
    page.locator("#conversation-list .title").click()
    answered(page)
    assert page.evaluate("window.attacked") is None


def test_a_prompt_is_not_rendered_as_html(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    ask(page, ATTACKS[0] + "\n```\n" + ATTACKS[1] + "\n```")
    answered(page)
    assert page.locator(".said img, .said script").count() == 0
    assert page.evaluate("window.attacked") is None


def test_tokens_keep_their_colors_in_rendered_text(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    ask(page, "render")
    answered(page)
    painted = page.evaluate(PAINTED)
    words = MARKDOWN.split()
    for name, every in (("kept", 0), ("by-1", 1), ("corrected", 2)):
        # Each word of three, without the markup that surrounds it.
        expected = [word for index, word in enumerate(words) if index % 3 == every]
        joined = "".join(painted[name])
        assert all(any(part.strip() in word for word in expected) for part in painted[name] if part.strip()), name
        assert len("".join(joined.split())) > 0.6 * sum(len(word.strip("#*`|:-")) for word in expected), name
    page.uncheck("#colors")
    assert list(page.evaluate(PAINTED)) == ["looked-at"]
    page.check("#colors")
    assert page.evaluate(PAINTED)["kept"] == painted["kept"]
    page.click("#new-conversation")
    expect(page.locator(".turn")).to_have_count(0)
    assert page.evaluate(PAINTED)["kept"] == [], "highlights of removed answers are released"


def test_a_step_of_rendered_text_can_be_selected(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    ask(page, "render")
    answer = answered(page)
    answer.locator("strong").hover()
    expect(page.locator("#tip .summary")).to_contain_text("Drafted 3 tokens, 2 accepted.")
    answer.locator("strong").click()
    expect(page.locator("#step")).to_contain_text("**new**")
    answer.focus()
    page.keyboard.press("Home")
    expect(page.locator("#step .summary")).to_contain_text("Step 1.")
    assert "Result" in "".join(page.evaluate(PAINTED)["looked-at"])


def test_both_views_show_the_same_answer(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    page.check("#tokens-while-streaming")
    ask(page, "render")
    expect(answered(page).locator("h3")).to_have_text("Result")
    in_tokens(page)
    assert page.locator(".turn.model .answer").text_content() == MARKDOWN
    expect(page.locator("#color-switch")).to_be_hidden()
    page.click("#view-rendered")
    expect(page.locator(".turn.model .answer h3")).to_be_visible()


def test_json_is_shown_as_code(server: ScriptedServer, visit: Opener) -> None:
    page = ready(visit(server.app))
    page.select_option("#format", "json")
    ask(page, "json")
    expect(answered(page).locator("pre code")).to_have_text('{"a": 1}')
    assert server.requests[0]["response_format"] == {"type": "json_object"}


def test_colors_name_the_drafters_of_a_combination(visit: Opener) -> None:
    page = in_tokens(ready(visit(ScriptedServer(method="suffix+ngram").app)))
    ask(page, "Why?")
    answered(page)
    assert page.locator("#legend-kept .token").all_text_contents() == ["suffix", "ngram", "several"]
    styles = [page.locator(f".answer .{name}").first.evaluate("one => getComputedStyle(one).backgroundColor")
              for name in ("kept", "by-1", "corrected")]  # fmt: skip
    assert len(set(styles)) == 3
    expect(page.locator("#drafters")).to_contain_text("suffix")
    expect(page.locator("#drafters dd").first).to_have_text("20 of 36 accepted")  # tokens 1, 3, 4 and 6 of a draft


def test_reasoning_is_folded_and_not_sent_back(visit: Opener) -> None:
    server = ScriptedServer(thoughts=2, answers={"think": "So think first. **Then** answer the question at last."})
    page = ready(visit(server.app))
    ask(page, "think")
    answer = answered(page)
    reasoning = answer.locator("details.reasoning")
    assert reasoning.get_attribute("open") is None
    reasoning.locator("summary").click()
    expect(reasoning).to_contain_text("So think first.")
    expect(answer.locator(":scope > p")).to_have_text("question at last.")
    assert page.evaluate(PAINTED)["by-1"] == [" think", " answer", " at"], "reasoning and answer have their colors"
    ask(page, "More?")
    answered(page, 2)
    assert server.requests[1]["messages"][1] == {"role": "assistant", "content": " question at last."}
    page.reload()
    ready(page)
    page.locator("#conversation-list .title").click()
    expect(page.locator("details.reasoning").first).to_be_visible()


def test_the_page_says_why_drafts_are_suspended(visit: Opener) -> None:
    why = "a step with 2 rows costs 2.10x of one row here, and yields 1.57x the tokens at acceptance rate 0.57"
    metrics = {"num_suspended_steps": 12, "suspension": {"cost": 2.1, "acceptance_rate": 0.57, "reason": why}}
    server = ScriptedServer(metrics=metrics)
    page = ready(visit(server.app))
    ask(page, "Why?")
    answered(page)
    expect(page.locator("#reason")).to_contain_text(f"Drafts were suspended in 12 of {7 * REPEATS} steps: {why}.")
    assert "always_draft" not in server.requests[0]
    page.check("#always-draft")
    page.click("#show-race")
    ask(page, "Why?")
    expect(page.locator("#race-reason")).to_contain_text("costs 2.10x")
    assert "always_draft" not in server.requests[1] and server.requests[2]["always_draft"] is True
