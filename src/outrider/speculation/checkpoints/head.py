"""Choose, open and describe draft heads of all published layouts, with one configuration and one set of tensor names.

Names are those of a decoder (`model.layers.0...`, `model.norm.weight`, `lm_head.weight`), with `model.fc.weight`,
`model.input_norm.weight` and `model.fc_norm.I.weight` beside them. Keys and tensors determine the kind of a head.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor

from ... import catalog
from ...catalog import shipped
from ...errors import UserError
from ...kernels import Weight
from ...models import Model, ModelConfig
from ...models.block_head import BlockShape
from ...models.heads import EagleShape, HeadShape, ModuleShape
from ...models.rope import fit_rope
from ...weights.random import HOST
from ..interface import Target
from .folder import Folder, Held, Packed, module_tensors, open_source
from .readers import FC, QUERY, read_dflash, read_dspark, read_eagle, read_eagle3, read_medusa, read_mtp, read_peagle

log = logging.getLogger(__name__)

# One reader for each kind of head. A reader returns None for a folder that is not of its kind; it looks at tensors and
# keys, never at class names, and no folder suits two readers.
READERS: tuple[Callable[[Folder], HeadShape | None], ...] = (
    read_eagle3,
    read_eagle,
    read_peagle,
    read_medusa,
    read_mtp,
    read_dflash,
    read_dspark,
)
KINDS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
METHODS = {  # published names of the kinds of heads
    "eagle": "EAGLE-1",
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
    "mtp": "MTP",
    "medusa": "Medusa",
    "dflash": "DFlash",
    "dspark": "DSpark",
}
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")  # of a configuration
LAYERED = (EagleShape, BlockShape)  # kinds of heads with decoder layers of their own
COMMON = {field.name for field in fields(HeadShape)}  # described explicitly; the fields of one kind are listed by name


@dataclass(frozen=True)
class Head:
    """A draft head: its shape and its tensors. Model builders use it as a checkpoint."""

    path: Path
    shape: Any  # the HeadShape of its kind
    config: dict[str, object]  # config.json, the layers' part merged in
    tensors: Mapping[str, Held]
    draft_ids: Tensor | None  # [draft vocabulary] int64: the target's ids of the tokens that it can draft; None: all
    norms_are_offset: bool = False
    ignored: tuple[str, ...] = ()  # tensors of the folder that are not used

    def module(self, index: int) -> Head:
        """Return one of several MTP modules as a head."""
        return replace(self, tensors=module_tensors(self.tensors, index), norms_are_offset=self.shape.offset_norms)

    def names(self) -> Iterable[str]:
        return self.tensors

    def weight(self, name: str) -> Weight:
        tensor = self.tensors[name]
        if isinstance(tensor, Packed):
            return tensor.weight()
        return Weight(KINDS[tensor.dtype], tuple(tensor.shape), tensor)

    def release(self) -> None:
        return


def choose_source(given: str, method: str, target: Target, lacking: str = "") -> str:
    """Return `given`, else the shipped head or draft model of the target for `method`.

    lacking: beginning of the error message if there is neither.
    """
    if given:
        warn_of_another_target(Path(given).expanduser(), target)
        return given
    found = shipped.find(target.source, method)
    if found is None:
        beginning = lacking or f"`{method}` needs a head: pass its folder as `model`"
        train = f"outrider train {method} --model {target.source or 'MODEL'} --prompts prompts.jsonl --out heads"
        raise UserError(f"{beginning}, or train one with `{train}`; {_none_ships(method, target.source)}")
    return str(found)


def _none_ships(method: str, source: str) -> str:
    known = ", ".join(f"`{entry.model}`" for entry in shipped.entries() if entry.method == method)
    none = f"none for `{source}` ships with outrider" if source else "none ships with outrider for this model"
    return f"{none}, only for {known}" if known else none


def warn_of_another_target(path: Path, target: Target) -> None:
    """Warn if the head was trained for another model: it may fit by shape, but few drafts would be accepted."""
    record = _target_on_card(path)
    name, sha256 = str(record.get("model")), catalog.known_hash(target.source)
    if sha256:
        same = record.get("sha256") in (None, sha256)
    else:
        same = record.get("bytes") in (None, _weigh(Path(target.source).expanduser()))
    if not same:
        log.warning(
            "`%s` was trained for `%s`, and `%s` is another model: few of its draft tokens will be accepted",
            path,
            name,
            target.source,
        )


def _target_on_card(path: Path) -> dict[str, object]:
    """Return the target on the card beside the weights; empty if there is none."""
    try:
        card = json.loads((path.parent / shipped.CARD if path.is_file() else path / shipped.CARD).read_text())
        record = card.get("target")
    except (OSError, ValueError, AttributeError):
        return {}
    return record if isinstance(record, dict) else {}


def _weigh(path: Path) -> int | None:
    try:
        return shipped.file_bytes(path) if path.exists() else None
    except OSError:
        return None


def open_head(
    source: str, target: ModelConfig | None = None, method: str | None = None, device: torch.device = HOST
) -> Head:
    """Open a head from a folder or by its name on the hub; refuse it if it cannot draft for `target` by `method`.

    device: where random weights are made.
    """
    return read_head(open_source(source, device), target, method)


def read_head(folder: Folder, target: ModelConfig | None = None, method: str | None = None) -> Head:
    """Read a head from an open folder; refuse it if it cannot draft for `target` by `method`."""
    path = folder.path
    shape = next((found for read in READERS if (found := read(folder)) is not None), None)
    if shape is None:
        raise UserError(_unknown_kind(folder))
    if method is not None and shape.kind != method:
        raise UserError(
            f"`{path}` is a head of the method `{shape.kind}` ({METHODS[shape.kind]}): "
            f"pass `{shape.kind}` instead of `{method}`"
        )
    tensors = {name: tensor for name, tensor in folder.tensors.items() if name != "d2t"}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Packed) and tensor.dtype not in KINDS:
            raise UserError(
                f"`{path}` stores the tensor `{name}` as {tensor.dtype}: expected {', '.join(KINDS.values())}"
            )
    if target is not None and not any(key in folder.config for key in ROPE_KEYS):
        shape = _with_rope_of(shape, target, path)
    ids = _draft_ids(folder, target)
    rows = None if ids is None else len(ids)
    head = Head(path, replace(shape, draft_vocabulary=rows), folder.config, tensors, ids, ignored=folder.ignored)
    if target is not None:
        _check(head, target)
    return head


def _with_rope_of(shape: HeadShape, target: ModelConfig, path: Path) -> HeadShape:
    """Return a shape with the target's rope, for a head whose configuration states none."""
    rope = next((rope for rope in target.ropes if rope is not None), None)
    if rope is None or not isinstance(shape, LAYERED):
        return shape
    layers = shape.layers
    fitting = fit_rope(rope, target.head_dim, layers.head_dim)
    if fitting is None:
        raise UserError(
            f"`{path}` states no rope, and that of the target ({rope.kind}) is for heads of {target.head_dim} "
            f"dimensions, not {layers.head_dim}: state `rope_theta` and `rope_scaling` in its config.json"
        )
    return replace(shape, layers=replace(layers, ropes=(fitting,) * layers.layers))


def choose_aux_layers(head: Head, target: Model, chosen: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the layers whose input states the head reads: the user's, else the checkpoint's, else the defaults."""
    layers, count = target.config.layers, head.shape.num_aux_layers
    if head.shape.target_norm:
        return (layers,)
    shape = head.shape
    aux_layers = chosen or shape.aux_layers or shape.default_aux_layers(layers) or target.default_aux_layers()
    source = "`aux_layers`" if chosen else f"`{head.path}`" if shape.aux_layers else "the default"
    if len(aux_layers) != count:
        raise UserError(
            f"`{head.path}` reads {count} states a token, but {source} names {len(aux_layers)}: "
            f"pass {count} layers as `aux_layers`"
        )
    beyond = [layer for layer in aux_layers if not 0 <= layer <= layers]
    if beyond:
        raise UserError(
            f"{source} names the state entering layer {beyond[0]}, but the target has {layers} layers: "
            "take the head that was made for this model"
        )
    log.info("`%s` reads the states that enter layers %s, named by %s", head.path, _list(aux_layers), source)
    return aux_layers


def _draft_ids(folder: Folder, target: ModelConfig | None) -> Tensor | None:
    """Return the target's ids of the draft vocabulary: token j is the target's token j + d2t[j]. None: all."""
    if "d2t" not in folder.tensors:
        return None
    offsets = folder.ids("d2t")
    ids = torch.arange(len(offsets)) + offsets  # [U]
    vocabulary = target.vocabulary if target is not None else folder.count("vocab_size", len(offsets))
    if not len(ids) or bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocabulary:
        raise UserError(
            f"`d2t` of `{folder.path}` does not map its {len(ids)} tokens to rising ids below {vocabulary}: "
            "it is damaged, or the head is for a model with another vocabulary"
        )
    return None if len(ids) == vocabulary else ids


def _check(head: Head, target: ModelConfig) -> None:
    """Refuse a head whose sizes do not fit the target."""
    shape, path = head.shape, head.path
    if shape.target_width != target.width:
        raise UserError(
            f"`{path}` reads states of width {shape.target_width}, but the target's have {target.width}: "
            "take the head that was made for this model"
        )
    if shape.target_layers not in (None, target.layers):
        raise UserError(
            f"`{path}` was made for a model of {shape.target_layers} layers, but the target has {target.layers}: "
            "take the head that was made for this model"
        )
    if shape.target_norm and shape.width != target.width:
        raise UserError(
            f"`{path}` is {shape.width} wide, but the target's states, which it takes as they are, {target.width}: "
            "take the head that was made for this model"
        )
    for part, own in (("embed_tokens", shape.own_embedding), ("lm_head", shape.own_head)):
        if not own and shape.width != target.width:
            raise UserError(
                f"`{path}` is {shape.width} wide and lacks the tensor `{part}.weight`; the target's is "
                f"{target.width} wide: take a checkpoint that holds its own"
            )
    if shape.own_embedding and shape.own_embedding < target.vocabulary:
        raise UserError(
            f"the embedding of `{path}` has {shape.own_embedding} tokens, but the target has {target.vocabulary}: "
            "take the head that was made for this model"
        )
    rows = head.tensors["lm_head.weight"].shape[0] if "lm_head.weight" in head.tensors else None
    if rows is not None and rows != (shape.draft_vocabulary or target.vocabulary):
        expected = shape.draft_vocabulary or target.vocabulary
        raise UserError(
            f"`lm_head.weight` of `{path}` has {rows} rows, but {expected} tokens to draft: "
            "`d2t` is missing, or the head is for another model"
        )


def _unknown_kind(folder: Folder) -> str:
    """Explain why a folder is not a head of a known kind."""
    if not isinstance(folder.config.get("hidden_size"), int):
        return f"the config.json of `{folder.path}` states no `hidden_size`: take it from the original checkpoint"
    if QUERY in folder.tensors and FC not in folder.tensors:
        return f"`{folder.path}` is a model of its own, no draft head: pass it to the method `draft_model`"
    return (
        f"`{folder.path}` is no draft head of a known kind ({', '.join(METHODS.values())}): expected `fc.weight`, and "
        "`layers.0` or `midlayer` with projections that read the width of its configuration, or twice that"
    )


def describe(head: Head, target: Model | None = None) -> list[tuple[str, str]]:
    """Return (part, description) pairs, with the states that the head would read of `target`."""
    return list(_parts(head, target))


def command(head: Head, model: str) -> str:
    """Return a command line that uses the head."""
    speculate = quote(f"{head.shape.kind}:model={head.path}")
    return f"outrider generate PROMPT --model {quote(model)} --speculate {speculate}"


def _parts(head: Head, target: Model | None) -> Iterator[tuple[str, str]]:
    shape = head.shape
    yield "method", f"{shape.kind} ({METHODS[shape.kind]})"
    yield "layout", shape.layout
    yield "reads", _states(head, target)
    yield "width", str(shape.width)
    yield from _own(shape)
    own = shape.own_embedding
    yield "embedding", f"its own, {own} tokens" if own else "the target's"
    yield "head matrix", "its own" if shape.own_head else "the target's"
    ids = head.draft_ids
    yield "can draft", "every token" if ids is None else f"{len(ids)} tokens, ids {int(ids[0])} to {int(ids[-1])}"
    if shape.logit_scale != 1:
        yield "logits", f"times {shape.logit_scale:g}"
    stored = sum(tensor.nbytes for tensor in head.tensors.values())
    kinds = sorted({_kind(tensor) for tensor in head.tensors.values()})
    yield "weights", f"{stored / 1e6:.1f} MB, {' and '.join(kinds)}"
    if shape.target_layers is not None:
        yield "made for", f"a model of {shape.target_layers} layers"
    yield from _made_for(head.config)
    yield "ignored", ", ".join([*head.ignored, *_overruled(head)]) or "nothing"


def _kind(held: Held) -> str:
    return held.kind if isinstance(held, Packed) else str(held.dtype).removeprefix("torch.")


def _states(head: Head, target: Model | None) -> str:
    shape = head.shape
    if shape.target_norm:
        return f"the target's last state, after its last norm, {shape.target_width} wide"
    read = f"{shape.num_aux_layers} states, {shape.target_width} wide"
    aux_layers = shape.aux_layers if target is None else choose_aux_layers(head, target)
    if aux_layers is None:
        return f"{read}: the checkpoint does not say of which layers, the default for the model is taken"
    source = "stated by the checkpoint" if shape.aux_layers else "the default for this model"
    return f"{read}, entering layers {_list(aux_layers)}: {source}"


def _own(shape: HeadShape) -> Iterator[tuple[str, str]]:
    """List the fields that only this kind of head has; parts that the head lacks are left out."""
    own = [(field.name, getattr(shape, field.name), field.default) for field in fields(shape)]
    own = [entry for entry in own if entry[0] not in COMMON]
    parts = {_part(name) for name, value, default in own if value != default}
    for name, value, _ in own:
        if isinstance(value, ModelConfig):
            yield from _layers(value)
        elif value is not None and not isinstance(value, bool) and _part(name) in parts:
            yield name.replace("_", " "), _list(value) if isinstance(value, tuple | list) else str(value)
    yield "flags", _list([name for name, value, _ in own if value is True])


def _part(name: str) -> str:
    """Return the part that a field describes: the first word of its name, as in `markov`, `markov_rank`."""
    return name.split("_")[0]


def _layers(layers: ModelConfig) -> Iterator[tuple[str, str]]:
    heads = f"{layers.heads} heads of {layers.head_dim}, {layers.kv_heads} for keys"
    experts = layers.experts
    inner = f"MLP {layers.mlp_width} wide"
    if experts is not None:
        inner = f"{experts.count} experts {experts.width} wide, {experts.top_k} for each token"
    yield "layers", f"{layers.layers}, each with {heads}, {inner}"
    yield from _attention(layers)
    biases = {"attention": layers.qkv_bias, "its output": layers.output_bias, "MLP": layers.mlp_bias}
    if layers.head_norms:
        yield "head norms", "on queries and keys"
    if any(biases.values()):
        yield "biases", ", ".join(part for part, there in biases.items() if there)
    if any(layers.windows):
        yield "windows", _list([str(window) if window else "all" for window in layers.windows])


def _attention(layers: ModelConfig) -> Iterator[tuple[str, str]]:
    """Describe gates and rotary embedding if they differ from Llama's."""
    rope = next(iter(layers.ropes), None)
    parts = ["with gates"] if layers.gated_attention else []
    if rope is not None and rope.dims:
        parts.append(f"{rope.dims} of {layers.head_dim} dimensions rotate")
    if rope is not None and rope.kind != "default":
        parts.append(f"{rope.kind} rope")
    if parts:
        yield "attention", ", ".join(parts)


def _made_for(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Report the target and draft length that the checkpoint recommends."""
    recommended = config.get("speculators_config")
    if not isinstance(recommended, dict):
        return
    verifier, proposals = recommended.get("verifier"), recommended.get("proposal_methods")
    if isinstance(verifier, dict) and verifier.get("name_or_path"):
        yield "made for", str(verifier["name_or_path"])
    if isinstance(proposals, list) and proposals and isinstance(proposals[0], dict):
        yield "made to draft", f"{proposals[0].get('speculative_tokens')} tokens at a time"


def _overruled(head: Head) -> Iterator[str]:
    """List keys of the configuration that the tensors contradict; the tensors take precedence."""
    config, shape = head.config, head.shape
    if shape.own_head and config.get("tie_word_embeddings"):
        yield "`tie_word_embeddings` (the head matrix is stored)"
    stated = config.get("draft_vocab_size")
    if stated is not None and head.draft_ids is not None and stated != len(head.draft_ids):
        yield f"`draft_vocab_size` {stated} (`d2t` has {len(head.draft_ids)})"
    if isinstance(shape, ModuleShape) or not isinstance(shape, LAYERED):  # beside modules the key is the model's
        return
    stated, layers = config.get("num_hidden_layers"), shape.layers.layers
    if stated is not None and stated != layers:
        yield f"`num_hidden_layers` {stated} (the tensors are of {layers})"


def _list(values: Sequence[object]) -> str:
    words = {True: "yes", False: "no"}
    return ", ".join(words[value] if isinstance(value, bool) else str(value) for value in values) or "none"
