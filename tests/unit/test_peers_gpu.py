"""`bench peers --backend cuda`: which peers run, and what vLLM is given. The race itself needs a GPU and vLLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.bench.peers import environment, export, measure, registry
from outrider.bench.peers.worker import WORKERS
from outrider.errors import UserError

SYNTHETIC = "eagle3:model=random/eagle3-tiny,width=4,verify=synthetic,length=2.9"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stand in for vLLM; the keyword arguments of each engine."""
    found: list[dict[str, Any]] = []

    class Engine:
        def __init__(self, model: str, **options: Any) -> None:
            found.append({"model": model, **options})

    module = SimpleNamespace(LLM=Engine, SamplingParams=object, __version__="0.24.0")
    monkeypatch.setitem(sys.modules, "vllm", module)  # type: ignore[arg-type]
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # the worker sets it: restored afterwards
    return found


def test_vllm_alone_runs_on_a_gpu_and_in_our_environment() -> None:
    (peer,) = registry.choose([], "cuda")
    assert (peer.name, peer.recipe) == ("vllm", ())
    assert registry.choose(["vllm"])[0].recipe
    with pytest.raises(UserError, match=r"`llama\.cpp` is compared on the CPU only"):
        registry.choose(["llama.cpp"], "cuda")


def test_a_peer_that_is_not_installed_is_skipped_with_the_reason() -> None:
    (peer,) = registry.choose([], "cuda")
    missing = registry.Peer("vllm", "folder", module="no_such_module")
    with pytest.raises(environment.CannotInstallError, match="install `no_such_module` for this torch"):
        environment.install(missing, print)
    assert environment.install(registry.Peer("vllm", "folder", module="json"), print) == Path(sys.executable)
    assert peer.module == "vllm"


def test_vllm_gets_our_head_our_width_and_our_synthetic_acceptance(
    calls: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    drafts = registry.vllm_drafts(SYNTHETIC)
    assert drafts is not None
    drafts["model"] = str(export.head_folder(str(drafts["model"])))
    head = json.loads((Path(str(drafts["model"])) / "config.json").read_text())
    assert (head["architectures"], head["num_hidden_layers"]) == (["LlamaForCausalLMEagle3"], 1)
    assert head["draft_vocab_size"] == 256
    folder = export.folder(export.checked("random/tiny", "cuda"), print)
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 64
    (peer,) = (registry.with_drafts(one, drafts) for one in registry.choose([], "cuda"))
    assert (peer.speculation, peer.widths) == ("eagle3", (4,))
    config = measure.PeersConfig(backend="cuda", drafts=drafts)
    run = measure.PeerRun(peer, Path(sys.executable), str(folder), "random/tiny")
    facts = WORKERS["vllm"]().open(str(folder), 2, 300, 8, True, **run.options(config))
    assert facts == {"version": "0.24.0", "weights": "random"}
    (call,) = calls
    assert call["quantization"] is None
    assert call["speculative_config"] == {
        "method": "eagle3",
        "model": drafts["model"],
        "num_speculative_tokens": 4,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.9,
    }
    assert (call["load_format"], call["max_model_len"], call["max_num_seqs"]) == ("dummy", 305, 8)


@pytest.mark.parametrize(("quantize", "theirs"), [("fp8", "fp8"), ("int4", None)])
def test_vllm_quantizes_to_fp8_as_we_do(calls: list[dict[str, Any]], quantize: str, theirs: str | None) -> None:
    run = measure.PeerRun(registry.choose([], "cuda")[0], Path(sys.executable), "folder", "random/tiny")
    options = run.options(measure.PeersConfig(backend="cuda", quantize=quantize))
    facts = WORKERS["vllm"]().open("folder", 2, 300, 8, False, **options)
    assert calls[0]["quantization"] == theirs
    assert facts["weights"] == ("random, fp8" if theirs else "random")


def test_methods_without_a_checkpoint_leave_vllm_its_own_lookup(calls: list[dict[str, Any]]) -> None:
    assert registry.vllm_drafts("suffix") is registry.vllm_drafts("none") is None
    WORKERS["vllm"]().open("folder", 2, 300, 1, True, backend="cuda")
    WORKERS["vllm"]().open("folder", 2, 300, 1, False, backend="cuda")
    assert [call["speculative_config"] and call["speculative_config"]["method"] for call in calls] == ["ngram", None]
    assert all(call["load_format"] == "auto" for call in calls)


def test_our_worker_is_given_the_backend() -> None:
    run = measure.PeerRun(registry.ours("suffix"), Path(sys.executable), "some/model", "some/model")
    assert run.options(measure.PeersConfig()) == {"method": "suffix", "quantize": None, "activations": "auto"}
    fast = run.options(measure.PeersConfig(quantize="fp8", activations="fast"))
    assert (fast["quantize"], fast["activations"]) == ("fp8", "fast")
    assert run.options(measure.PeersConfig(backend="cuda"))["backend"] == "cuda"


def test_random_shapes_are_refused_on_the_cpu() -> None:
    with pytest.raises(UserError, match="which no peer can read on the CPU"):
        export.checked("random/tiny")


@pytest.mark.parametrize(("backend", "again"), [("cpu", 1), ("cuda", 0)])
def test_a_gpu_has_no_memory_for_another_start(backend: str, again: int) -> None:
    started: list[str] = []

    def start(way: str, *arguments: Any) -> SimpleNamespace:
        started.append(way)
        return SimpleNamespace(close=lambda: None)

    race: Any = SimpleNamespace(config=measure.PeersConfig(backend=backend), sets={})
    run: Any = SimpleNamespace(starts=[1.0], start=start)
    measure.start_again(race, run)
    assert len(started) == again
