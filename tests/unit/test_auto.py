"""`speculate="auto"`: the fastest measured method that the model has, plain decoding if none is faster."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny_gguf
import tiny_hybrids
import tiny_modules
from outrider import LLM, SamplingParams, UserError, catalog
from outrider.catalog import shipped
from outrider.kernels import cpu
from outrider.speculation import auto
from outrider.speculation.auto import Candidate, choose

LARGE, SMALL = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Figures by which every kind of candidate is worth choosing, a head for `smollm2-135m`, and an empty cache."""
    candidates = (
        Candidate("ngram", 1.1),
        Candidate("medusa", 0.9, ships=True),
        Candidate("eagle3", 1.3, ships=True),
        Candidate("draft_model", 1.5, target=LARGE, draft_model=SMALL),
    )
    monkeypatch.setattr(auto, "CANDIDATES", {"cpu": candidates})
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    has_head = lambda model, method: tmp_path if (model, method) == ("smollm2-135m", "eagle3") else None  # noqa: E731
    monkeypatch.setattr(shipped, "find", has_head)


@pytest.fixture
def without_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of backends, on any machine: with AMX `ngram` is faster than modules."""
    monkeypatch.setattr(auto, "CANDIDATES", {backend: auto.CANDIDATES[backend] for backend in ("cpu", "cuda")})


def test_the_fastest_method_that_the_model_has_is_chosen(measured: None) -> None:
    assert choose("smollm2-135m", "cpu") == "eagle3"
    assert choose("./some-model.gguf", "cpu") == "ngram"


def test_modules_are_chosen_only_for_a_model_that_has_them(without_levels: None) -> None:
    for backend in ("cpu", "cuda"):
        assert choose("./some-model.gguf", backend, modules=True) == "mtp" != choose("./some-model.gguf", backend)


def test_nothing_is_chosen_where_nothing_was_measured_faster(measured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("smollm2-135m", "reference") == "none"
    monkeypatch.setattr(auto, "CANDIDATES", {"cpu": (Candidate("ngram", 1.0),)})
    assert choose("smollm2-135m", "cpu") == "none"


def test_a_cpu_level_with_figures_of_its_own_goes_by_them(measured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    level = cpu.facts()["level"]
    monkeypatch.setitem(auto.CANDIDATES, level, (Candidate("suffix", 1.2),))
    assert choose("smollm2-135m", "cpu") == "suffix"
    monkeypatch.setattr(cpu, "facts", lambda: {"level": "another"})
    assert choose("smollm2-135m", "cpu") == "eagle3"


def test_a_slower_method_is_chosen_only_if_always_draft_is_set(measured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "CANDIDATES", {"cpu": (Candidate("ngram", 0.9), Candidate("eagle3", 0.95, ships=True))})
    assert choose("smollm2-135m", "cpu") == "none"
    assert choose("smollm2-135m", "cpu", always_draft=True) == "eagle3"
    assert choose("./some-model.gguf", "cpu", always_draft=True) == "ngram"


def test_a_draft_model_that_is_not_pulled_is_not_fetched(measured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(LARGE, "cpu") == "ngram"
    path = catalog.path(SMALL)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"incomplete")
    assert choose(LARGE, "cpu") == "ngram"
    monkeypatch.setitem(catalog.CATALOG, SMALL, catalog.CatalogEntry(path.name, 10))
    assert choose(LARGE, "cpu") == choose(str(catalog.path(LARGE)), "cpu") == f"draft_model:model={SMALL}"
    assert choose(SMALL, "cpu") == choose("smollm2-360m", "cpu") == "ngram", "it was measured with another target"


def test_the_shipped_figures_name_methods_and_models_that_exist() -> None:
    candidates = [candidate for backend in auto.CANDIDATES.values() for candidate in backend]
    shipping = {entry.method for entry in shipped.entries()}
    assert {candidate.method for candidate in candidates if candidate.ships} <= shipping
    named = {name for candidate in candidates for name in (candidate.target, candidate.draft_model) if name}
    assert named <= catalog.CATALOG.keys()
    assert choose("smollm2-135m", "cuda") == "dspark" and choose("./some-model.gguf", "cuda") == "ngram"


@pytest.mark.parametrize("given", ["none", "ngram:width=3", " suffix+eagle3 ", "auto.method", "my.auto:x=1"])
def test_a_named_method_is_not_replaced(given: str) -> None:
    assert not auto.is_auto(given)


def test_options_of_auto_are_refused() -> None:
    with pytest.raises(UserError, match=r"`auto:width=4`.*name a method"):
        auto.is_auto("auto:width=4")


def test_the_python_api_decodes_plainly_unless_asked(tiny_folder) -> None:
    model = str(tiny_folder())
    assert LLM(model, backend="cpu").engine.spec_manager.plan.method == ""
    plan = LLM(model, backend="cpu", speculate="auto").engine.spec_manager.plan
    assert plan.method == choose(model, "cpu") and plan.adaptive


def test_auto_beside_a_speculative_config_is_refused(tiny_folder) -> None:
    with pytest.raises(UserError, match="both given"):
        LLM(str(tiny_folder()), backend="cpu", speculate="auto", speculative_config={"method": "ngram"})


FILES = ("qwen3-next-moe.gguf", "qwen3.5-moe.gguf")


@pytest.mark.parametrize("source", [*tiny_hybrids.TARGETS, *FILES, "multimodal", "deepseek", "qwen", "mimo"])
def test_modules_in_the_checkpoint_are_used(source: str, tmp_path: Path, without_levels: None) -> None:
    if source in FILES:
        model = tiny_gguf.write(source.removesuffix(".gguf"), tmp_path / source, module="inside")
    elif source == "multimodal":
        model = tiny_hybrids.multimodal("qwen3.5", tmp_path)
    elif source in tiny_hybrids.TARGETS:
        model = tiny_hybrids.inside(source, tmp_path)
    else:
        model = tiny_modules.inside(tiny_modules.ModulePlan(), tmp_path, source)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    llm = LLM(str(model), backend="cpu", speculate="auto")
    (found,) = llm.generate(["The quick brown fox"], params)
    assert found.stats.method == "mtp" and llm.engine.spec_manager.plan.adaptive
    (plain,) = LLM(str(model), backend="cpu").generate(["The quick brown fox"], params)
    assert found.completions[0].token_ids == plain.completions[0].token_ids
