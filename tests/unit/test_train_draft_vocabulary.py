"""Draft models with a reduced vocabulary, and draft models that start as layers of the target."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import unrolled
from torch import Tensor

import tiny
from outrider import LLM, SamplingParams
from outrider.errors import UserError
from outrider.train.heads.draft_model import DraftModelHead, Options
from outrider.train.io.export import write_model
from outrider.train.target import TargetOutputs
from outrider.weights import gguf_writer, open_checkpoint
from outrider.weights.random import byte_tokens

KNOWN = 60
SMALL = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_width": 64, "share": 1.0}


def make(name: str = "llama", **variant: Any) -> tuple[DraftModelHead, TargetOutputs]:
    target = unrolled.model(name)
    target_info = unrolled.target_info(target, name)
    draft_head = DraftModelHead(target_info, Options(**{**SMALL, **variant}), 40)
    return draft_head, unrolled.forward(target, unrolled.pack(), draft_head.aux_layers)


def stirred() -> DraftModelHead:
    draft_head, _ = make(draft_vocabulary=KNOWN)
    unrolled.stir(draft_head)
    return draft_head


def next_of(draft_head: DraftModelHead, text: list[int]) -> int:
    """The token that the student likes best after a text, in the target's ids."""
    length = len(text)
    pack = unrolled.Pack(
        tokens=torch.tensor([text]),
        positions=torch.arange(length)[None],
        documents=torch.zeros(1, length, dtype=torch.int64),
        answered=torch.ones(1, length, dtype=torch.bool),
    )
    with torch.no_grad():
        best = int(draft_head.logits(pack)[0, -1].argmax())
    assert draft_head.vocab.ids is not None
    return int(draft_head.vocab.ids[best])


def folder_of(draft_head: DraftModelHead, model: Path, to: Path) -> tuple[str, Path]:
    """The target and the student's folder."""
    return str(model), write_model(
        draft_head.export(), to, replace(draft_head.target_info, model=str(model)), "f32", {}
    )


def file_of(draft_head: DraftModelHead, model: Path, to: Path) -> tuple[str, Path]:
    """The target and the student as GGUF."""
    config = json.loads((model / "config.json").read_text())
    stored = open_checkpoint(str(model))
    words = {key: value for key, value in byte_tokens("", tiny.VOCABULARY).items() if key != "path"}
    tensors = gguf_writer.rename(config, {name: stored.weight(name) for name in stored.names()})
    target = to.with_name("target.gguf")
    target.write_bytes(b"".join(gguf_writer.encode(gguf_writer.describe(config, "target", "f32") | words, tensors)))
    return str(target), write_model(
        draft_head.export(), to, replace(draft_head.target_info, model=str(target)), "f32", {}
    )


@pytest.mark.parametrize("write", [folder_of, file_of])
def test_the_engine_drafts_what_the_head_predicts(
    write: Callable[[DraftModelHead, Path, Path], tuple[str, Path]],
    tiny_folder: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Where all drafts are kept, three tokens of four are the student's, some of them after words it does not know."""
    draft_head = stirred()
    model, source = write(draft_head, tiny_folder(), tmp_path / "draft")
    llm = LLM(model, backend="reference", speculate=f"draft_model:model={source},verify=synthetic,rates=1/1/1")
    params = SamplingParams(max_tokens=13, temperature=0, ignore_eos=True)
    unknown = 0
    for seed in range(3):
        text = tiny.prompt(9, seed=seed)
        output = llm.generate([text], params)[0].completions[0].token_ids
        matches = [token == next_of(draft_head, [*text, *output[:index]]) for index, token in enumerate(output)]
        assert sum(matches) >= 9, matches
        assert draft_head.vocab.ids is not None
        unknown += sum(token not in draft_head.vocab.ids.tolist() for token in text)
    assert unknown > 3


def test_unknown_tokens_map_to_the_rarest_known_token() -> None:
    draft_head, outputs = make(draft_vocabulary=KNOWN)
    ids = draft_head.vocab.ids
    assert (
        ids is not None and draft_head.own_ids is not None and len(ids) == KNOWN == len(draft_head.embed_tokens.weight)
    )
    stands = draft_head.export().config["unknown_token_id"]
    others = [token for token in range(tiny.VOCABULARY) if token not in ids.tolist()]
    assert draft_head.own_ids[ids].tolist() == list(range(KNOWN))
    assert set(draft_head.own_ids[others].tolist()) == {stands}
    assert draft_head.target_info.token_counts[ids].min() == draft_head.target_info.token_counts[ids[stands]]
    report = draft_head(outputs)
    assert report.loss.isfinite() and report.counted.sum() > 0


def test_losses_cover_only_the_draft_vocabulary() -> None:
    draft_head, outputs = make(draft_vocabulary=KNOWN)
    unrolled.stir(draft_head)
    ids, logits = draft_head.vocab.ids, draft_head.logits(outputs.pack).detach()
    losses: list[Tensor] = []
    for where in unrolled.documents(outputs.pack):
        draft_ids, wanted = where.of(logits).log_softmax(-1), where.of(outputs.logits)[:, ids].log_softmax(-1)
        answered = where.of(outputs.pack.answered)[1:]
        losses += (wanted.exp() * (wanted - draft_ids)).sum(-1)[:-1][answered].unbind()
    assert unrolled.close(draft_head(outputs).loss.detach(), torch.stack(losses).mean())


def test_copied_layers_are_the_targets() -> None:
    """All of them in their order are the target itself, as far as its embedding is its head."""
    layers = unrolled.model("llama").config.layers
    draft_head, outputs = make(copied=tuple(range(layers)))
    draft_head.embed_tokens.weight.data.copy_(draft_head.target_info.embedding)
    states = draft_head.norm(draft_head.states(outputs.pack))
    for where in unrolled.documents(outputs.pack):
        assert unrolled.close(where.of(states.detach()), where.of(outputs.last_state))


def test_copied_layers_have_the_given_order() -> None:
    draft_head, _ = make(copied=(2, 0), draft_vocabulary=KNOWN)
    assert len(draft_head.layers) == 2 and draft_head.export().config["num_hidden_layers"] == 2
    own = dict(draft_head.named_parameters())
    for number, theirs in enumerate((2, 0)):
        for name in ("self_attn.k_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"):
            wanted = draft_head.target_info.weights(f"model.layers.{theirs}.{name}")
            assert torch.equal(own[f"layers.{number}.{name}"].detach(), wanted)
    assert torch.equal(draft_head.embed_tokens.weight.detach(), draft_head.target_info.embedding[draft_head.vocab.ids])


@pytest.mark.parametrize(
    ("name", "wrong", "culprit"),
    [
        ("llama", {"copied": (0, 99)}, "`copied` names layer 99"),
        ("qwen3", {"copied": (0,)}, "`copied` needs a target with plain Llama layers"),
        ("llama", {"draft_vocabulary": 10**6}, "`draft_vocabulary` is 1000000"),
    ],
)
def test_invalid_options_are_refused(name: str, wrong: dict[str, Any], culprit: str) -> None:
    with pytest.raises(UserError, match=culprit):
        make(name, **wrong)


@pytest.mark.parametrize(
    ("ids", "culprit"),
    [
        (list(range(KNOWN - 1)), f"no {KNOWN} rising ids"),
        ([*range(KNOWN - 1), 3], f"no {KNOWN} rising ids"),
        (["a"] * KNOWN, f"no {KNOWN} rising ids"),
        ([*range(KNOWN - 1), 10**6], "up to 1000000, but this target has"),
    ],
)
def test_damaged_lists_are_refused(
    ids: list[Any], culprit: str, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    model, source = folder_of(stirred(), tiny_folder(), tmp_path / "draft")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"target_ids": ids}))
    with pytest.raises(UserError, match=culprit):
        LLM(model, backend="reference", speculate=f"draft_model:model={source}")
