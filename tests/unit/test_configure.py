"""Parsing of speculation settings: `METHOD:key=value`, vLLM's keys, and error messages."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from safetensors.torch import save_file

import tiny_heads
from outrider.errors import UserError
from outrider.speculation import available, find
from outrider.speculation.config import Common, SpeculationPlan, parse, schedule, synthetic
from outrider.speculation.vllm_config import KNOWN, REFUSED
from refusals import refusal

OWN = """
from dataclasses import dataclass
from outrider.speculation import MethodOptions

@dataclass(frozen=True)
class Options(MethodOptions):
    width: int = 6
    share: float = 0.5
    model: str | None = None
    deep: bool = False
    layers: tuple[int, ...] | None = None
    limit: int | None = 7

def build(options, target):
    return None
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's method, importable as `drafters.mine`."""
    (tmp_path / "drafters").mkdir()
    (tmp_path / "drafters" / "__init__.py").touch()
    (tmp_path / "drafters" / "mine.py").write_text(OWN)
    (tmp_path / "drafters" / "clash.py").write_text(OWN.replace("share", "rates"))
    (tmp_path / "drafters" / "levels.py").write_text(OWN.replace("share", "levels"))  # deprecated alias
    monkeypatch.syspath_prepend(str(tmp_path))
    return "drafters.mine"


def refused(speculate: str, config: dict[str, object] | None = None) -> str:
    return refusal(lambda: parse(speculate, config))


def test_none_is_plain_decoding() -> None:
    assert parse("none") == SpeculationPlan() == parse("none", None)
    assert parse("none").method == "" and parse("none").options is None
    assert parse("none").width(1) == 0


@pytest.mark.parametrize("method", available())
def test_a_name_alone_takes_the_defaults(method: str) -> None:
    plan = parse(method)
    assert plan.method == method
    assert plan.options == find(method).Options()
    assert (plan.verification, plan.sampled, plan.rates, plan.adaptive, plan.widths) == ("exact", True, (), True, ())
    assert parse(f"{method}:width=3").options == dataclasses.replace(find(method).Options(), width=3)


def test_values_take_the_type_of_their_field(own: str) -> None:
    plan = parse(f"{own}:width=9, share=0.25,model=a/b=c, deep=Yes,layers=1/4/7,limit=none")
    assert dataclasses.asdict(plan.options) == {
        "width": 9,
        "share": 0.25,
        "model": "a/b=c",
        "deep": True,
        "layers": (1, 4, 7),
        "limit": None,
    }
    assert parse(f"{own}:limit=12,share=2").options.limit == 12
    assert parse(f"{own}:model=none").options.model == "none"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("eagle3:taps=1/4/7,levels=3", "eagle3:aux_layers=1/4/7,max_depth=3"),  # deprecated alias
        ("dflash:taps=2", "dflash:aux_layers=2"),  # deprecated alias
        ("suffix+eagle3:levels=3,taps=2", "suffix+eagle3:max_depth=3,aux_layers=2"),  # deprecated alias
        ("suffix+eagle3:eagle3.levels=3", "suffix+eagle3:eagle3.max_depth=3"),  # deprecated alias
    ],
)
def test_deprecated_keys_set_the_renamed_options(old: str, new: str) -> None:
    assert parse(old) == parse(new) != parse(new.partition(":")[0])


def test_deprecated_keys_are_checked_like_the_renamed_ones(own: str) -> None:
    assert "`levels` and `max_depth` set the same option" in refused("ngram:max_depth=2,levels=2")  # deprecated alias
    assert "drafts chains, no trees: leave out `levels`" in refused("peagle:levels=2")  # deprecated alias
    assert "has no option `taps`: expected" in refused("ngram:taps=2")  # deprecated alias
    assert parse("drafters.levels:levels=0.25").options.levels == 0.25  # deprecated alias: a field of its own


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("width=many", "`width` is `many`: expected a whole number"),
        ("width=2.5", "`width` is `2.5`: expected a whole number"),
        ("width=0", "`width` is 0: it must be at least 1"),
        ("share=nan", "`share` is `nan`: expected a number"),
        ("deep=perhaps", "`deep` is `perhaps`: expected true or false"),
        ("layers=1/x", "`layers` is `1/x`: expected numbers"),
        ("verify=trust", "`verify` is `trust`: expected one of exact, rejection, block, synthetic"),
        ("draft=wild", "`draft` is `wild`: expected one of greedy, probabilistic"),
        ("widht=3", "no option `widht` (did you mean `width`?): expected width, share, model, deep, layers, limit, or"),
        ("num_speculative_tokens=3", "(did you mean `width`?)"),
        ("zzz=3", "has no option `zzz`: expected"),
        ("width", "`width` of `speculate` sets nothing"),
        ("width=", "`width=` of `speculate` sets nothing"),
        ("width=1,,share=1", "`` of `speculate` sets nothing"),
        ("width=1,width=2", "`width` is given twice"),
    ],
)
def test_invalid_options_are_refused(own: str, text: str, answer: str) -> None:
    assert answer in refused(f"{own}:{text}")


def test_unknown_options_list_the_common_ones(own: str) -> None:
    assert refused(f"{own}:zzz=1").endswith(
        "or one of every method: " + ", ".join(f.name for f in dataclasses.fields(Common))
    )


def test_invalid_methods_are_refused(own: str) -> None:
    assert "no method called `ngrem` (did you mean `ngram`?): expected one of" in refused("ngrem")
    assert "(did you mean `eagle3`?)" in refused("EAGLE-3")
    assert "no method called `magic`: expected one of" in refused("magic")
    assert "must name different methods" in refused("ngram+ngram:width=3")
    assert "`ngram.width` is 0: it must be at least 1" in refused("suffix+ngram:ngram.width=0")
    assert "`none` is plain decoding and takes no options" in refused("none:width=3")
    assert "cannot import the method `drafters.yours`" in refused("drafters.yours")
    assert "defines the option `rates`, which every method has" in refused("drafters.clash")
    for nothing in ("", "  ", None, True):
        assert "pass a method, or `none`" in refused(nothing)  # type: ignore[arg-type]
    assert "pass one of them" in refused("ngram", {"method": "ngram"})
    assert "expected keys and values" in refused("none", "ngram")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mine_alone", "package_of_mine.method"])
def test_a_method_in_the_current_folder_needs_no_import_path(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / Path(*name.split(".")).with_suffix(".py")
    file.parent.mkdir(exist_ok=True)
    file.write_text(OWN)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert f"`{name}`" in refused(name)
    monkeypatch.chdir(tmp_path)
    assert parse(f"{name}:width=2").method == name
    assert parse("none", {"method": "custom_class", "model": name}).method == name
    if "." in name:
        assert parse("none", {"model": name}).method == name


def test_an_error_in_the_users_module_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_method.py").write_text("def build(:")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    assert "cannot import the method `broken_method`: SyntaxError" in refused("broken_method")


def test_verification_mode_decides_whether_widths_adapt(own: str) -> None:
    assert parse(f"{own}:draft=probabilistic").sampled
    for mode in ("rejection", "block"):
        plan = parse(f"{own}:verify={mode}")
        assert (plan.verification, plan.adaptive) == (mode, True)
        assert parse(f"{own}:verify={mode},adaptive=no").adaptive is False
    assert not parse(f"{own}:adaptive=false").adaptive
    assert not parse(f"{own}:verify=synthetic,length=1").adaptive  # the length that was asked for is to be met


def test_synthetic_rates_become_conditional(own: str) -> None:
    plan = parse(f"{own}:verify=synthetic,rates=0.8/0.4/0/0")
    assert plan.options.width == 4
    assert plan.rates == pytest.approx((0.8, 0.5, 0, 0))
    same = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.4, 0, 0]}
    assert parse("none", {"method": own, **same}) == plan


@given(some.lists(some.floats(0, 1), min_size=1, max_size=9))
def test_conditional_rates_multiply_to_the_requested_rates(rates: list[float]) -> None:
    asked = sorted(rates, reverse=True)
    found = synthetic(Common(verify="synthetic", rates=tuple(asked)), len(asked), {"rates": "rates"})
    reached = 1.0
    for depth, rate in enumerate(found):
        assert 0 <= rate <= 1
        reached *= rate
        assert reached == pytest.approx(asked[depth], abs=1e-12)


@pytest.mark.parametrize(
    ("length", "rates"),
    [(1, (0, 0, 0)), (2, (1, 0, 0)), (2.25, (1, 0.25, 0)), (3.5, (1, 1, 0.5)), (4, (1, 1, 1)), (1.5, (0.5, 0, 0))],
)
def test_a_mean_length_becomes_rates(own: str, length: float, rates: tuple[float, ...]) -> None:
    plan = parse(f"{own}:verify=synthetic,width=3,length={length}")
    assert plan.rates == pytest.approx(rates)
    expected, reached = 1.0, 1.0
    for rate in plan.rates:
        reached *= rate
        expected += reached
    assert expected == pytest.approx(length)
    keys = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length, "num_speculative_tokens": 3}
    assert parse("none", {"method": own, **keys}) == plan


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("rates=0.5", "`rates` is for synthetic verification alone"),
        ("length=2", "`length` is for synthetic verification alone"),
        ("verify=synthetic", "either `rates` or `length`"),
        ("verify=synthetic,rates=0.5,length=1", "either `rates` or `length`"),
        ("verify=synthetic,rates=0.5/0.6", "never rise with depth"),
        ("verify=synthetic,rates=1.5/0.6", "lie between 0 and 1"),
        ("verify=synthetic,rates=0.5/-0.1", "lie between 0 and 1"),
        ("verify=synthetic,rates=0.5/0.4,width=3", "`rates` has 2 values and the width is 3"),
        ("verify=synthetic,length=0.5", "must lie between 1 and 7"),
        ("verify=synthetic,length=7.5", "must lie between 1 and 7"),
    ],
)
def test_invalid_synthetic_settings_are_refused(own: str, text: str, answer: str) -> None:
    assert answer in refused(f"{own}:{text}")


def test_a_synthetic_length_needs_a_width() -> None:
    assert "pass `width` as well" in refused("dflash:model=head,verify=synthetic,length=3")


# vLLM's keys


def test_vllm_keys_configure_a_users_method(own: str) -> None:
    config = {"model": own, "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}
    plan = parse("none", config)
    assert (plan.method, plan.options.width, plan.sampled) == (own, 3, True)
    assert plan.options.model is None
    assert parse("none", {"method": "custom_class", **config}) == plan
    assert parse("none", {"method": own, "model": "some/where"}).options.model == "some/where"
    assert "needs the import path" in refused("none", {"method": "custom_class"})


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp", "mimo_mtp", "qwen3_next_mtp"])
def test_vllms_names_of_mtp_select_mtp(method: str) -> None:
    assert parse("none", {"method": method, "num_speculative_tokens": 1}) == parse("mtp:width=1")


def test_eagle3_with_parallel_drafting_is_peagle(tmp_path: Path) -> None:
    wanted = parse(f"peagle:model={tmp_path},width=5")
    config = {"model": str(tmp_path), "num_speculative_tokens": 5}
    assert parse("none", config | {"method": "eagle3", "parallel_drafting": True}) == wanted
    assert parse("none", config | {"method": "peagle", "parallel_drafting": True}) == wanted
    tiny_heads.make("peagle", tmp_path, own_head=False)
    for extra in ({}, {"method": "eagle3"}, {"method": "peagle"}):
        assert parse("none", config | extra) == wanted
    tiny_heads.make("mtp", tmp_path / "modules")
    assert parse("none", {"model": str(tmp_path / "modules")}).method == "mtp"


@pytest.mark.parametrize(
    ("given", "verification"), [(None, "exact"), ("standard", "rejection"), ("block", "block"), ("all", None)]
)
def test_rejection_sample_method_selects_the_verification(
    own: str, given: str | None, verification: str | None
) -> None:
    config = {"method": own, "rejection_sample_method": given}
    if verification is None:
        assert "expected one of standard, block, synthetic, or leave it out for exact" in refused("none", config)
    else:
        assert parse("none", config).verification == verification


@pytest.mark.parametrize("key", [key for key in KNOWN if key not in ("method", "model")])
def test_a_key_with_none_is_the_same_as_no_key(own: str, key: str) -> None:
    assert parse("none", {"method": own, key: None}) == parse(own)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("disable_padded_drafter_batch", True),
        ("use_local_argmax_reduction", True),
        ("use_heterogeneous_vocab", False),
        ("parallel_drafting", False),
        ("draft_tensor_parallel_size", 1),
        ("attention_backend", "auto"),
        ("moe_backend", "auto"),
        ("kv_cache_dtype", "auto"),
        ("enable_adaptive_verification", False),
    ],
)
def test_keys_without_effect_are_accepted(own: str, key: str, value: object) -> None:
    assert parse("none", {"method": own, key: value}) == parse(own)


@pytest.mark.parametrize("key", REFUSED)
def test_unsupported_keys_are_refused_by_name(own: str, key: str) -> None:
    message = refused("none", {"method": own, key: True if key.startswith("enable") else 2})
    assert message.startswith(f"`{key}` of `speculative_config` is not supported: ")


def test_invalid_keys_are_refused(own: str) -> None:
    message = refused("none", {"method": own, "num_speculative_token": 3})
    assert "no key `num_speculative_token` (did you mean `num_speculative_tokens`?)" in message
    assert all(key in message for key in KNOWN)
    assert "(did you mean `num_speculative_tokens`?)" in refused("none", {"method": own, "width": 3})
    assert "names no method" in refused("none", {"num_speculative_tokens": 3})
    assert "`method` of `speculative_config` is `3`" in refused("none", {"method": 3})
    assert "`num_speculative_tokens` is `x`" in refused("none", {"method": own, "num_speculative_tokens": "x"})
    assert "`num_speculative_tokens` is 0: it" in refused("none", {"method": own, "num_speculative_tokens": 0})
    assert "`num_speculative_tokens` is `True`" in refused("none", {"method": own, "num_speculative_tokens": True})
    assert "`parallel_drafting` is `2`: expected true or false" in refused(
        "none", {"method": own, "parallel_drafting": 2}
    )
    assert f"`prompt_lookup_max` is not an option of the method `{own}`" in refused(
        "none", {"method": own, "prompt_lookup_max": 4}
    )


def test_widths_by_the_number_of_requests(own: str) -> None:
    config = {"method": own, "num_speculative_tokens_per_batch_size": [[1, 4, 9], [9, 16, 2], (17, 20, 0)]}
    plan = parse("none", config)
    assert plan.widths == ((1, 8, 6), (9, 16, 2), (17, 20, 0))
    assert [plan.width(count) for count in (1, 4, 5, 8, 9, 16, 17, 20, 21, 500)] == [6, 6, 6, 6, 2, 2, 0, 0, 0, 0]
    assert parse(own).width(1) == parse(own).width(99) == 6


@pytest.mark.parametrize(
    ("ranges", "answer"),
    [
        ([[2, 4, 1]], "must start at 1"),
        ([], "must start at 1"),
        ([[1, 4, 1], [4, 8, 1]], "two ranges for 4 requests"),
        ([[1, 0, 1]], "from <= to"),
        ([[1, 2, -1]], "0 tokens or more"),
        ([[1, 2]], "expected [[from, to, tokens], ...]"),
        (3, "expected [[from, to, tokens], ...]"),
        ([["a", 2, 3]], "expected [[from, to, tokens], ...]"),
    ],
)
def test_invalid_width_ranges_are_refused(ranges: object, answer: str) -> None:
    with pytest.raises(UserError) as caught:
        schedule(ranges, 4)
    assert answer in str(caught.value)


def options(config: dict[str, object]) -> dict[str, object]:
    plan = parse("none", config)
    return {"method": plan.method, **dataclasses.asdict(plan.options)}


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
        ({}, None),
    ],
)
def test_vllm_keys_of_ngram_set_its_options(given: dict[str, int], lengths: tuple[int, int] | None) -> None:
    default = find("ngram").Options()
    for named in ({"method": "ngram"}, {"method": "ngram_gpu"}, {"model": "ngram"}, {"model": "[ngram]"}):
        found = options({**named, "num_speculative_tokens": 3, **given})
        assert (found["method"], found["width"]) == ("ngram", 3)
        assert (found["shortest"], found["longest"]) == (lengths or (default.shortest, default.longest))


def test_vllm_keys_of_suffix_set_its_options() -> None:
    found = options(
        {
            "method": "suffix",
            "suffix_decoding_max_tree_depth": 12,
            "suffix_decoding_max_cached_requests": 5,
            "suffix_decoding_max_spec_factor": 2,
            "suffix_decoding_min_token_prob": 0.3,
        }
    )
    assert (found["depth"], found["cached_requests"], found["factor"], found["least"]) == (12, 5, 2, 0.3)


def test_vllm_keys_of_draft_model_set_its_options() -> None:
    found = options(
        {
            "method": "draft_model",
            "model": "smollm2-135m",
            "num_speculative_tokens": 5,
            "use_heterogeneous_vocab": True,
            "parallel_drafting": True,
            "quantization": "int8",
            "max_model_len": 512,
        }
    )
    wanted = {"width": 5, "model": "smollm2-135m", "vocabulary": "strings", "parallel": True, "quantize": "int8"}
    assert found.items() >= wanted.items()
    alone = options({"method": "draft_model", "model": "smollm2-135m", "parallel_drafting": False})
    assert (alone["parallel"], alone["vocabulary"]) == (False, "same")
    assert "is not an option of the method `ngram`" in refused("none", {"method": "ngram", "parallel_drafting": True})


def test_a_vllm_quantization_must_be_the_format_of_the_draft_model(tmp_path: Path) -> None:
    config = {"method": "draft_model", "model": str(tmp_path)}
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    for name in ("awq", "awq_marlin"):
        assert options({**config, "quantization": name})["quantize"] is None
    assert "`quantization` is `gptq`, but" in refused("none", {**config, "quantization": "gptq"})
    assert "is quantized as `awq`: leave it out" in refused("none", {**config, "quantization": "gptq"})
    assert "`quantization` is `bitsandbytes`" in refused("none", {**config, "quantization": "bitsandbytes"})


def test_a_vllm_revision_is_joined_to_the_hub_name() -> None:
    config = {"method": "draft_model", "model": "org/name", "revision": "v1"}
    assert options(config)["model"] == "org/name@v1"
    assert "`revision` needs a model of the hub" in refused("none", {**config, "model": "smollm2-135m"})
    assert "pass it with a `model` of the hub" in refused("none", {"method": "ngram", "revision": "v1"})


@pytest.mark.parametrize("method", ["ngram", "suffix", "eagle3", "medusa"])
def test_vllm_keys_for_every_drafter(method: str) -> None:
    own = {"method": method} if method in ("ngram", "suffix") else {"method": method, "model": "there"}
    plan = parse("none", {**own, "max_model_len": 512, "enforce_eager": True})
    assert (plan.max_context, plan.eager) == (512, True)
    assert "`max_model_len` is 0: it must be at least 1" in refused("none", {**own, "max_model_len": 0})


def head(folder: Path, wide: int, **extra: torch.Tensor) -> str:
    """A head as far as anybody looks before a target is there: its first projection reads `wide` floats, width 8."""
    folder.mkdir()
    shape = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 32}
    (folder / "config.json").write_text(json.dumps({**shape, "rms_norm_eps": 1e-5, "architectures": ["Anything"]}))
    tensors = {"midlayer.self_attn.q_proj.weight": torch.zeros(8, wide), **extra}
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def test_the_method_is_taken_from_the_checkpoint(tmp_path: Path, tiny_folder: Callable[..., Path]) -> None:
    """What it holds decides, whatever its folder is called."""
    one = head(tmp_path / "eagle3-and-more", 8, **{"fc.weight": torch.zeros(8, 16)})
    three = head(tmp_path / "eagle-", 16, **{"fc.weight": torch.zeros(8, 24)})
    for path, method in ((one, "eagle"), (three, "eagle3"), (str(tiny_folder()), "draft_model")):
        assert options({"model": path})["method"] == method
        assert options({"model": path})["model"] == path
    strange = head(tmp_path / "strange", 12, **{"fc.weight": torch.zeros(8, 12)})
    assert "is no draft head of a known kind" in refused("none", {"model": strange})
    assert "no model at `nowhere`" in refused("none", {"model": "nowhere"})
    (tmp_path / "weights.gguf").touch()
    assert options({"model": str(tmp_path / "weights.gguf")})["method"] == "draft_model"


def test_always_draft_is_adaptive_no_for_any_method() -> None:
    assert parse("ngram", always_draft=True) == parse("ngram:adaptive=no")
    assert parse("ngram:adaptive=no", always_draft=True) == parse("ngram:adaptive=no")
    assert parse("none", {"method": "ngram"}, always_draft=True) == dataclasses.replace(
        parse("none", {"method": "ngram"}), adaptive=False
    )
    assert not parse("none", always_draft=True).adaptive, "requests may name a method"
    with pytest.raises(UserError, match="`always_draft` contradicts `adaptive` of `speculate`"):
        parse("ngram:adaptive=yes", always_draft=True)


def test_refused_values_of_vllms_keys_are_named_by_these_keys() -> None:
    keys = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 5, "prompt_lookup_max": 3}
    message = refusal(lambda: parse("none", keys))
    assert message.startswith("`prompt_lookup_min` is 5 and `prompt_lookup_max` is 3: ")
    assert "shortest" not in message and "longest" not in message
    assert refusal(lambda: parse("ngram:shortest=5")).startswith("`shortest` is 5 and `longest` is 3: ")
