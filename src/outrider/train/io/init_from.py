"""Initialise heads from others: the saved state of another run, exported heads, or the heads that ship.

A new head may be deeper than the old one, and have another draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ...catalog import shipped
from ...errors import UserError
from ...kernels import Weight
from ...kernels.quantization import dequantize
from ...speculation.checkpoints import Head, open_head
from ...speculation.vocabulary import TARGET_IDS, listed_ids
from ...weights import open_checkpoint
from ..heads.base import DraftHead
from ..job import Job
from ..loop import trained
from ..progress import ProgressReporter
from ..target import TargetInfo
from . import checkpoints
from .disk import CONFIG
from .export import GGUF
from .vllm_export import LAYOUT_FIELDS, read_back, with_d2t

SHIPPED = "shipped"
OPTIONAL = {"anchored", "confidence", "confidence_markov"}  # flags of a head that the new one need not share
# Parameters with a row for each token of the draft vocabulary.
BY_TOKEN = ("lm_head.weight", "embed_tokens.weight", "markov_head.markov_w2.weight")
OUTPUTS = ("o_proj.weight", "down_proj.weight")  # matrices whose result a layer adds to the residual
AUX_FIELD = "aux_layers"  # of HeadShape
IDS = "ids"  # buffer of autoregressive heads


@dataclass(frozen=True)
class SavedHead:
    """The parameters of another head."""

    values: Mapping[str, Tensor]  # by parameter name
    draft_ids: Tensor | None  # [U] int64: the tokens that it could draft; None: all


class TensorSource(Protocol):
    """The tensors of a head or of a model."""

    def names(self) -> Iterable[str]: ...

    def weight(self, name: str) -> Weight: ...


def init_heads(
    job: Job, target_info: TargetInfo, draft_heads: Mapping[str, DraftHead], progress: ProgressReporter
) -> None:
    """Copy the parameters of the heads with the same names in `job.init_from`, and nothing else of that run."""
    sources = find_sources(job, target_info.torch_device)
    for name, head in draft_heads.items():
        if name not in sources:
            progress.note(f"`{name}` is not in `{job.init_from}`: it starts untrained")
            continue
        source = sources[name]
        saved = read_exported(source, head, target_info) if isinstance(source, Path) else source
        unfit = copy_parameters(head, saved.values, saved.draft_ids)
        if unfit:
            raise UserError(
                f"`{name}` cannot start from the one in `{job.init_from}`: the shape of `{unfit[0]}` differs, so pass "
                "the options of that head"
            )
        if isinstance(source, Path):
            head.on_loaded()


def find_sources(job: Job, device: torch.device) -> Mapping[str, SavedHead | Path]:
    """Return saved heads on `device`, or folders of exported ones, by name. Refuse if none of them is trained."""
    assert job.init_from is not None
    path, names = Path(job.init_from).expanduser(), [spec.name for spec in job.methods]
    sources: Mapping[str, SavedHead | Path]
    if job.init_from == SHIPPED:
        heads = {spec.name: shipped.find(job.model, spec.method) for spec in job.methods}
        sources = {name: head for name, head in heads.items() if head is not None}
    elif not path.exists():
        raise UserError(
            f"`{job.init_from}` does not exist: pass the `{checkpoints.STATE}` of another run, the folder of a head, a "
            f"folder with one folder for each head, or `{SHIPPED}`"
        )
    elif is_head(path):
        if len(names) > 1:
            raise UserError(
                f"`{job.init_from}` is one head, and {len(names)} are trained: pass a folder with one for each"
            )
        sources = {names[0]: path}
    elif path.is_dir():
        sources = {folder.name: folder for folder in path.iterdir() if is_head(folder)}
    else:
        sources = heads_in_state(path, device)
    if not sources.keys() & set(names):
        raise UserError(
            f"`{job.init_from}` holds none of {', '.join(names)}: it has {', '.join(sorted(sources)) or 'nothing'}"
        )
    return sources


def is_head(path: Path) -> bool:
    return path.suffix == ".gguf" or (path / CONFIG).is_file() or (path / GGUF).is_file()


def heads_in_state(file: Path, device: torch.device) -> dict[str, SavedHead]:
    state = checkpoints.read(file, device, "pass that of another run")
    if "words" not in state:  # a version before draft vocabularies were saved
        return {}
    return {name: SavedHead(values, state["words"][name]) for name, values in state["students"].items()}


def read_exported(path: Path, draft_head: DraftHead, target_info: TargetInfo) -> SavedHead:
    """Read an exported head or model under the parameter names of `draft_head`."""
    names = {name: draft_head.checkpoint_name(name) for name, _ in draft_head.named_parameters()}
    if draft_head.method == "draft_model":
        model = open_checkpoint(path / GGUF if (path / GGUF).is_file() else path)
        ids = None
        if TARGET_IDS in model.config:
            rows = model.weight(names["embed_tokens.weight"]).shape[0]
            ids = torch.tensor(listed_ids(model.config, target_info.config.vocabulary, rows).target)
        return SavedHead(dequantized(model, names), ids)
    head = open_head(str(path), target_info.config, draft_head.method)
    export = draft_head.export()
    ours = read_back(export.config, with_d2t(export))
    check_same_network(head, ours, draft_head)
    # The reader gives the tensors of all layouts one set of names: look up those of this head's own export.
    read_names = {name: _name_of(export.tensors[names[name]], ours) for name in names}
    return SavedHead(dequantized(head, read_names), head.draft_ids)


def _name_of(tensor: Tensor, head: Head) -> str:
    return next(name for name, held in head.tensors.items() if held is tensor)


def dequantized(source: TensorSource, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors, f32, on the host, without those that the source lacks. names: by parameter name."""
    present = set(source.names())
    return {name: dequantize(source.weight(stored)) for name, stored in names.items() if stored in present}


def check_same_network(head: Head, ours: Head, draft_head: DraftHead) -> None:
    """Refuse a head whose flags differ: in another network the same tensors compute something else."""
    flags = [field.name for field in fields(ours.shape) if isinstance(getattr(ours.shape, field.name), (bool, str))]
    stated = [AUX_FIELD] if getattr(head.shape, AUX_FIELD) is not None else []
    for name in stated + [flag for flag in flags if flag not in LAYOUT_FIELDS | OPTIONAL]:
        theirs, own = getattr(head.shape, name), getattr(ours.shape, name)
        if theirs != own:
            raise UserError(
                f"`{draft_head.method}` cannot start from `{head.path}`, whose `{name}` is {theirs} and here {own}: "
                "pass the options of that head"
            )


@torch.no_grad()
def copy_parameters(draft_head: DraftHead, values: Mapping[str, Tensor], draft_ids: Tensor | None) -> list[str]:
    """Copy the parameters of another head, which drafted `draft_ids` [U]; None: all tokens.

    Layers that the other head lacks are set to add nothing, and tokens that it lacks keep their initial rows. Returns
    the names of parameters that do not fit, and copies nothing if there are any.
    """
    own = {name: value for name, value in trained(draft_head).items() if name != IDS}
    unfit = [name for name in own if name in values and not _fits(name, own[name], values[name])]
    if unfit:
        return unfit
    for name, value in own.items():
        if name not in values:
            if name.endswith(OUTPUTS):
                value.zero_()
        elif name in BY_TOKEN:
            new_ids, old_ids = _token_ids(draft_head.draft_ids, value), _token_ids(draft_ids, values[name])
            new_rows, old_rows = _shared_rows(new_ids, old_ids)
            value[new_rows] = values[name].to(value)[old_rows]
        else:
            value.copy_(values[name])
    return []


def _fits(name: str, own: Tensor, other: Tensor) -> bool:
    return own.shape[1:] == other.shape[1:] if name in BY_TOKEN else own.shape == other.shape


def _token_ids(draft_ids: Tensor | None, table: Tensor) -> Tensor:
    """Return the target's ids of the rows of a table."""
    return torch.arange(len(table)) if draft_ids is None else draft_ids.cpu()


def _shared_rows(new_ids: Tensor, old_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of shared tokens in the new and in the old table."""
    rows = torch.full((int(max(new_ids.max(), old_ids.max())) + 1,), -1)
    rows[old_ids] = torch.arange(len(old_ids))
    shared = (rows[new_ids] >= 0).nonzero().flatten()
    return shared, rows[new_ids[shared]]
