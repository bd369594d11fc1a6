"""Heads initialized from exported heads: the parameters are those that were trained."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import unrolled
from test_train_draft_vocabulary import file_of
from torch import Tensor

from outrider.catalog import shipped
from outrider.errors import UserError
from outrider.models import read_config
from outrider.train.heads.base import DraftHead
from outrider.train.heads.draft_model import DraftModelHead
from outrider.train.io import checkpoints, init_from
from outrider.train.io.export import StorageFormat, write_head, write_model, write_speculators
from outrider.train.io.init_from import copy_parameters
from outrider.train.job import Job
from outrider.train.loop import Limits, TrainLoop, trained
from outrider.train.methods import TRAINABLE, HeadSpec, parse
from outrider.train.progress import TextProgress
from outrider.train.target import TargetInfo
from outrider.weights import open_checkpoint

ASKED = {
    "eagle3": "eagle3:length=2,draft_vocabulary=60",
    "eagle": "eagle:length=2",
    "peagle": "peagle:length=2,draft_vocabulary=60,layers=1",
    "dflash": "dflash:block=3,layers=1,head=trained",
    "dspark": "dspark:block=4,layers=1,aux_layers=1/3,markov_rank=4,draft_vocabulary=60",
    "medusa": "medusa:heads=2,draft_vocabulary=60",
    "mtp": "mtp:length=2",
    "draft_model": "draft_model:width=32,heads=4,kv_heads=2,mlp_width=64,layers=1,draft_vocabulary=60",
}
DEEPER = {"eagle3": {"layers": 3}, "dspark": {"layers": 2}, "medusa": {"blocks": 2}, "draft_model": {"layers": 2}}
ROUNDING = {"f32": 0.0, "q8_0": 1 / 127}  # of the largest number of a block


def job(given: object, *asked: str, model: str = "llama") -> Job:
    return Job(model, Path("out"), parse(asked), answers=Path("answers"), init_from=str(given))


def target_info() -> TargetInfo:
    return unrolled.target_info(unrolled.model())


def built_head(asked: HeadSpec, seed: int) -> DraftHead:
    torch.manual_seed(seed)
    return asked.build(target_info(), 40)


class FixedTarget:
    """A target with fixed outputs."""

    def forward(self, pack: Any, aux_layers: Any) -> Any:
        return unrolled.forward(unrolled.model(), pack, tuple(aux_layers))


def trained_head(method: str, folder: Path) -> tuple[DraftHead, dict[str, Any]]:
    """Return a trained head and the state of its run, which is saved in `folder`."""
    draft_head, state = train(method)
    checkpoints.save(folder, state)
    return draft_head, state


@functools.cache
def train(method: str) -> tuple[DraftHead, dict[str, Any]]:
    """Train a head for three steps, once for all tests: they do not change it."""
    asked = parse([ASKED[method]])[0]
    draft_head = built_head(asked, 1)
    unrolled.stir(draft_head)
    loop = TrainLoop(FixedTarget(), {method: draft_head}, {method: asked.recipe}, Limits(steps=3))
    for _ in range(3):
        loop.train_step(unrolled.pack())
    return draft_head, loop.state()


def written(draft_head: DraftHead, folder: Path, storage: StorageFormat) -> Path:
    path = folder / draft_head.method
    if draft_head.method == "draft_model":
        source = replace(target_info(), model="random/tiny")  # it has no files
        write_model(draft_head.export(), path, source, storage, {})
    else:
        write_head(draft_head.export(), path, storage, {})
    return path


def initialized(given: object, method: str, **more: object) -> DraftHead:
    """Initialize a head from `given`, with the options of ASKED and `more`."""
    options = dict(one.split("=") for one in ASKED[method].partition(":")[2].split(",")) | more
    wanted = job(given, f"{method}:" + ",".join(f"{key}={value}" for key, value in options.items()))
    draft_head = built_head(wanted.methods[0], 2)
    init_from.init_heads(wanted, target_info(), {method: draft_head}, TextProgress())
    return draft_head


def close(found: Tensor, wanted: Tensor, share: float) -> bool:
    return bool(((found - wanted).abs() <= share * wanted.abs().max()).all())


@pytest.mark.parametrize("storage", ROUNDING)
@pytest.mark.parametrize("method", TRAINABLE)
def test_an_exported_folder_gives_the_same_head_as_the_state(
    method: str, storage: StorageFormat, tmp_path: Path
) -> None:
    draft_head, state = trained_head(method, tmp_path)
    written(draft_head, tmp_path, storage)
    wanted = initialized(tmp_path / checkpoints.STATE, method)
    assert all(torch.equal(value, state["students"][method][name]) for name, value in trained(wanted).items())
    for given in (tmp_path, tmp_path / method):
        found = initialized(given, method)
        assert found.export().tensors.keys() == wanted.export().tensors.keys()
        tensors = found.export().tensors
        for name, value in wanted.export().tensors.items():
            assert close(tensors[name], value, ROUNDING[storage]), name
        same = all(torch.equal(tensors[name], value) for name, value in wanted.export().tensors.items())
        assert same == (storage == "f32")
        for each in (found, wanted):
            torch.manual_seed(0)
            each(unrolled.forward(unrolled.model(), unrolled.pack(), each.aux_layers))
        for name, value in trained(wanted).items():  # the sizes of states, too: the matrix over them is as it was
            assert close(trained(found)[name].float(), value.float(), ROUNDING[storage] or 1e-6), name


@pytest.mark.parametrize("method", DEEPER)
def test_a_deeper_head_keeps_the_loss_of_its_source(method: str, tmp_path: Path) -> None:
    draft_head, _ = trained_head(method, tmp_path)
    found = initialized(written(draft_head, tmp_path, "f32"), method, **DEEPER[method])
    assert len(trained(found)) > len(trained(draft_head))
    outputs = unrolled.forward(unrolled.model(), unrolled.pack(), draft_head.aux_layers)
    losses = []
    for each in (draft_head, found):
        torch.manual_seed(0)
        losses.append(each(outputs).loss)
    torch.testing.assert_close(losses[1], losses[0])


def test_rows_are_copied_by_token_of_the_file(tmp_path: Path) -> None:
    for method, table in (("eagle3", "lm_head.weight"), ("draft_model", "embed_tokens.weight")):
        draft_head, _ = trained_head(method, tmp_path)
        found = initialized(written(draft_head, tmp_path, "f32"), method, draft_vocabulary=70)
        assert draft_head.draft_ids is not None and found.draft_ids is not None
        rows = [found.draft_ids.tolist().index(word) for word in draft_head.draft_ids.tolist()]
        assert rows != list(range(60))
        assert torch.equal(trained(found)[table][rows], trained(draft_head)[table])


def test_a_draft_model_in_a_gguf_file(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    draft_head, _ = trained_head("draft_model", tmp_path)
    assert isinstance(draft_head, DraftModelHead)
    _, file = file_of(draft_head, tiny_folder(), tmp_path / "draft_model")
    for given in (tmp_path, file.parent, file):
        found = initialized(given, "draft_model")
        assert all(torch.equal(value, trained(draft_head)[name]) for name, value in trained(found).items())


@pytest.mark.parametrize("method", ["eagle3", "dspark", "medusa"])
def test_the_speculators_layout_is_read(method: str, tmp_path: Path) -> None:
    draft_head, _ = trained_head(method, tmp_path)
    write_speculators(draft_head.export(), tmp_path / "theirs", target_info(), 3, {}, "f32")
    found = initialized(tmp_path / "theirs", method).export().tensors
    for name, value in draft_head.export().tensors.items():
        if name != "model.mask_embedding":  # there it is a row of the target's embedding
            assert torch.equal(found[name], value), name


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    draft_head, _ = trained_head("dspark", tmp_path)
    head = written(draft_head, tmp_path, "f32")
    for given, said in (
        ({"mlp_width": 48}, "the shape of `layers.0.mlp.gate_proj.weight` differs"),
        ({"from_anchor": "no"}, "whose `from_anchor` is True and here False"),
        ({"aux_layers": "1/2"}, r"whose `aux_layers` is \(1, 3\) and here \(1, 2\)"),
    ):
        with pytest.raises(UserError, match=said):
            initialized(head, "dspark", **given)
    for wanted, said in (
        (job(head, "dspark", "mtp"), "is one head, and 2 are trained"),
        (job(tmp_path, "mtp"), "holds none of mtp: it has dspark"),
        (job(tmp_path / "nowhere", "mtp"), "`.*nowhere` does not exist"),
        (job(init_from.SHIPPED, "eagle3"), "`shipped` holds none of eagle3"),
    ):
        with pytest.raises(UserError, match=said):
            init_from.find_sources(wanted, torch.device("cpu"))
    with pytest.raises(UserError, match="is a head of the method `dspark`"):
        initialized(head, "medusa")


@pytest.mark.parametrize("method", ["eagle3", "dspark", "medusa", "draft_model"])
def test_every_parameter_of_shipped_heads_is_read(method: str) -> None:
    """The target is there by its shape alone."""
    config = read_config(open_checkpoint("random/smollm2-135m").config)
    table = torch.zeros(1, 1).expand(config.vocabulary, config.width)  # [V, E]
    counts = torch.zeros(config.vocabulary, dtype=torch.int64)
    target = TargetInfo("", config, table, table, (2, 15, 27), counts, table.device, lambda _: table[0, 0])
    path = shipped.find("smollm2-135m", method)
    assert path is not None
    card = json.loads(((path if path.is_dir() else path.parent) / shipped.CARD).read_text())
    given = {key: value for key, value in card["head"]["options"].items() if value not in ([], None)}
    spelled = {key: "/".join(map(str, value)) if isinstance(value, list) else value for key, value in given.items()}
    wanted = job(init_from.SHIPPED, method + ":" + ",".join(f"{key}={value}" for key, value in spelled.items()))
    found = init_from.find_sources(replace(wanted, model="smollm2-135m"), table.device)
    draft_head = wanted.methods[0].build(target, 64)
    assert isinstance(found[method], Path)
    left = init_from.read_exported(path, draft_head, target)
    assert left.values.keys() == {name for name, each in draft_head.named_parameters() if each.requires_grad}
    assert copy_parameters(draft_head, left.values, left.draft_ids) == []
    assert (left.draft_ids is None) == (draft_head.draft_ids is None)
