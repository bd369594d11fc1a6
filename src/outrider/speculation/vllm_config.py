"""Translate vLLM's `speculative_config`: keys that have an option here, keys without effect, keys that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..catalog import with_revision
from ..config import STORED_FORMATS
from ..errors import UserError
from ..weights import locate
from ..weights.stated_format import resolve_quantize
from .checkpoints import READERS, find_folder, open_folder, open_head
from .checkpoints.readers import FC
from .options import Setting, hint, truth
from .registry import find, is_importable

CALLED = {
    "num_speculative_tokens": "width",
    "model": "model",
    "quantization": "quantize",
    "max_model_len": "max_context",
    "enforce_eager": "eager",
    "prompt_lookup_min": "shortest",
    "prompt_lookup_max": "longest",
    "suffix_decoding_max_tree_depth": "depth",
    "suffix_decoding_max_cached_requests": "cached_requests",
    "suffix_decoding_max_spec_factor": "factor",
    "suffix_decoding_min_token_prob": "least",
    "draft_sample_method": "draft",
    "synthetic_acceptance_rates": "rates",
    "synthetic_acceptance_length": "length",
    "rejection_sample_method": "verify",
}
BY_REQUESTS = "num_speculative_tokens_per_batch_size"

# Flags: the option that each one sets, and its value for true and for false.
PARALLEL = "parallel_drafting"
FLAGS = {"use_heterogeneous_vocab": ("vocabulary", "strings", "same"), PARALLEL: ("parallel", True, False)}

# Accepted without effect: they choose between implementations of the same result, of which there is one here.
NO_EFFECT = ("disable_padded_drafter_batch", "use_local_argmax_reduction")

# key: (values that agree with the only behavior here, reason and remedy for other values)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "draft_tensor_parallel_size": ((1,), "a drafter runs on one device: pass 1, or leave it out"),
    "tensor_parallel_size": ((), "it means the target's, and models run on one device: leave it out"),
    "moe_backend": (("auto",), "kernels are chosen by `backend` alone, for target and drafter: leave it out"),
    "attention_backend": (("auto",), "kernels are chosen by `backend` alone, for target and drafter: leave it out"),
    "kv_cache_dtype": (("auto",), "a drafter keeps keys and values as the target does: set `kv_dtype` of the engine"),
    "code_revision": ((), "no code of a checkpoint is ever run: leave it out"),
    "enable_adaptive_verification": (
        (False,),
        "drafts that do not pay are cut for every method with exact verification: leave it out",
    ),
    "dspark_draft_topk": ((), "the bias by the token before is added to all tokens: leave it out"),
    "target_model_config": ((), "vLLM fills it in for itself: leave it out"),
    "target_parallel_config": ((), "vLLM fills it in for itself: leave it out"),
    "draft_model_config": ((), "vLLM fills it in for itself: leave it out, and pass `model`"),
    "draft_parallel_config": ((), "vLLM fills it in for itself: leave it out"),
    "draft_load_config": ((), "a checkpoint's format is seen from its files: leave it out"),
}

REVISION = "revision"
KNOWN = ("method", *CALLED, BY_REQUESTS, REVISION, *FLAGS, *NO_EFFECT, *REFUSED)
VERIFICATIONS = {"standard": "rejection", "block": "block", "synthetic": "synthetic"}


def translate(config: Mapping[str, Any]) -> tuple[str, dict[str, Setting]]:
    """Return the method that a `speculative_config` selects, and its settings by option name."""
    elsewhere = {ours: theirs for theirs, ours in CALLED.items()}
    for key in config:
        if key not in KNOWN:
            near = hint(key, KNOWN, elsewhere)
            raise UserError(f"`speculative_config` has no key `{key}`{near}: expected {', '.join(sorted(KNOWN))}")
    given = {key: value for key, value in config.items() if value is not None}
    for key, (harmless, instead) in REFUSED.items():
        if key in given and given[key] not in harmless:
            raise UserError(f"`{key}` of `speculative_config` is not supported: {instead}")
    pin_revision(given)
    drop_stored_format(given)
    method = choose_method(given)
    mirror(given)
    settings = {CALLED[key]: Setting(key, value) for key, value in given.items() if key in CALLED}
    own = {field.name for field in fields(find(method).Options)}
    for key, (ours, true, false) in FLAGS.items():
        # A method without the option does what `false` says.
        if key in given and (is_set(given, key) or ours in own):
            settings[ours] = Setting(key, true if is_set(given, key) else false)
    if "verify" in settings:
        settings["verify"] = verification(settings["verify"])
    return method, settings


def pin_revision(given: dict[str, Any]) -> None:
    """Join `revision` to the hub name in `model`."""
    revision, model = given.pop(REVISION, None), given.get("model")
    if revision is not None:
        if not isinstance(revision, str) or not isinstance(model, str):
            raise UserError(f"`revision` of `speculative_config` is `{revision}`: pass it with a `model` of the hub")
        given["model"] = with_revision(model, revision)


def drop_stored_format(given: dict[str, Any]) -> None:
    """Drop a `quantization` that names the format of the draft checkpoint, after checking it."""
    name, model = given.get("quantization"), given.get("model")
    if name in STORED_FORMATS and isinstance(model, str):
        del given["quantization"]
        if (quantize := resolve_quantize(name, locate(model))) is not None:
            given["quantization"] = quantize


def choose_method(given: dict[str, Any]) -> str:
    """Return `method`, else the method that `model` implies; drop a `model` that only names the method."""
    method, model = given.get("method"), given.get("model")
    for key, value in (("method", method), ("model", model)):
        if value is not None and not isinstance(value, str):
            raise UserError(f"`{key}` of `speculative_config` is `{value}`: expected a string")
    if method is None and model is None:
        raise UserError("`speculative_config` names no method: pass `method`, or a draft `model`")
    if method in ("ngram", "[ngram]", "ngram_gpu") or (method is None and model in ("ngram", "[ngram]")):
        if model in ("ngram", "[ngram]"):
            del given["model"]
        return "ngram"
    if method == "custom_class" or (method is None and is_own_module(str(model))):
        if model is None:
            raise UserError(
                "`custom_class` needs the import path of a module with `Options` and `build`: pass it as `model`"
            )
        return str(given.pop("model"))
    return renamed(str(method), given) if method is not None else method_of(str(model))


def renamed(method: str, given: dict[str, Any]) -> str:
    """Return our name of a vLLM method. Drop `parallel_drafting` for a method that always drafts in parallel."""
    if method == "mtp" or method.endswith("_mtp"):
        return "mtp"
    asked = PARALLEL in given and is_set(given, PARALLEL)
    model = given.get("model")
    if method == "eagle3" and (asked or (model and Path(model).is_dir() and method_of(model) == "peagle")):
        method = "peagle"
    if method == "peagle":
        given.pop(PARALLEL, None)
    return method


def is_own_module(model: str) -> bool:
    """Report whether `model` is the dotted path of an existing module; a file of that name takes precedence."""
    return "." in model and not Path(model).exists() and is_importable(model)


def method_of(model: str) -> str:
    """Return the method of a draft checkpoint, from its configuration and its tensors."""
    if not locate(model).is_dir():
        return "draft_model"
    folder = open_folder(find_folder(model))
    known = any(read(folder) is not None for read in READERS)
    return open_head(model).shape.kind if known or FC in folder.tensors else "draft_model"


def mirror(given: dict[str, Any]) -> None:
    """Fill in the missing one of the two n-gram lengths with the given one."""
    shortest, longest = "prompt_lookup_min", "prompt_lookup_max"
    if shortest in given or longest in given:
        given.setdefault(shortest, given.get(longest))
        given.setdefault(longest, given.get(shortest))


def is_set(given: Mapping[str, Any], key: str) -> bool:
    """Read a flag."""
    try:
        return truth(given[key])
    except ValueError:
        raise UserError(f"`{key}` is `{given[key]}`: expected true or false") from None


def verification(setting: Setting) -> Setting:
    """Translate vLLM's `rejection_sample_method`."""
    if setting.value not in VERIFICATIONS:
        expected = ", ".join(VERIFICATIONS)
        raise UserError(f"`{setting.name}` is `{setting.value}`: expected one of {expected}, or leave it out for exact")
    return Setting(setting.name, VERIFICATIONS[setting.value])
