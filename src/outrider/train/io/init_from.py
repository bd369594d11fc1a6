"""What students begin with: the state of another run, heads as they were written, or those that ship."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ...errors import UserError
from ...kernels import Weight
from ...kernels.blocks import dequantize
from ...speculation.checkpoints import Head, open_head
from ...speculation.vocabulary import TARGET_IDS, listed_ids
from ...weights import open_checkpoint, shipped
from ..heads.base import Student
from ..job import Job, Watcher
from ..loop import trained
from ..target import Subject
from . import checkpoints
from .disk import CONFIG
from .export import GGUF
from .vllm_export import APART, understood, with_map

SHIPPED = "shipped"
ADDED = {"anchored", "confidence", "confidence_markov"}  # flags of a head that a student need not share


@dataclass(frozen=True)
class Left:
    """What an earlier student left behind."""

    values: Mapping[str, Tensor]  # by the names of parameters
    words: Tensor | None  # [U] int64: the tokens that it could draft; None: all


class Written(Protocol):
    """The tensors of a head or of a model."""

    def names(self) -> Iterable[str]: ...

    def weight(self, name: str) -> Weight: ...


def begin(job: Job, subject: Subject, students: Mapping[str, Student], watch: Watcher) -> None:
    """Students take over what those of the same names learnt, and nothing else of that run."""
    found = find(job, subject.torch_device)
    for name, student in students.items():
        if name not in found:
            watch.note(f"`{name}` is not in `{job.begin}`: it begins from the start")
            continue
        one = found[name]
        left = read(one, student, subject) if isinstance(one, Path) else one
        unfit = inherit(student, left.values, left.words)
        if unfit:
            raise UserError(
                f"`{name}` cannot begin with that of `{job.begin}`, its options differ: `{unfit[0]}` has another shape"
            )
        if isinstance(one, Path):
            student.taken()


def find(job: Job, place: torch.device) -> Mapping[str, Left | Path]:
    """By name, refused where nothing of it is trained: what was left at `place`, or where a head lies."""
    assert job.begin is not None
    path, names = Path(job.begin).expanduser(), [one.name for one in job.methods]
    found: Mapping[str, Left | Path]
    if job.begin == SHIPPED:
        heads = {one.name: shipped.find(job.model, one.method) for one in job.methods}
        found = {name: head for name, head in heads.items() if head is not None}
    elif not path.exists():
        raise UserError(
            f"there is nothing at `{job.begin}` to begin with: pass the `{checkpoints.STATE}` of another run, the "
            f"folder of a head, one with a folder for each head, or `{SHIPPED}`"
        )
    elif is_head(path):
        if len(names) > 1:
            raise UserError(f"`{job.begin}` is one head, and {len(names)} are trained: pass a folder with one for each")
        found = {names[0]: path}
    elif path.is_dir():
        found = {each.name: each for each in path.iterdir() if is_head(each)}
    else:
        found = of_state(path, place)
    if not found.keys() & set(names):
        raise UserError(
            f"`{job.begin}` holds none of {', '.join(names)}: it has {', '.join(sorted(found)) or 'nothing'}"
        )
    return found


def is_head(path: Path) -> bool:
    return path.suffix == ".gguf" or (path / CONFIG).is_file() or (path / GGUF).is_file()


def of_state(file: Path, place: torch.device) -> dict[str, Left]:
    state = checkpoints.read(file, place, "pass that of another run")
    if "words" not in state:  # of a version that did not write these down
        return {}
    return {name: Left(values, state["words"][name]) for name, values in state["students"].items()}


def read(path: Path, student: Student, subject: Subject) -> Left:
    """A head or a model on disk, under the names of the student's parameters."""
    names = {name: student.checkpoint_name(name) for name, _ in student.named_parameters()}
    if student.method == "draft_model":
        model = open_checkpoint(path / GGUF if (path / GGUF).is_file() else path)
        ids = None
        if TARGET_IDS in model.config:
            rows = model.weight(names["embed_tokens.weight"]).shape[0]
            ids = torch.tensor(listed_ids(model.config, subject.config.vocabulary, rows).target)
        return Left(numbers(model, names), ids)
    head = open_head(str(path), subject.config, student.method)
    own = student.exported()
    ours = understood(own.config, with_map(own))
    refuse_others(head, ours, student)
    # Whoever wrote the folder, the reader gives it the names that it gives this student's own tensors.
    called = {id(tensor): name for name, tensor in ours.tensors.items()}
    return Left(numbers(head, {name: called[id(own.tensors[names[name]])] for name in names}), head.draft_ids)


def numbers(written: Written, names: Mapping[str, str]) -> dict[str, Tensor]:
    """f32, on the host; what is not there is left out."""
    there = set(written.names())
    return {name: dequantize(written.weight(called)) for name, called in names.items() if called in there}


def refuse_others(head: Head, ours: Head, student: Student) -> None:
    """The same tensors in another network would say something else."""
    kinds = [field.name for field in fields(ours.shape) if isinstance(getattr(ours.shape, field.name), (bool, str))]
    said = ["taps"] if head.shape.aux_layers is not None else []
    for name in said + [kind for kind in kinds if kind not in APART | ADDED]:
        theirs, own = getattr(head.shape, name), getattr(ours.shape, name)
        if theirs != own:
            raise UserError(
                f"`{student.method}` cannot begin with `{head.path}`, its options differ: `{name}` is {theirs} there, "
                f"and {own} here"
            )


BY_WORD = ("lm_head.weight", "embed_tokens.weight", "markov_head.markov_w2.weight")  # a row for each that is drafted
ADDS = ("o_proj.weight", "down_proj.weight")  # what a layer adds to the states goes through these
WORDS = "ids"


@torch.no_grad()
def inherit(student: Student, left: Mapping[str, Tensor], words: Tensor | None) -> list[str]:
    """Take over what is left of an earlier student that drafted `words` [U]; None: all tokens.

    Layers that it did not have add nothing at first, and words that it did not know begin as without it. Says which
    parameters do not fit.
    """
    own = {name: value for name, value in trained(student).items() if name != WORDS}
    unfit = [name for name in own if name in left and not _fits(name, own[name], left[name])]
    if unfit:
        return unfit
    for name, value in own.items():
        if name not in left:
            if name.endswith(ADDS):
                value.zero_()
        elif name in BY_WORD:
            known, found = _pairs(_words(student.drafted, value), _words(words, left[name]))
            value[known] = left[name].to(value)[found]
        else:
            value.copy_(left[name])
    return []


def _fits(name: str, own: Tensor, left: Tensor) -> bool:
    return own.shape[1:] == left.shape[1:] if name in BY_WORD else own.shape == left.shape


def _words(drafted: Tensor | None, table: Tensor) -> Tensor:
    """The tokens that the rows of a table stand for."""
    return torch.arange(len(table)) if drafted is None else drafted.cpu()


def _pairs(now: Tensor, then: Tensor) -> tuple[Tensor, Tensor]:
    """Of the words that both know, their rows in the new and in the old table."""
    rows = torch.full((int(max(now.max(), then.max())) + 1,), -1)
    rows[then] = torch.arange(len(then))
    known = (rows[now] >= 0).nonzero().flatten()
    return known, rows[now[known]]
