"""`outrider trace`: every step of an answer, as JSON, in a terminal, as a page and as a picture."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from outrider.diagnostics.trace import AnswerStep, AnswerTrace, DraftNode, Ending, rows, sentence, visible
from outrider.diagnostics.trace_render import page, picture

Run = Callable[..., Any]
PROMPT = "abcabc<b>&abcabcabc"
SMALL = ("--backend", "cpu", "--max-tokens", 24, "--raw")
TREES = "suffix:branches=3,width=9,adaptive=false,least=0"


def read(result: Any) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    trace: dict[str, Any] = json.loads(result.stdout)
    return trace


@pytest.mark.parametrize("speculate", ["none", "ngram:adaptive=false", TREES])
def test_the_steps_add_up_to_the_answer_of_generate(outrider: Run, model: Path, speculate: str) -> None:
    traced = read(outrider("trace", PROMPT, "-m", model, "--speculate", speculate, *SMALL, "--json"))
    (line,) = outrider("generate", PROMPT, "-m", model, "--speculate", speculate, *SMALL, "--json").stdout.splitlines()
    answer = json.loads(line)
    steps = traced["steps"]
    assert [token for step in steps for token in step["tokens"]] == answer["token_ids"]
    assert "".join(words for step in steps for words in step["shown"]) == traced["text"] == answer["text"]
    assert len(steps) == answer["stats"]["steps"]
    assert sum(len(step["nodes"]) for step in steps) == answer["stats"]["drafted"]
    # In the stats the last token of an answer counts as the model's own; the trace counts it as drafted.
    assert 0 <= sum(step["kept"] for step in steps) - answer["stats"]["accepted"] <= 1
    assert steps[-1]["ending"] == ("budget" if answer["finish_reason"] == "length" else "end of text")
    for step in steps:
        kept = [node["text"] for node in step["nodes"] if node["kept"]]
        assert step["texts"][: step["kept"]] == kept
        assert step["verify"] > 0 and step["host"] > 0 and step["draft"] >= 0
    if speculate != "none":
        assert sum(step["draft"] for step in steps) > 0
    assert traced["first_step_seconds"] >= steps[0]["verify"]
    assert traced["tokens_per_second"] > 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_a_page_on_a_full_disk_is_one_sentence(outrider: Run, model: Path) -> None:
    result = outrider("trace", PROMPT, "-m", model, *SMALL, "--html", "/dev/full")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1] == "error: cannot write `/dev/full`: no space left on device"


def test_the_terminal_table_is_readable_without_colors(outrider: Run, model: Path) -> None:
    result = outrider("trace", PROMPT, "-m", model, "--speculate", TREES, *SMALL)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split()[:6] == ["step", "draft", "verify", "host", "accepted", "ended"]
    assert "prefill" in lines[1] and "→" in lines[1]
    assert any("rejected" in line and "✗" in line for line in lines)
    assert "\x1b" not in result.stdout
    assert re.search(r"24 tokens in \d+ steps", result.stdout)


class PageReader(HTMLParser):
    """Collect unclosed tags, ids, links, and tags that a browser would fetch."""

    VOID = frozenset({"meta", "input", "circle", "path", "rect", "line"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if tag not in self.VOID:
            self.open.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.fetched += [tag] if tag in ("script", "link", "img", "iframe") or "src" in found else []
        self.links += [found["href"]] if "href" in found else []

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_is_self_contained_and_links_every_step(outrider: Run, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.html"
    result = outrider("trace", PROMPT, "-m", model, "--speculate", TREES, *SMALL, "--html", file)
    assert result.exit_code == 0 and result.stdout == "" and "written" in result.stderr
    text = file.read_text()
    reader = PageReader()
    reader.feed(text)
    assert reader.open == [] and reader.fetched == []
    assert "http" not in text and "url(" not in text and "@import" not in text
    steps = {name for name in reader.ids if re.fullmatch(r"s\d+", name)}
    assert len(steps) > 5 and {link.removeprefix("#") for link in reader.links} == steps
    assert len(reader.ids) == len(set(reader.ids))
    assert "<b>&abc" not in text and "&lt;b&gt;&amp;abc" in text
    assert 'class="tree"' in text and 'class="times"' in text and "prefers-color-scheme" not in text
    assert "light-dark(" in text and "color-scheme: light dark" in text


def test_the_png_has_a_row_for_every_step(outrider: Run, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.png"
    result = outrider("trace", PROMPT, "-m", model, "--speculate", TREES, *SMALL, "--png", file, "--json")
    count = len(read(result)["steps"])
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[start : start + 4], "big") for start in (16, 20))
    assert width == 2 * 1280 and height > 2 * 32 * count


def test_a_missing_png_renderer_is_named_with_its_remedy(
    outrider: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    result = outrider("trace", PROMPT, "-m", model, *SMALL, "--png", tmp_path / "trace.png")
    assert result.exit_code == 1 and "install `outrider[png]`" in result.stderr


def test_an_output_path_that_cannot_be_written_is_refused_before_the_model_loads(outrider: Run, tmp_path: Path) -> None:
    result = outrider("trace", PROMPT, "-m", "no-such-model", "--html", tmp_path / "nowhere" / "t.html")
    assert result.exit_code == 1 and "make it first" in result.stderr
    result = outrider("trace", PROMPT, "-m", "no-such-model", "--html", tmp_path)
    assert result.exit_code == 1 and "is a folder" in result.stderr


# ---- one step ----


def step(parents: list[int], kept: list[int], texts: list[str], ending: Ending = Ending.REJECTED) -> AnswerStep:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    nodes = [
        DraftNode(token=index, text=f" w{index}", parent=parent, depth=depths[index], kept=index in kept)
        for index, parent in enumerate(parents)
    ]
    return AnswerStep(2, nodes, list(range(len(texts))), texts, texts, len(kept), ending, 0.001, 0.01, 0.0001)


def test_the_accepted_branch_takes_the_first_line() -> None:
    assert rows(step([-1, 0, 1], [0], ["x", "y"])) == [0, 0, 0]
    #   0 - 2      the accepted branch is 1 - 3, so it comes first
    #   1 - 3 , 4
    assert rows(step([-1, -1, 0, 1, 1], [1, 3], ["x", "y", "z"])) == [2, 0, 2, 0, 1]


def test_the_models_own_token_is_classified_by_the_draft_before_it() -> None:
    assert step([-1, 0], [0], [" w0", " no"]).own == "corrected"
    assert step([-1, 0], [0, 1], [" w0", " w1", " more"], Ending.DRAFT).own == "bonus"
    assert step([-1, -1, 1], [0], [" w0", " more"], Ending.DRAFT).own == "bonus"
    assert step([], [], ["x"], Ending.NOTHING).own == "plain"


def test_every_ending_has_its_own_sentence() -> None:
    rejected = sentence(step([-1, -1], [], ["\n"]))
    assert rejected == "The model chose “↵” where “·w0” or “·w1” was drafted."
    many = sentence(step([-1] * 5, [], ["a"]))
    assert "“·w2”, among others, was drafted" in many
    assert "“·more” is the model's own" in sentence(step([-1], [0], [" w0", " more"], Ending.DRAFT))
    sentences = {sentence(step([-1], [0], ["a"], ending)) for ending in Ending}
    assert len(sentences) == len(Ending)


def test_white_space_is_made_visible() -> None:
    assert [visible(text) for text in (" a b", "\n    ", "", "\t")] == ["·a·b", "↵␣4", "∅", "⇥"]


def trace(*steps: AnswerStep) -> AnswerTrace:
    machine = {"accelerator": None, "processor": "P", "threads": 1, "level": "portable"}
    return AnswerTrace("m", "suffix", "cpu", machine, "p", 3, 0.0, "", "stop", 0.1, list(steps))


def test_wide_and_deep_trees_stay_within_the_picture() -> None:
    wide = step([-1] * 40, [39], [" w39", "<end>"])
    deep = step(list(range(-1, 39)), list(range(40)), [f" w{n}" for n in range(40)] + ["猫"], Ending.DRAFT)
    found = trace(step([], [], ["x"], Ending.NOTHING), wide, deep)
    root = ElementTree.fromstring(picture(found))
    boxes = [node for node in root.iter("{http://www.w3.org/2000/svg}rect") if "x" in node.attrib]
    assert max(float(node.attrib["x"]) + float(node.attrib["width"]) for node in boxes) < 1280
    assert "+28" in picture(found)  # 12 of 40 branches are drawn
    assert found.rates()[0] == (2, 2) and found.rates()[39] == (1, 1)
    assert page(found).count("w39") >= 3  # the page draws all of them
