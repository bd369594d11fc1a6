"""EAGLE-3 in training equals plain attention step by step, and the engine's head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import unrolled
from safetensors.torch import load_file
from torch import Tensor

import tiny
from outrider.errors import UserError
from outrider.models import read_config
from outrider.models.heads import EagleHead
from outrider.speculation.checkpoints import choose_aux_layers, open_head
from outrider.train.data.pack import Pack
from outrider.train.heads.autoregressive import EagleDraftHead, EagleOptions
from outrider.train.heads.base import most_frequent
from outrider.train.target import TargetInfo, TargetOutputs

AUX_LAYERS = (1, 2, 3)
VECTORS = Path(__file__).parents[1] / "vectors" / "train" / "eagle3.safetensors"
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers": {"layers": 2, "length": 3},
    "head norms": {"head_norms": True, "mlp_width": 40, "length": 2},
    "all tokens": {"draft_vocabulary": 0, "length": 2},
    "other aux layers": {"aux_layers": (0, 3), "length": 2},
    "a frozen head": {"head": "copied", "length": 2},
    "the target's head": {"head": "target", "length": 2},
}


def options(**variant: Any) -> EagleOptions:
    return EagleOptions(**{"draft_vocabulary": 60, "length": 4, "rows": 7} | variant)


def make(name: str = "llama", **variant: Any) -> tuple[EagleDraftHead, TargetOutputs]:
    target = unrolled.model(name)
    draft_head = EagleDraftHead(unrolled.target_info(target, name), options(**variant), unrolled.POSITIONS)
    unrolled.stir(draft_head)
    return draft_head, unrolled.forward(target, unrolled.pack(), draft_head.aux_layers)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_every_step_equals_plain_attention(variant: dict[str, Any]) -> None:
    """Logits, the report and its gradients."""
    draft_head, outputs = make(**variant)
    unrolled.learn(draft_head, outputs, 6)  # or nothing would be right
    weights = [0.8**step for step in range(options(**variant).length)]
    unrolled.same_as_plain(draft_head, outputs, weights)
    assert draft_head.matrix.requires_grad == (options(**variant).head == "trained")


def test_targets_outside_the_draft_vocabulary_count_without_gradient() -> None:
    draft_head, outputs = make(draft_vocabulary=50, length=2)
    assert draft_head.ids is not None
    positions = outputs.pack.answered[:, 2:].nonzero() + torch.tensor([0, 1])  # whose logits are of what was answered
    outside = [at for at in positions.tolist() if int(outputs.logits[*at].argmax()) not in draft_head.ids.tolist()]
    assert 5 < len(outside) < len(positions) - 5
    before = draft_head(outputs)
    for at in outside:
        outputs.logits[*at, draft_head.ids] = outputs.logits[*at, draft_head.ids].flip(0) * 0.9
    after = draft_head(outputs)
    assert torch.equal(before.loss, after.loss) and torch.equal(before.counted, after.counted)
    assert int(before.counted[0]) == len(valid(outputs, 0))


def valid(outputs: TargetOutputs, step: int) -> set[tuple[int, int]]:
    """Return (row, position) in the pack whose token drafted in this step was answered."""
    return {
        (where.row, where.begin + row)
        for where in unrolled.documents(outputs.pack)
        for row in range(where.end - where.begin - 2 - step)
        if where.of(outputs.pack.answered)[row + 2 + step]
    }


def test_a_row_sees_its_document_up_to_itself_and_its_own_draft() -> None:
    """Change one token, then one state of the target, and compare the rows whose logits differ."""
    draft_head, _ = make(length=3)
    outputs = unrolled.forward(unrolled.model(), unrolled.pack(((6, 4), (3,))), draft_head.aux_layers)
    pack, before = outputs.pack, unrolled.logits_of(draft_head, outputs)
    for changed in unrolled.documents(pack):
        for at in range(changed.begin, changed.end):
            tokens, state = pack.tokens.clone(), outputs.aux_states[2].clone()
            tokens[changed.row, at] = (tokens[changed.row, at] + 1) % tiny.VOCABULARY
            state[changed.row, at] += 1
            by_token = differing(draft_head, replace(outputs, pack=replace(pack, tokens=tokens)), before)
            by_state = differing(draft_head, replace(outputs, aux_states={**outputs.aux_states, 2: state}), before)
            for step in range(3):
                # Row t reads tokens from its document's second to t + 1 + step, and states from its first to t.
                read = at - 1 - step if at > changed.begin else changed.end
                assert by_token[step] == later(changed, read, step), ("token", at, step)
                assert by_state[step] == later(changed, at, step), ("state", at, step)


def later(where: unrolled.Document, first: int, step: int) -> set[tuple[int, int]]:
    """Return (row, position) of a document from `first` on whose draft stays in the document."""
    return {(where.row, at) for at in range(max(first, where.begin), where.end - 1 - step)}


def differing(draft_head: EagleDraftHead, outputs: TargetOutputs, before: Tensor) -> list[set[tuple[int, int]]]:
    """Return by step the rows with other logits than before, among those whose draft stays in their document."""
    unequal = (unrolled.logits_of(draft_head, outputs) != before).any(-1)  # [S, B, L]
    documents = unrolled.documents(outputs.pack)
    return [
        {(row, at) for where in documents for row, at in later(where, 0, step) if bool(found[row, at])}
        for step, found in enumerate(unequal)
    ]


def test_packing_does_not_change_the_sums() -> None:
    """Sums over packs of one document each are those of all documents in one."""
    draft_head, outputs = make()
    target, whole = unrolled.model(), draft_head(outputs)
    counted, overlap = torch.zeros(4), torch.zeros(4)
    for where in unrolled.documents(outputs.pack):
        alone = unrolled.pack(((where.end - where.begin,),))
        alone.tokens[0, : where.end - where.begin] = where.of(outputs.pack.tokens)
        report = draft_head(unrolled.forward(target, alone, draft_head.aux_layers))
        counted, overlap = counted + report.counted, overlap + report.overlap
    assert torch.equal(counted, whole.counted) and int(counted[3]) > 5
    assert unrolled.close(overlap, whole.overlap)


@pytest.mark.parametrize(
    "target", ["llama", "llama3-rope", "linear-rope", "qwen3", "gemma3", "phi3-long", "qwen2-yarn"]
)
def test_the_engine_drafts_what_was_trained(target: str, tmp_path: Path) -> None:
    draft_head, outputs = make(target, layers=2, head_norms=target == "qwen3")
    model = unrolled.model(target)
    head = open_head(str(unrolled.write(draft_head.export(), tmp_path)), model.config, "eagle3")
    assert choose_aux_layers(head, model) == draft_head.aux_layers == AUX_LAYERS
    assert draft_head.ids is not None and head.draft_ids is not None and torch.equal(head.draft_ids, draft_head.ids)
    network = EagleHead(head, model, unrolled.pages(head), unrolled.POSITIONS)
    found = unrolled.logits_of(draft_head, outputs).detach()
    wanted = unrolled.draft_by_engine(network, outputs, draft_head.aux_layers, 4)
    assert len(wanted) > 60
    for (row, at, step), logits in wanted.items():
        assert unrolled.close(found[step, row, at], logits[draft_head.ids]), (row, at, step)


def test_losses_and_gradients_equal_those_of_speculators() -> None:
    """The vectors are what the package `speculators` 0.9.0 made of one text, its training-time test of four
    steps over KL; it was told to leave out rows whose argmax token cannot be drafted. Gradients are of our sum.
    """
    recorded = load_file(VECTORS)
    vocabulary, width = recorded["embedding"].shape
    config = read_config(
        {
            "model_type": "llama",
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": 12,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500.0,
        }
    )
    ids, tokens = recorded["ids"], recorded["tokens"][None]  # [U], [1, T]
    counts = torch.zeros(vocabulary, dtype=torch.int64).index_fill(0, ids, 1)
    head = torch.zeros(vocabulary, width)
    target_info = TargetInfo(
        "recorded", config, recorded["embedding"], head, AUX_LAYERS, counts, torch.device("cpu"), recorded.__getitem__
    )
    draft_head = EagleDraftHead(target_info, EagleOptions(draft_vocabulary=len(ids), length=4, layers=2), 64)
    own = {name.removeprefix("head."): each for name, each in recorded.items() if name.startswith("head.")}
    assert not draft_head.load_state_dict(own, strict=False).unexpected_keys and len(own) == len(
        list(draft_head.parameters())
    )
    positions = torch.arange(tokens.shape[1])[None]
    pack = Pack(tokens, positions, torch.zeros_like(tokens), recorded["answered"][None])
    states = {aux_layer: state[None] for aux_layer, state in zip(AUX_LAYERS, recorded["states"], strict=True)}
    report = draft_head(TargetOutputs(pack, states, torch.zeros(1, tokens.shape[1], width), recorded["logits"][None]))
    steps = recorded["step_losses"] * recorded["step_counts"] / recorded["step_counts"][0]
    assert recorded["step_counts"].tolist() != [int(recorded["step_counts"][0])] * 4
    assert unrolled.close(report.loss.detach(), (steps * 0.8 ** torch.arange(4)).sum())
    report.loss.backward()
    for name, parameter in draft_head.named_parameters():
        assert parameter.grad is not None and unrolled.close(parameter.grad, recorded[f"gradient.{name}"], 2e-5), name


def test_a_full_vocabulary_has_no_d2t(tmp_path: Path) -> None:
    draft_head, _ = make(draft_vocabulary=tiny.VOCABULARY)
    export = draft_head.export()
    head = open_head(str(unrolled.write(export, tmp_path)), unrolled.model().config, "eagle3")
    assert export.draft_ids is None and head.draft_ids is None
    assert torch.equal(export.tensors["lm_head.weight"], tiny.original("llama").lm_head.weight)


def test_training_starts_from_the_targets_rows_and_lowers_the_loss() -> None:
    target = unrolled.model()
    target_info = unrolled.target_info(target)
    draft_head = EagleDraftHead(target_info, options(), unrolled.POSITIONS)
    assert draft_head.ids is not None and torch.equal(draft_head.matrix, target_info.lm_head[draft_head.ids])
    outputs = unrolled.forward(target, unrolled.pack(), draft_head.aux_layers)
    losses = unrolled.learn(draft_head, outputs, 25)
    assert losses[-1] < 0.2 * losses[0]
    report = draft_head(outputs)
    assert float(report.correct.sum()) > 0.6 * float(report.counted.sum())
    assert torch.equal(draft_head.embedding, target_info.embedding)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # of processors without such numbers
def test_half_precision_stays_close_to_fp32() -> None:
    draft_head, outputs = make()
    whole = draft_head(outputs)
    with torch.autocast("cpu", torch.bfloat16):
        half = draft_head(outputs)
    assert half.loss.dtype == torch.float32
    assert 0 < abs(float((half.loss - whole.loss).detach())) < 0.02 * float(whole.loss.detach())
    half.loss.backward()
    assert all(each.grad is not None and each.grad.dtype == torch.float32 for each in draft_head.parameters())


def test_a_pack_without_answers_has_a_gradient_of_zeros() -> None:
    draft_head, outputs = make()
    silent = replace(outputs.pack, answered=torch.zeros_like(outputs.pack.answered))
    report = draft_head(replace(outputs, pack=silent))
    report.loss.backward()
    assert float(report.loss.detach()) == 0 and float(report.counted.sum()) == 0
    assert draft_head.fc.weight.grad is not None and float(draft_head.fc.weight.grad.abs().max()) == 0


def test_the_draft_vocabulary_is_the_most_frequent_tokens() -> None:
    counts = torch.tensor([0, 5, 0, 7, 5, 1, 0, 0])
    assert chosen(counts, 2, ()) == [1, 3]  # of equals the first
    assert chosen(counts, 5, ()) == [0, 1, 3, 4, 5]  # what was never seen fills up
    assert chosen(counts, 3, (7, 99)) == [1, 3, 7]
    assert most_frequent(counts, 8, ()) is None and most_frequent(counts, 0, ()) is None
    assert counts.tolist() == [0, 5, 0, 7, 5, 1, 0, 0]
    with pytest.raises(UserError, match="`draft_vocabulary` is 1, but the target has 2 end tokens"):
        most_frequent(counts, 1, (0, 7))


def chosen(counts: Tensor, size: int, always: tuple[int, ...]) -> list[int]:
    found = most_frequent(counts, size, always)
    assert found is not None
    return found.tolist()


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({"length": 0}, "`length` is 0: pass 1 or more"),
        ({"layers": 0}, "`layers` is 0: pass 1 or more"),
        ({"rows": 0}, "`rows` is 0: pass 1 or more"),
        ({"mlp_width": -1}, "`mlp_width` is -1: pass 0 or more"),
        ({"draft_vocabulary": -5}, "`draft_vocabulary` is -5: pass 0 or more"),
        ({"decay": 1.5}, "`decay` is 1.5: pass a number above 0, at most 1"),
        ({"aux_layers": (1, 9)}, "the state entering layer 9, but the target has 3 layers: pass numbers from 0 to 3"),
    ],
)
def test_invalid_options_are_refused(variant: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EagleDraftHead(unrolled.target_info(unrolled.model()), options(**variant), unrolled.POSITIONS)
