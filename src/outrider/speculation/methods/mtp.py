"""Multi-token prediction: the modules that a model was trained with, in its checkpoint or in a folder of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...cache.pages import Pages
from ...errors import UserError
from ...models.heads import EagleHead, ModuleChain
from ...weights import locate
from ...weights.loader import open_path
from ..checkpoints import Head, choose_aux_layers, choose_source, has_modules, open_head
from ..drafters.autoregressive import Autoregressive
from ..interface import Target, TreeOptions


@dataclass(frozen=True)
class Options(TreeOptions):
    width: int = 0  # tokens that it drafts at most; 0: one for each module; 4 if there is a single module
    model: str = ""  # the modules: a folder, GGUF file or hub name; default: the model's own, else what ships for it
    quantize: Literal["int8", "int4", "fp8"] | None = None  # format of their float weights; default: the target's


def build(options: Options, target: Target) -> Autoregressive:
    options.check_tree()
    path = None if options.model else locate(target.source)
    own = path is not None and has_modules(open_path(path))
    source = target.source if own else choose_source(options.model, "mtp", target, lacking(target.source, path))
    head = open_head(source, target.model.config, "mtp")
    check(head, options, target)
    quantize = options.quantize or target.quantize
    aux_layers = choose_aux_layers(head, target.model)
    modules = [build_module(head, index, target, quantize) for index in range(head.shape.modules)]
    network: EagleHead[Pages] | ModuleChain[Pages] = modules[0] if len(modules) == 1 else ModuleChain(modules)
    width = options.width or (len(modules) if len(modules) > 1 else TreeOptions.width)
    # Each of several modules reads the states of the one before it at all positions, so none may be missing.
    suspendable = len(modules) == 1
    return Autoregressive(network, target, width, aux_layers, options.branches, options.max_depth, suspendable)


def build_module(head: Head, index: int, target: Target, quantize: str | None) -> EagleHead[Pages]:
    shape, layers = head.shape, head.shape.layers
    # The first module's pages store the target's state, the second's the states that each module passes to the next.
    states = {0: shape.target_width, 1: target.page_size * (shape.modules - 1) * shape.width}.get(index, 0)
    pages = target.storage(1, layers.kv_heads, layers.head_dim, target.kv_dtype, states)
    return EagleHead(head.module(index), target.model, pages, target.max_context, quantize, first=index + 1)


def lacking(source: str, path: Path | None) -> str:
    why = " (GGUF files often leave them out)" if path is not None and path.is_file() else ""
    return (
        f"`{source}` has no modules of multi-token prediction{why}: pass their folder or GGUF file as `model`, or use "
        "another method"
    )


def check(head: Head, options: Options, target: Target) -> None:
    shape, path, config = head.shape, head.path, target.model.config
    stated = head.config.get("vocab_size")
    if stated is not None and stated != config.vocabulary and not shape.own_embedding:
        raise UserError(
            f"the modules of `{path}` are for {stated} tokens, but the target has {config.vocabulary}: "
            "take those that were made for this model"
        )
    if shape.modules == 1:
        return
    if options.width > shape.modules:
        raise UserError(
            f"`width` is {options.width}, but `{path}` has {shape.modules} modules, one for each token: "
            f"pass `width={shape.modules}` or less"
        )
    if options.branches > 1:
        raise UserError(
            f"`branches` is {options.branches}, but `{path}` has {shape.modules} modules, each for one depth of a "
            "chain: leave out `branches`"
        )
