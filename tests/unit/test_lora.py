"""LoRA adapters: the adapted model says what the merged one says; adapters that do not fit are refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import tiny_lora
from outrider import LLM, LoRARequest, SamplingParams, UserError, kernels
from outrider.models import build
from outrider.models.lora import LoraLayers
from outrider.weights.lora import read_lora

TOKENS = tiny.prompt(23)
NAMES = ["llama", "llama-bias", "qwen3", "olmo2", "granite", "gemma2", "gemma3", "phi3"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5)
# peft asks transformers for a property that has a new name there.
ignore_renamed = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")


def run(name: str, ops: kernels.Kernels, adapters: list[Path], slots: list[int], chunk: int) -> torch.Tensor:
    """Return the logits [T, V] of TOKENS with these slots [T], and the adapters in slots 0, 1, ..."""
    lora = LoraLayers(ops, 3, 16)
    model = build(tiny.checkpoint(name), ops, lora=lora)
    for slot, adapter in enumerate(adapters):
        lora.put(slot, lora.fit(read_lora(adapter)))
    storage, table = tiny.pages_for(model, 6), list(range(6))
    logits = []
    for start in range(0, len(TOKENS), chunk):
        step = tiny.batch([(TOKENS[start : start + chunk], start, table)], 4)
        own = torch.tensor(slots[start : start + chunk], dtype=torch.int32)
        hidden, _ = model.forward(replace(step, adapters=own), storage.layers)
        logits.append(model.logits(hidden))
    return torch.cat(logits)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", [name for name in NAMES if name in tiny.CASES])
def test_logits_equal_those_of_the_merged_model(name: str, backend: str, tmp_path: Path) -> None:
    ops = kernels.load(backend)
    adapters = [tiny_lora.save(name, tmp_path / "a", 1), tiny_lora.save(name, tmp_path / "b", 2, 7, use_rslora=True)]
    for slot, adapter in enumerate(adapters):
        wanted, _ = tiny.run(build(tiny_lora.merged_checkpoint(name, adapter), ops), TOKENS, 8)
        plain, _ = tiny.run(build(tiny.checkpoint(name), ops), TOKENS, 8)
        assert (wanted - plain).std() > 0.1  # else the tolerance would mean nothing
        for chunk in (1, len(TOKENS)):
            found = run(name, ops, adapters, [slot] * len(TOKENS), chunk)
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@ignore_renamed
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-bias", "qwen3", "phi3"])
@torch.no_grad()
def test_logits_equal_those_of_peft(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    rslora = dtype is torch.float16
    adapter = tiny_lora.save(name, tmp_path, 3, 5, dtype=dtype, use_rslora=rslora)
    adapted = peft.PeftModel.from_pretrained(copy.deepcopy(tiny.original(name)), adapter)
    wanted = adapted(torch.tensor([TOKENS])).logits[0]
    assert (wanted - tiny.original(name)(torch.tensor([TOKENS])).logits[0]).std() > 0.1
    found = run(name, kernels.load("cpu"), [adapter], [0] * len(TOKENS), 8)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@ignore_renamed
@torch.no_grad()
def test_an_adapter_that_peft_has_saved_is_read(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=6, lora_alpha=9, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(tiny.original("llama")), config)
    adapted.save_pretrained(tmp_path)
    wanted = adapted(torch.tensor([TOKENS])).logits[0]
    found = run("llama", kernels.load("cpu"), [tmp_path], [0] * len(TOKENS), 8)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def test_an_adapter_over_few_modules_leaves_the_others_alone(tmp_path: Path) -> None:
    ops, other = kernels.load("cpu"), tiny_lora.save("llama", tmp_path / "all", 1)
    adapter = tiny_lora.save("llama", tmp_path / "few", 2, modules=("q_proj", "down_proj"))
    wanted, _ = tiny.run(build(tiny_lora.merged_checkpoint("llama", adapter), ops), TOKENS, 8)
    found = run("llama", ops, [other, adapter], [1] * len(TOKENS), 8)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def test_transformers_agrees_with_the_merged_weights(tmp_path: Path) -> None:
    adapter = tiny_lora.save("llama", tmp_path, 5)
    model = type(tiny.original("llama"))(tiny.original("llama").config).eval()
    model.load_state_dict(tiny_lora.merged("llama", adapter))
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    found = run("llama", kernels.load("cpu"), [adapter], [0] * len(TOKENS), 8)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


# ---- what does not fit ----

BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another type": ({"peft_type": "IA3"}, "type `IA3`"),
    "dora": ({"use_dora": True}, "`use_dora`"),
    "ranks by module": ({"rank_pattern": {"q_proj": 8}}, "`rank_pattern`"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, "`modules_to_save`"),
    "bias": ({"bias": "all"}, "`bias=all`"),
    "pissa": ({"init_lora_weights": "pissa_niter_16"}, "changes the base model"),
    "no rank": ({"r": 0}, "`r=0`"),
    "another rank": ({"r": 5}, "`r=5`"),
    "no alpha": ({"lora_alpha": None}, "`lora_alpha=None`"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_configuration_that_means_another_computation_is_refused(case: str, tmp_path: Path) -> None:
    changes, reason = BAD_CONFIGS[case]
    with pytest.raises(UserError, match=reason):
        read_lora(tiny_lora.save("llama", tmp_path, **changes))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("lm_head", "only the projections of attention and MLP"),
        ("model.layers.0.mlp.experts.3.up_proj", "expert layers are not supported"),
        ("model.layers.1.mlp.gate", "`gate` of layer 1"),
    ],
)
def test_modules_that_cannot_be_adapted_are_named(module: str, reason: str, tmp_path: Path) -> None:
    pair = {f"base_model.model.{module}.lora_{part}.weight": torch.zeros(4, 4) for part in "AB"}
    adapter = tiny_lora.save("llama", tmp_path, tensors=pair)
    lora = LoraLayers(kernels.load("cpu"), 1, 8)
    build(tiny.checkpoint("llama"), lora.ops, lora=lora)
    with pytest.raises(UserError, match=reason):
        lora.fit(read_lora(adapter))


def test_an_adapter_of_another_model_is_refused_with_the_name_of_its_own(tiny_folder, tmp_path: Path) -> None:
    llm = LLM(str(tiny_folder("llama")), backend="cpu", enable_lora=True, max_lora_rank=8)
    wide = tiny_lora.save("linear-rope", tmp_path / "wide")
    with pytest.raises(UserError, match=r"this model's is .* trained for `tiny/linear-rope`"):
        llm.add_lora(LoRARequest("wide", 1, str(wide)))
    deep = tiny_lora.save("smollm3", tmp_path / "deep", modules=("q_proj",))
    with pytest.raises(UserError, match="adapts layer 3, but this model has 3 layers"):
        llm.add_lora(LoRARequest("deep", 1, str(deep)))
    high = tiny_lora.save("llama", tmp_path / "high", rank=9)
    with pytest.raises(UserError, match="rank 9, but `max_lora_rank` is 8"):
        llm.add_lora(LoRARequest("high", 1, str(high)))


def test_damaged_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no `adapter_config.json`"):
        read_lora(tmp_path)
    adapter = tiny_lora.save("llama", tmp_path / "a")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tiny_lora.save("llama", adapter, modules=(), tensors={name: torch.zeros(4, 64)})
    with pytest.raises(UserError, match="no `lora_B`"):
        read_lora(adapter)
    both = {name: torch.full((4, 64), torch.nan), name.replace("lora_A", "lora_B"): torch.zeros(64, 4)}
    tiny_lora.save("llama", adapter, modules=(), tensors=both)
    with pytest.raises(UserError, match="not finite"):
        read_lora(adapter)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(UserError, match="pickled"):
        read_lora(adapter)


# ---- through the engine ----


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: str(tiny_lora.save("llama", folder / name, seed)) for seed, name in enumerate("abcdef", 1)}


@pytest.fixture(scope="module")
def tiny_cpu(tiny_folder) -> Callable[..., LLM]:
    return lambda **options: LLM(str(tiny_folder("llama")), backend="cpu", **options)


def texts(llm: LLM, names: list[str | None]) -> list[list[int]]:
    outputs = llm.generate([TOKENS] * len(names), GREEDY, lora_request=names)
    llm.engine.scheduler.check()
    return [output.completions[0].token_ids for output in outputs]


def test_requests_name_adapters_that_were_loaded_at_the_start(tiny_cpu, adapters) -> None:
    llm = tiny_cpu(lora={"a": adapters["a"], "b": adapters["b"]})
    plain, first, second = texts(llm, [None, "a", "b"])
    assert len({tuple(text) for text in (plain, first, second)}) == 3
    assert plain == texts(tiny_cpu(), [None])[0]
    assert [first, plain] == texts(llm, ["a", None])  # the cached prefixes of one are not used for the other
    with pytest.raises(UserError, match=r"no adapter called `c` is loaded \(loaded: `a`, `b`\)"):
        texts(llm, ["c"])
    with pytest.raises(UserError, match="adapters are off"):
        tiny_cpu().generate(TOKENS, GREEDY, lora_request="a")


def test_prefixes_are_shared_only_within_an_adapter(tiny_cpu, adapters) -> None:
    llm = tiny_cpu(lora={"a": adapters["a"], "b": adapters["b"]})
    cached = [
        llm.generate(TOKENS, GREEDY, lora_request=name)[0].stats.cached_tokens for name in ("a", "b", None, "a", "b")
    ]
    assert cached == [0, 0, 0, 16, 16]


def test_a_name_that_is_loaded_again_uses_no_old_prefix(tiny_cpu, adapters) -> None:
    llm = tiny_cpu(lora={"a": adapters["a"]})
    (before,) = texts(llm, ["a"])
    llm.remove_lora("a")
    llm.add_lora(LoRARequest("a", 1, adapters["b"]))
    (after,) = texts(llm, ["a"])
    assert after == texts(tiny_cpu(lora={"b": adapters["b"]}), ["b"])[0] != before


def test_more_adapters_than_slots_wait_for_each_other(tiny_cpu, adapters) -> None:
    llm = tiny_cpu(enable_lora=True, max_loras=2)
    requests = [LoRARequest(name, number, adapters[name]) for number, name in enumerate("abcdef", 1)]
    wanted = texts(tiny_cpu(lora=adapters, max_loras=6), list("abcdef"))
    for order in (range(6), (5, 0, 4, 1, 3, 2), (0, 0, 1, 2, 2, 0)):
        assert texts(llm, [requests[index] for index in order]) == [wanted[index] for index in order]
    assert all(not adapter.running for adapter in llm.engine.adapters.loaded.values())


def test_adapters_of_requests_are_dropped_when_too_many_are_loaded(tiny_cpu, adapters) -> None:
    llm = tiny_cpu(lora={"a": adapters["a"]}, max_cpu_loras=2)
    for name in "bcd":
        texts(llm, [LoRARequest(name, 1, adapters[name])])
        assert set(llm.engine.adapters.loaded) == {"a", name}
    llm.remove_lora("d")
    llm.add_lora(LoRARequest("e", 1, adapters["e"]))
    with pytest.raises(UserError, match="2 adapters are loaded: unload one"):
        llm.add_lora(LoRARequest("f", 1, adapters["f"]))
    with pytest.raises(UserError, match="`a` is loaded already"):
        llm.add_lora(LoRARequest("a", 1, adapters["a"]))
    with pytest.raises(UserError, match="no adapter called `z`"):
        llm.remove_lora("z")


def test_an_adapter_that_is_removed_under_load_stays_with_its_requests(tiny_cpu, adapters) -> None:
    wanted = texts(tiny_cpu(lora=adapters), ["a", "b"])
    llm = tiny_cpu(lora={"a": adapters["a"]}, max_loras=1)
    stream = llm.stream(TOKENS, GREEDY, lora_request="a")
    next(stream)
    llm.remove_lora("a")
    llm.engine.clear_cache()  # preempted: it must find its adapter again
    llm.add_lora(LoRARequest("a", 1, adapters["b"]))
    *_, last = stream
    assert last.completions[0].token_ids == wanted[0]
    assert texts(llm, ["a"]) == wanted[1:]


def test_acceptance_is_counted_by_adapter(tiny_cpu, adapters) -> None:
    llm = tiny_cpu(lora={"a": adapters["a"]}, speculate="ngram:adaptive=no")
    prompt = TOKENS[:4] * 5
    llm.generate([prompt] * 2, replace(GREEDY, max_tokens=20), lora_request=["a", None])
    assert set(llm.adapter_stats) == {"a"} and set(llm.adapter_stats["a"]) == {"ngram"}
    assert 0 < llm.adapter_stats["a"]["ngram"].steps < llm.method_stats["ngram"].steps


@pytest.mark.parametrize("wrong", [7, ["a", "b"], {"name": "a"}])
def test_other_types_than_an_adapter_are_refused(tiny_cpu, adapters, wrong: object) -> None:
    llm = tiny_cpu(lora={"a": adapters["a"]})
    with pytest.raises(UserError, match=r"expected a LoRARequest|came with 2 adapters"):
        llm.generate(TOKENS, GREEDY, lora_request=wrong)


def test_files_of_adapters_are_read_as_utf8(tmp_path: Path) -> None:
    adapter = tiny_lora.save("llama", tmp_path / "ä", base_model_name_or_path="tiny/ü")
    assert read_lora(adapter).base == "tiny/ü"
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == read_lora(adapter).rank == 4
