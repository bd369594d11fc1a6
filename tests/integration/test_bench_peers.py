"""`outrider bench peers`: peers in processes of their own, those that fail, the table, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import pretend_peer
from outrider.bench.peers import export, measure, registry, report
from outrider.bench.peers.environment import Child, Completed, PeerFailedError
from outrider.bench.peers.registry import Peer
from outrider.cli import bench
from outrider.errors import UserError
from waiting import wait_until


@pytest.fixture
def roll(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Who the peers are."""

    def call(*peers: Peer) -> None:
        monkeypatch.setattr(registry, "PEERS", peers)

    return call


def test_json_has_the_figures_of_every_peer(outrider, model: Path, tmp_path: Path, roll: Callable[..., None]) -> None:
    for name in bench.EVALUATION:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": f"{name} one"}) + "\nanother\nand more\n")
    picture = tmp_path / "peers.svg"
    roll(
        pretend_peer.peer(tmp_path, pretend_peer.COUNTS),
        pretend_peer.peer(tmp_path, pretend_peer.DIES, "mortal"),
        pretend_peer.peer(tmp_path, pretend_peer.NO_DRAFTS, "careful"),
        pretend_peer.peer(tmp_path, pretend_peer.COUNTS, "picky", weights="gguf"),
    )
    result = outrider(
        *("bench", "peers", "-m", model, "--folder", tmp_path, "--limit", 2, "--tokens", 12, "--batch", "1,2"),
        *("--prompt-tokens", 40, "--rounds", 1, "--threads", 1, "--speculate", "ngram", "--plot", picture, "--json"),
    )
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["sets"] == {"mt_bench": 2, "humaneval": 2, "gsm8k": 2}
    mine, counts, careful = found["engines"]
    assert [one["name"] for one in found["engines"]] == ["outrider", "counts", "careful"]
    assert [(one["batch"], one["way"]) for one in mine["decode"]] == [
        (batch, way) for batch in (1, 2) for way in ("plain", "speculation")
    ]
    # Two milliseconds a token, plainly: the machine may be busy, but the unit shows.
    assert 50 < counts["decode"][0]["tokens_per_second"]["median"] < 5000
    assert {one["width"] for one in counts["decode"] if one["way"] == "speculation"} == {1}
    assert counts["agreement"]["prompts"] == 6
    assert all(one["start_seconds"]["median"] > 0.02 for one in found["engines"])
    assert all(one["memory_bytes"]["plain"]["resident"] > 1e6 for one in found["engines"])
    assert {one["way"] for one in careful["decode"]} == {"plain"}
    assert "it has no such kernel" in careful["no_speculation"]
    reasons = {one["name"]: one["reason"] for one in found["skipped"]}
    assert "SIGILL" in reasons["mortal"] and "it reads GGUF files" in reasons["picky"]
    assert f"drawn: {picture}" in result.stderr and "round 1 of 1" in result.stderr
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")


def test_the_table_lists_every_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    spread = {"median": 2.0, "low": 1.5, "high": 2.5}
    decode = [
        {"batch": 1, "way": "plain", "width": None, "tokens_per_second": spread, "sets": {}},
        {"batch": 1, "way": "speculation", "width": 5, "tokens_per_second": {**spread, "median": 3.0}, "sets": {}},
    ]
    agreed = {"prompts": 6, "first_tokens": 8, "share_of_equal_beginnings": 0.5, "mean_equal_tokens": 9.0}
    engine = {"name": "outrider", "version": "1", "weights": "as given", "speculation": "ngram", "agreement": None}
    engine |= {"decode": decode[:1], "no_speculation": None}
    other = engine | {"name": "other", "speculation": "lookup", "agreement": agreed, "decode": decode}
    ratios = [
        {
            "peer": "other",
            "figure": "plain, batch 1",
            "ratio": spread,
            "ours": 200.0,
            "theirs": 100.0,
            "unit": "tokens/s",
        },
        {"peer": "other", "figure": "memory, plain", "ratio": None, "ours": 2e9, "theirs": None, "unit": "bytes"},
    ]
    machine = {"processor": "abacus", "threads": 2, "level": "beads"}
    bench.show_peers(
        {"model": "tiny", "machine": machine, "rounds": 3, "tokens": 16, "sets": {"words": 4}}
        | {"engines": [engine, other], "ratios": ratios, "skipped": [{"name": "third", "reason": "no wheel"}]}
    )
    text = capsys.readouterr().out
    for part in (
        "abacus, 2 threads, beads",
        "4 of words",
        "2 x [1.5 to 2.5]",
        "200 tokens/s",
        "100 tokens/s",
        "2.0 GB",
    ):
        assert part in text
    assert "lookup of 5 tokens: 1.50 x its plain decoding at batch 1" in text
    assert "the first 8 tokens equal ours in 50% of 6 texts" in text
    assert "not measured" in text and "without third: no wheel" in text


def test_our_own_failure_ends_the_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    ours = pretend_peer.peer(tmp_path, pretend_peer.COMPLAINS, registry.OURS)
    with pytest.raises(UserError, match="Outrider's own process failed: no such layer"):
        measure.run([ours], str(model), export.checked(str(model)), {"a": [[1]]}, measure.PeersConfig(), print)


def test_a_peer_that_dies_late_costs_only_its_own_figures(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies in the second round: the others' figures are whole, and its own are gone."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    late = pretend_peer.DIES.replace("if tokens > 1:", "if self.turns > 16:")
    chosen = [
        pretend_peer.peer(tmp_path, pretend_peer.COUNTS, "first"),
        pretend_peer.peer(tmp_path, late, "late"),
        pretend_peer.peer(tmp_path, pretend_peer.COUNTS, "last"),
    ]
    plan = measure.PeersConfig(rounds=3, tokens=4, batches=(1,), prompt_tokens=8)
    sets = {"a": [[1, 2], [3, 4], [5, 6]]}
    found = measure.run(chosen, str(model), export.checked(str(model)), sets, plan, lambda _: None)
    assert [one.peer.name for one in found.entrants] == ["first", "last"] and list(found.skipped) == ["late"]
    for one in found.entrants:
        assert all(len(rounds) == 3 and {each.tokens for each in rounds} == {9} for rounds in one.decodings.values())
        assert len(one.starts) == 4 and len(one.prompts) == 3
    figures = report.report(found, "tiny")
    assert figures["engines"][1]["agreement"]["share_of_equal_beginnings"] == 1.0
    assert figures["ratios"][0]["ratio"]["median"] > 0


def test_only_one_process_computes_at_a_time(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first peer changes from prompt to prompt."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    chosen = [pretend_peer.peer(tmp_path, pretend_peer.COUNTS, name) for name in ("a", "b", "c")]
    everyone: list[Child] = []
    order: list[str] = []
    start, complete = measure.PeerRun.start, measure.PeerRun.complete

    def noted_start(self: measure.PeerRun, *arguments: Any) -> Child:
        everyone.append(start(self, *arguments))
        return everyone[-1]

    def noted_complete(self: measure.PeerRun, way: measure.Way, *arguments: Any) -> Completed:
        others = [child for child in everyone if child is not self.children[way] and child.process.poll() is None]
        wait_until(lambda: all(stopped(child) for child in others))
        order.append(self.peer.name)
        return complete(self, way, *arguments)

    monkeypatch.setattr(measure.PeerRun, "start", noted_start)
    monkeypatch.setattr(measure.PeerRun, "complete", noted_complete)
    plan = measure.PeersConfig(rounds=1, tokens=2, batches=(1,), prompt_tokens=4)
    measure.run(chosen, str(model), export.checked(str(model)), {"s": [[1], [2]]}, plan, lambda _: None)
    changes = [name for index, name in enumerate(order) if index == 0 or order[index - 1] != name]
    assert (
        "".join(changes) == "abc" + "abc" + "bca" + "bc"
    )  # warm-up, two prompts, the long one (a has two turns in a row)
    assert all(child.process.poll() is not None for child in everyone)


def test_a_negative_time_is_measured_again_and_then_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a slow first token would make the rest infinitely fast."""
    found = pretend_peer.peer(tmp_path, pretend_peer.COUNTS, "busy")
    group = measure.PromptGroup("s", (0,), ([1],))
    times: list[float] = []

    def complete(self: measure.PeerRun, way: str, prompts: Any, tokens: int, width: int | None) -> Completed:
        return Completed([[7] * tokens], times.pop(0))

    monkeypatch.setattr(measure.PeerRun, "complete", complete)
    entrant = measure.PeerRun(found, Path(), "")
    times[:] = [9.0, 5.0, 1.0]
    assert measure.after_first_token(entrant, "plain", group, 4, None) == ([[7] * 4], 4.0)
    times[:] = [9.0, 5.0, 6.0, 1.0, 3.0, 2.0]
    assert measure.after_first_token(entrant, "plain", group, 4, None)[1] == 2.0 and not times
    times[:] = [9.0, 5.0, 6.0] * measure.TRIES
    with pytest.raises(PeerFailedError, match="one token took longer than 4 tokens in 3 attempts"):
        measure.after_first_token(entrant, "plain", group, 4, None)


def stopped(child: Child) -> bool:
    return Path(f"/proc/{child.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


MISTAKES: dict[str, tuple[list[object], str]] = {
    "an unknown peer": (["--peer", "llama", "a"], "no peer called `llama`"),
    "an unknown drafter": (["--speculate", "ngram:widht=3", "a"], "no option `widht`"),
    "no batch": (["--batch", "0", "a"], "`--batch` is `0`"),
    "no threads": (["--threads", "0", "a"], "`threads` is 0"),
    "a picture of another kind": (["--plot", "a.png", "a"], "use a name that ends in .svg"),
    "a folder without sets": (["--folder", "nowhere"], "cannot read `nowhere/mt_bench.jsonl`"),
    "a shape": (["-m", "random/tiny", "a"], "which no peer can read"),
    "no model": (["-m", "nowhere", "a"], "no model at `nowhere`"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_bad_arguments_are_refused_before_anything_is_installed(
    outrider: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    monkeypatch.setattr(measure, "run", lambda *_: pytest.fail("it began"))
    arguments, fragment = MISTAKES[mistake]
    result = outrider("bench", "peers", *arguments)
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("error: ") and fragment in result.stderr and result.stderr.count("\n") == 1


def test_prompts_are_needed_and_chats_need_a_template(outrider, model: Path, tmp_path: Path) -> None:
    assert outrider("bench", "peers", "-m", model).exit_code == 2
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}))
    assert (
        "`messages` need the chat template" in outrider("bench", "peers", "-m", model, "--file", file, "--raw").stderr
    )
