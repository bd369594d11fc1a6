"""The method `draft_model`: which models it takes, and what it drafts with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from fake_target import Stage, continuation
from tokenizers import models
from tokenizers.decoders import Fuse

import refusals
import tiny
from outrider.kernels import Kernels, load
from outrider.models import build as build_model
from outrider.request import Request
from outrider.speculation import build, find
from outrider.speculation.methods.draft_model import DraftModel, Options
from outrider.tokenizer import Tokenizer
from outrider.weights import open_checkpoint

MakeFolder = Callable[..., Path]


@pytest.fixture(scope="module", params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> Kernels:
    return load(request.param)


@pytest.fixture
def variant(tiny_folder: MakeFolder, tmp_path: Path) -> MakeFolder:
    """The tiny model in a folder of its own, with a changed configuration and its words in another order."""

    def make(shuffled: bool = False, words: list[str] | None = None, **config: Any) -> Path:
        folder = tmp_path / "variant"
        shutil.copytree(tiny_folder(), folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        if shuffled or words:
            spellings = words or [*tiny.SPECIAL, *reversed(tiny.CHARACTERS)]
            backend = tokenizers.Tokenizer(models.BPE({text: token for token, text in enumerate(spellings)}, []))
            backend.decoder = Fuse()
            backend.add_special_tokens(tiny.SPECIAL)
            backend.save(str(folder / "tokenizer.json"))
        return folder

    return make


def play(ops: Kernels, tiny_folder: MakeFolder, options: Options, **target: Any) -> tuple[Stage, DraftModel]:
    stage = Stage(ops, tokenizer=Tokenizer.open(tiny_folder()), **target)
    proposer: Any = build("draft_model", options, stage.target)
    stage.begin(proposer)
    return stage, proposer.network


def refusal(tiny_folder: MakeFolder, options: Options) -> str:
    stage = Stage(load("reference"), tokenizer=Tokenizer.open(tiny_folder()))
    return refusals.refusal(lambda: build("draft_model", options, stage.target))


def accept_all(stage: Stage, request: Request, width: int, steps: int = 3) -> None:
    """Every draft is kept, step after step."""
    stage.decode(request, width=width)
    for _ in range(steps):
        before = request.length
        stage.decode(request, width=width)
        assert request.length == before + width + 1


def test_the_method_is_found_by_name() -> None:
    assert find("draft_model").Options is Options
    assert Options().width == 4


@pytest.mark.parametrize("params", [{}, {"temperature": 1.2, "top_p": 0.8}])
def test_the_target_as_its_own_draft_model_is_always_right(
    ops: Kernels, tiny_folder: MakeFolder, params: dict[str, float]
) -> None:
    stage, _ = play(ops, tiny_folder, Options(model=str(tiny_folder())), sampled=bool(params))
    request = stage.request(tiny.prompt(7), 3, **params)
    accept_all(stage, request, width=4)
    assert request.output == continuation(stage.model, request, request.prompt, len(request.output))


def test_another_model_drafts_its_own_continuation(ops: Kernels, tiny_folder: MakeFolder) -> None:
    folder = tiny_folder("qwen3")
    stage, network = play(ops, tiny_folder, Options(model=str(folder)))
    own = build_model(open_checkpoint(folder), ops)
    requests = [stage.request(tiny.prompt(length, length), length) for length in (3, 8)]
    for _ in range(3):
        stage.decode(*requests, width=4)
        for request in requests:
            assert stage.drafts[request] == continuation(own, request, request.prompt + request.output, 4)
    assert network.pages.layers[0].keys.shape[-1] == 32  # its own shape of pages, in the target's numbers


def test_another_order_of_words(ops: Kernels, tiny_folder: MakeFolder, variant: MakeFolder) -> None:
    """The same weights under other ids: their rows are moved so that the model says the same texts."""
    folder = variant(shuffled=True)
    order = [*range(3), *range(100, 2, -1)]  # the target's id of each of the draft model's
    tensors = {name: stored.load().data.clone() for name, stored in open_checkpoint(folder).tensors.items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][order]
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors")
    for params in ({}, {"temperature": 1.2}):
        stage, _ = play(ops, tiny_folder, Options(model=str(folder), vocabulary="strings"), sampled=bool(params))
        request = stage.request(tiny.prompt(7), 3, **params)
        accept_all(stage, request, width=3)
    message = refusal(tiny_folder, Options(model=str(folder)))
    assert "token 3 is `猫` in its vocabulary and ` ` in the target's: pass `vocabulary=strings`" in message
    assert message.startswith(f"the draft model `{folder}` cannot be used: ")


def test_drawn_drafts_of_another_vocabulary_keep_logits_over_the_targets_ids(
    ops: Kernels, tiny_folder: MakeFolder, variant: MakeFolder
) -> None:
    words = [*tiny.SPECIAL, *reversed(tiny.CHARACTERS[1:]), "<unk>"]  # no space, and a word that the target lacks
    options = Options(model=str(variant(words=words)), vocabulary="strings")
    stage, _ = play(ops, tiny_folder, options, sampled=True, coupled=False)
    stage.decode(stage.request(tiny.prompt(6), 1, temperature=1.0), width=4)
    assert stage.draft_batch is not None and stage.draft_batch.logits is not None
    lacking = torch.isinf(stage.draft_batch.logits).all(1)[0].nonzero()[:, 0].tolist()
    assert lacking == [3]  # the space
    assert stage.draft_batch.logits.isfinite().sum() == 4 * 100


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id", "mask_token_id"])
def test_a_model_with_a_mask_token_drafts_at_once(
    ops: Kernels, tiny_folder: MakeFolder, variant: MakeFolder, key: str
) -> None:
    folder = variant(**{key: 55})
    stage, network = play(ops, tiny_folder, Options(model=str(folder)))
    assert network.parallel
    request = stage.request([*tiny.prompt(6), 55])  # the target may know the mask as a word
    for _ in range(2):
        stage.decode(request, width=4)
        text = request.prompt + request.output
        logits, _ = tiny.run(stage.model, [*text, 55, 55, 55], chunk=100)
        assert stage.drafts[request] == logits[-4:].argmax(-1).tolist()
    assert not play(ops, tiny_folder, Options(model=str(folder), parallel=False))[1].parallel


def test_a_shorter_context_is_the_drafters_limit(tiny_folder: MakeFolder, variant: MakeFolder) -> None:
    folder = str(variant(max_position_embeddings=20))
    stage, network = play(load("reference"), tiny_folder, Options(model=folder))
    assert network.context == stage.proposer.needs.context == 20
    assert [len(draft) for draft in stage.decode(stage.request(tiny.prompt(18)), stage.request([5]), width=4)] == [2, 4]


def test_quantisation_is_the_targets_unless_said_otherwise(tiny_folder: MakeFolder) -> None:
    def weight_bytes(target: str | None, **own: Any) -> int:
        options = Options(model=str(tiny_folder()), **own)
        return play(load("reference"), tiny_folder, options, quantize=target)[1].model.weight_bytes

    assert weight_bytes(None) > weight_bytes("int8") == weight_bytes(None, quantize="int8")
    assert weight_bytes("int8") > weight_bytes("int4") == weight_bytes("int8", quantize="int4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "`draft_model` needs a model that drafts: name it, as in `draft_model:model=smollm2-135m`"),
        ({"model": "nowhere/at/all"}, "the draft model `nowhere/at/all` cannot be used: no model at"),
    ],
)
def test_mistakes_in_the_options(tiny_folder: MakeFolder, options: dict[str, Any], message: str) -> None:
    assert refusal(tiny_folder, Options(**options)).startswith(message)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vision_config": {"depth": 2}}, "it is a multimodal model (`vision_config`): pick one that reads text alone"),
        ({"rope_parameters": {"rope_theta": 100.0, "mrope_section": [1, 2]}}, "several axes (`mrope_section`)"),
        ({"rope_parameters": None, "rope_scaling": {"mrope_section": [1, 2]}}, "several axes (`mrope_section`)"),
        ({"model_type": "qwen2_vl", "architectures": []}, "the architecture `qwen2_vl` is not supported"),
        ({"pard_token": 101}, "its configuration says `pard_token` is 101: expected a token below 101"),
    ],
)
def test_models_that_cannot_draft(
    tiny_folder: MakeFolder, variant: MakeFolder, config: dict[str, Any], message: str
) -> None:
    assert message in refusal(tiny_folder, Options(model=str(variant(**config))))


def test_what_the_folder_lacks(tiny_folder: MakeFolder, variant: MakeFolder) -> None:
    assert "names no mask token (`pard_token`): leave out `parallel`" in refusal(
        tiny_folder, Options(model=str(tiny_folder()), parallel=True)
    )
    folder = variant()
    (folder / "tokenizer.json").unlink()
    play(load("reference"), tiny_folder, Options(model=str(folder)))  # as many tokens as the target has
    assert "has no tokenizer to compare strings by" in refusal(
        tiny_folder, Options(model=str(folder), vocabulary="strings")
    )
