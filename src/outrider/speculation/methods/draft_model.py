"""Draft with a smaller model: one token at a time or, if it was trained for that, all in one pass (PARD)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ...errors import UserError
from ...kernels import Batch
from ...models import Model
from ...models import build as build_model
from ...tokenizer import Tokenizer
from ...weights import Checkpoint, open_checkpoint
from ..checkpoints import choose_source
from ..drafters.autoregressive import Autoregressive
from ..interface import Target, TreeOptions
from ..vllm_config import method_of
from ..vocabulary import TARGET_IDS, UNKNOWN, Translation, listed_ids, same_ids, same_strings

MASK_TOKENS = ("pard_token", "ptd_token_id", "mask_token_id")  # keys of the configuration that name the mask token
MULTIMODAL_KEYS = ("vision_config", "audio_config")
NO_MODEL = "`draft_model` needs a model that drafts: name it, as in `draft_model:model=smollm2-135m`"


@dataclass(frozen=True)
class Options(TreeOptions):
    """The options of `draft_model`."""

    model: str = ""  # a folder, a GGUF file, a name of the catalog or of the hub; default: what ships for the model
    vocabulary: Literal["same", "strings"] = "same"  # same: its ids are the target's; strings: joined by their texts
    parallel: bool | None = None  # all tokens in one pass over mask tokens; default: if its configuration names one
    quantize: Literal["int8", "int4", "fp8"] | None = None  # format of its float weights; default: the target's


class DraftModel:
    """The Network of this method: a model, and the translation of its vocabulary to the target's."""

    features = 0
    mask_features = None

    def __init__(self, model: Model, translation: Translation, target: Target, context: int, parallel: bool) -> None:
        self.model, self.translation, self.context, self.parallel = model, translation, context, parallel
        self.mask, self.ids = translation.mask, translation.ids
        self.weight_bytes = model.weight_bytes
        shape = model.config
        self.pages = target.storage(shape.layers, shape.kv_heads, shape.head_dim, target.kv_dtype)

    def project_features(self, features: Tensor) -> Tensor:
        return features

    def run(self, batch: Batch, features: Tensor | None) -> Tensor:
        read = replace(batch, tokens=self.translation.read(batch.tokens))
        states, _ = self.model.forward(read, self.pages.layers)  # [T, E]
        return states

    def logits(self, states: Tensor) -> Tensor:
        return self.translation.say(self.model.logits(states))

    def scores(self, states: Tensor) -> Tensor:
        return self.logits(states) if self.ids is None else self.model.logits(states)

    def feedback_features(self, states: Tensor) -> Tensor | None:
        return None


def build(options: Options, target: Target) -> Autoregressive:
    options.check_tree()
    source = choose_source(options.model, "draft_model", target, NO_MODEL)
    try:
        checkpoint = open_checkpoint(source)
        network = _network(options, target, checkpoint)
    except UserError as error:
        if (kind := _head_kind(source)) is not None:
            remedy = f"draft with it by `{kind}:model={source}`"
            raise UserError(f"`{source}` is a head of the method `{kind}`, not a model: {remedy}") from None
        raise UserError(f"the draft model `{source}` cannot be used: {error}") from None
    return Autoregressive(network, target, options.width, branches=options.branches, max_depth=options.max_depth)


def _head_kind(source: str) -> str | None:
    """Return the method whose head a checkpoint holds; None if it holds none, or cannot be read."""
    try:
        kind = method_of(source)
    except UserError:
        return None
    return None if kind == "draft_model" else kind


def _network(options: Options, target: Target, checkpoint: Checkpoint) -> DraftModel:
    _refuse_multimodal(checkpoint.config)
    model = build_model(checkpoint, target.ops, options.quantize or target.quantize, target.max_context)
    if model.config.recurrent is not None:
        raise UserError("it has recurrent layers, which draft models must not have: pick a model with attention alone")
    mask = _mask(options, checkpoint.config, model.config.vocabulary)
    translation = _translation(options, target, checkpoint, model, mask)
    return DraftModel(model, translation, target, min(target.max_context, model.config.context), mask is not None)


def _refuse_multimodal(config: Mapping[str, Any]) -> None:
    for name in MULTIMODAL_KEYS:
        if config.get(name):
            raise UserError(f"it is a multimodal model (`{name}`): pick one that reads text alone")


def _mask(options: Options, config: Mapping[str, Any], vocabulary: int) -> int | None:
    """Return the mask token; None: the model drafts one token at a time."""
    if options.parallel is False:
        return None
    name = next((name for name in MASK_TOKENS if config.get(name) is not None), None)
    if name is None:
        if options.parallel:
            raise UserError(f"its configuration names no mask token (`{MASK_TOKENS[0]}`): leave out `parallel`")
        return None
    mask = config[name]
    if type(mask) is not int or not 0 <= mask < vocabulary:
        raise UserError(f"its configuration says `{name}` is {mask!r}: expected a token below {vocabulary}")
    return mask


def _translation(
    options: Options, target: Target, checkpoint: Checkpoint, model: Model, mask: int | None
) -> Translation:
    target_size, draft_size = target.model.config.vocabulary, model.config.vocabulary
    source = checkpoint.tokenizer_source
    has_tokenizer = "tokenizer.ggml.model" in source if isinstance(source, Mapping) else _has_tokenizer(source)
    tokenizer = Tokenizer.open(source) if has_tokenizer else None
    if TARGET_IDS in checkpoint.config:
        pairs = listed_ids(checkpoint.config, target_size, draft_size)
    elif options.vocabulary == "same":
        pairs = same_ids(target.tokenizer, tokenizer, target_size, draft_size)
    elif tokenizer is None:
        raise UserError("it has no tokenizer to compare strings by: put its `tokenizer.json` beside its weights")
    else:
        pairs = same_strings(target.tokenizer, tokenizer, target_size, draft_size)
    return Translation(
        pairs, target_size, draft_size, _fallback(tokenizer, checkpoint, draft_size), mask, target.device
    )


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file()


def _fallback(tokenizer: Tokenizer | None, checkpoint: Checkpoint, vocabulary: int) -> int | None:
    """Return the token that the model reads in place of one that it lacks: its unknown token, else its end of text."""
    named = [checkpoint.config.get(UNKNOWN)] if tokenizer is None else [tokenizer.unknown_id, tokenizer.eos_id]
    known = range(vocabulary)
    return next((token for token in [*named, *checkpoint.end_ids] if type(token) is int and token in known), None)
