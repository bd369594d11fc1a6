"""Block heads in training: batched and fused, they equal one block at a time, and the engine's heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sample_targets
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy, silu

import tiny
from outrider.cache.pages import Pages
from outrider.kernels import load
from outrider.models import build
from outrider.models.block_head import BlockHead
from outrider.speculation.checkpoints import choose_aux_layers, open_head
from outrider.train.heads.block import BlockDraftHead, DFlashDraftHead, DFlashOptions, DSparkDraftHead, Options
from outrider.train.losses import loss_by_row
from outrider.train.target import TargetOutputs
from refusals import refusal

SMALL: dict[str, Any] = {"block": 5, "layers": 2, "aux_layers": (1, 3), "anchors": 250, "markov_rank": 8, "short": 0.5}
PLANS: dict[str, Options] = {
    "plain": Options(**SMALL),
    "in its place": Options(**SMALL | {"from_anchor": False}),
    "dflash": DFlashOptions(**SMALL | {"markov_rank": 0}),
    "no bias": Options(**SMALL | {"markov_rank": 0}),
    "some tokens": Options(**SMALL, draft_vocabulary=60),
    "some tokens, head learnt": Options(**SMALL, draft_vocabulary=60, head="trained", confidence=False),
    "head copied": Options(**SMALL, head="copied"),
    "what hangs on each": Options(**SMALL, weighting="dpace"),
    "another loss": Options(**SMALL, loss="lk_hybrid", gamma=2.0),
    "whole blocks": Options(**SMALL | {"short": 0.0, "block": 8, "layers": 1}),
}


def draft_head(options: Options, target: str = "llama", noise: float = 0.1) -> BlockDraftHead:
    """Build a head with noise on its parameters, so that nothing is zero or one."""
    torch.manual_seed(0)
    kind = DFlashDraftHead if isinstance(options, DFlashOptions) else DSparkDraftHead
    made = kind(sample_targets.target_info(target), options, 30)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
    return made


# ---- the plain version ----


class Formulas:
    """One block at a time over the literal text before it, from the draft head's parameters."""

    def __init__(self, learner: BlockDraftHead, outputs: TargetOutputs) -> None:
        self.learner, self.outputs, self.options = learner, outputs, learner.options
        self.weights = dict(learner.named_parameters())

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.learner.shape.eps).rsqrt() * self.weights[name + ".weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[name + ".weight"].T

    def states(self, row: int, anchor: int, size: int) -> Tensor:
        """[size, H]."""
        learner, pack = self.learner, self.outputs.pack
        number = pack.documents[row, anchor]
        begin = next(at for at in range(anchor + 1) if pack.documents[row, at] == number)
        aux_layers = [self.outputs.aux_states[aux_layer][row, begin:anchor] for aux_layer in learner.aux_layers]
        features = torch.cat([each / scale for each, scale in zip(aux_layers, learner.aux_scales, strict=True)], -1)
        context = self.norm(self.linear(features, "fc"), "hidden_norm")  # [T, H]
        newest = learner.target_info.embedding[pack.tokens[row, anchor]]
        x = torch.stack([newest, *[self.weights["mask_embedding"]] * (size - 1)])
        for layer in range(self.options.layers):
            prefix = f"layers.{layer}."
            x = x + self.attention(self.norm(x, prefix + "input_layernorm"), context, prefix + "self_attn.")
            y = self.norm(x, prefix + "post_attention_layernorm")
            gated = silu(self.linear(y, prefix + "mlp.gate_proj")) * self.linear(y, prefix + "mlp.up_proj")
            x = x + self.linear(gated, prefix + "mlp.down_proj")
        return self.norm(x, "norm")

    def attention(self, x: Tensor, context: Tensor, prefix: str) -> Tensor:
        shape, whole = self.learner.shape, torch.cat([context, x])
        query, key, value = (
            self.linear(each, f"{prefix}{part}_proj").view(len(each), -1, shape.head_dim)
            for each, part in ((x, "q"), (whole, "k"), (whole, "v"))
        )
        positions = torch.arange(len(whole))
        query = self.rotated(self.norm(query, prefix + "q_norm"), positions[len(context) :])
        key = self.rotated(self.norm(key, prefix + "k_norm"), positions)
        mixed = []
        for head in range(shape.heads):
            group = head * shape.kv_heads // shape.heads
            scores = query[:, head] @ key[:, group].T * shape.head_dim**-0.5  # [size, T + size]
            mixed.append(scores.softmax(-1) @ value[:, group])
        return self.linear(torch.cat(mixed, -1), prefix + "o_proj")

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = positions[:, None, None] * self.learner.shape.rope.theta ** (-torch.arange(half) / half)
        left, right = x.chunk(2, -1)
        return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)

    def drafts_per_block(self, row: int, anchor: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return for one block the logits [S, U], the target's [S, V], and the confidence [S]."""
        target_info, words, undrafted = (
            self.learner.target_info,
            self.learner.vocab,
            0 if self.options.from_anchor else 1,
        )
        matrix = self.weights.get(
            "lm_head.weight", target_info.lm_head if words.ids is None else target_info.lm_head[words.ids]
        )
        logits, wanted, sure = [], [], []
        for depth, state in enumerate(self.states(row, anchor, size)[undrafted:]):
            at = anchor + depth
            pack = self.outputs.pack
            if at + 1 == pack.tokens.shape[1] or pack.documents[row, at + 1] != pack.documents[row, anchor]:
                break
            found, reads = matrix @ state, state.detach()
            if self.options.markov_rank:
                before = self.weights["markov_head.markov_w1.weight"][pack.tokens[row, at]]
                found = found + self.weights["markov_head.markov_w2.weight"] @ before
                reads = torch.cat([reads, before.detach()])
            if self.options.confidence:
                bias = self.weights["confidence_head.proj.bias"]
                sure.append((self.linear(reads, "confidence_head.proj") + bias).sigmoid()[0])
            logits.append(found)
            wanted.append(self.outputs.logits[row, at])
        return torch.stack(logits), torch.stack(wanted), torch.stack(sure or [torch.zeros(())])

    def report(self) -> tuple[Tensor, list[int], list[int], list[float]]:
        """Return the loss; and by depth how many tokens are drafted, how many are right, and the overlap."""
        count, undrafted = self.learner.drafts_per_block, self.learner.undrafted
        counted, correct, overlap = [0] * count, [0] * count, [0.0] * count
        losses, weights, confidence_losses = [], [], []
        blocks = self.learner.sample_positions(self.outputs.pack)
        for row, anchors in enumerate(blocks.anchors.tolist()):
            for block, anchor in enumerate(anchors):
                after = anchor + 1 < self.outputs.pack.tokens.shape[1]
                if not after or not self.outputs.pack.answered[row, anchor + 1]:
                    continue
                logits, wanted, sure = self.drafts_per_block(row, anchor, int(blocks.sizes[row, block]))
                ids = self.learner.vocab.ids
                among = wanted if ids is None else wanted[:, ids]
                losses.append(loss_by_row(self.options.loss, logits, among))
                q = torch.zeros_like(wanted)
                q[:, slice(None) if ids is None else ids] = logits.detach().softmax(-1)
                kept = torch.minimum(q, wanted.softmax(-1)).sum(-1)
                weights.append(self.importance(kept))
                if self.options.confidence:
                    confidence_losses.append(binary_cross_entropy(sure, kept, reduction="none"))
                for depth in range(len(logits)):
                    counted[depth] += 1
                    correct[depth] += int(q[depth].argmax() == wanted[depth].argmax())
                    overlap[depth] += float(kept[depth])
        assert all(len(each) <= count for each in losses) and undrafted + count == self.options.block
        loss = (torch.cat(losses) * torch.cat(weights)).sum() / torch.cat(weights).sum()
        return loss + (torch.cat(confidence_losses).mean() if confidence_losses else 0), counted, correct, overlap

    def importance(self, kept: Tensor) -> Tensor:
        if self.options.weighting == "decay":
            return torch.exp(-torch.arange(len(kept)) / self.options.gamma)
        found = []
        for index in range(len(kept)):
            reach = [torch.prod(0.5 * kept[: upto + 1] + 0.5) for upto in range(index, len(kept))]
            beyond = [
                torch.prod(0.5 * kept + 0.5) * 0.5**more
                for more in range(1, self.learner.drafts_per_block - len(kept) + 1)
            ]
            found.append(sum([*reach, *beyond], torch.zeros(())))
        return torch.stack(found)


@pytest.mark.parametrize("name", PLANS)
def test_loss_and_gradients_are_those_of_one_block_at_a_time(name: str) -> None:
    learner = draft_head(PLANS[name])
    outputs = sample_targets.outputs(sample_targets.pack(), learner.aux_layers)
    torch.manual_seed(4)
    report = learner(outputs)
    report.loss.backward()
    found = {name: each.grad for name, each in learner.named_parameters() if each.requires_grad}
    learner.zero_grad()
    torch.manual_seed(4)
    loss, counted, correct, overlap = Formulas(learner, outputs).report()
    loss.backward()
    assert sum(counted) > 20 and ("lm_head.weight" in found) == (learner.options.head == "trained")
    torch.testing.assert_close(report.loss, loss, rtol=1e-5, atol=1e-5)
    assert report.counted.tolist() == counted and report.correct.tolist() == correct
    torch.testing.assert_close(report.overlap, torch.tensor(overlap), rtol=1e-4, atol=1e-4)
    for part, parameter in learner.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and found[part] is not None and bool(parameter.grad.any()), part
            torch.testing.assert_close(found[part], parameter.grad, rtol=2e-3, atol=2e-6, msg=part)


# ---- the engine's heads ----


@pytest.mark.parametrize("target", ["llama", "gemma3", "qwen3", "llama3-rope", "phi3", "qwen2-yarn"])
@pytest.mark.parametrize(
    "name", ["plain", "in its place", "dflash", "no bias", "some tokens", "some tokens, head learnt"]
)
def test_the_engine_computes_the_same_logits(name: str, target: str, tmp_path: Path) -> None:
    learner = draft_head(PLANS[name], target)
    options, pack = learner.options, sample_targets.pack()
    outputs = sample_targets.outputs(pack, learner.aux_layers, target)
    learner(outputs)
    model = build(tiny.checkpoint(target), load("cpu"))
    folder = sample_targets.write(learner.export(), tmp_path)
    head = open_head(folder, model.config, learner.method)
    assert choose_aux_layers(head, model) == learner.aux_layers and head.shape.mask == 90 and head.shape.mask_embedding
    assert (head.shape.block, head.shape.drafts) == (5, learner.drafts_per_block)
    assert not any(head.shape.causal) and head.shape.layers.windows == (0, 0)
    storage = Pages(2, head.shape.layers.kv_heads, 40, head.shape.layers.head_dim, "float32")
    storage.allocate(1)
    network = BlockHead(head, model, storage, 40)
    row, anchor = 1, 9  # one document, from the beginning of the row
    text = pack.tokens[row, :anchor].tolist()
    features = torch.cat([outputs.aux_states[aux_layer][row, :anchor] for aux_layer in learner.aux_layers], 1)
    network.store(network.project_features(features), tiny.batch([(text, 0, [0])], 40))
    newest = int(pack.tokens[row, anchor])
    states = network.run(tiny.batch([([newest, *[90] * 4], anchor, [0])], 40))[learner.undrafted :]  # [S, H]
    before = pack.tokens[row, anchor : anchor + learner.drafts_per_block]
    scores = network.scores(states)
    bias, _ = network.bias(states, before.int(), network.begin(states[:1], before[:1].int()))
    found = network.logits(scores if bias is None else scores + bias)

    blocks = replace(
        learner.sample_positions(pack), anchors=torch.full((3, 1), anchor), sizes=torch.full((3, 1), options.block)
    )
    expected = learner.states(outputs, blocks)[row, 0, learner.undrafted :]
    parts = learner.factors(expected, before)
    draft_ids = sum((one @ matrix.T for one, matrix in parts), torch.zeros(()))
    ids = slice(None) if learner.vocab.ids is None else learner.vocab.ids
    torch.testing.assert_close(states, expected.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[:, ids], draft_ids.detach(), rtol=1e-4, atol=1e-4)
    assert int(found.isfinite().sum()) == learner.drafts_per_block * learner.vocab.size
    sure = network.confidence(states, before.int())
    assert (sure is not None) == options.confidence
    if sure is not None:
        torch.testing.assert_close(sure, learner.confidence_logits(parts).sigmoid().detach(), rtol=1e-4, atol=1e-4)


# ---- where blocks stand ----


@pytest.mark.parametrize("name", ["plain", "in its place", "whole blocks"])
def test_blocks_begin_before_answer_tokens(name: str) -> None:
    learner, pack = draft_head(PLANS[name]), sample_targets.pack()
    documents, answered = pack.documents.tolist(), pack.answered.tolist()
    everywhere = {
        (r, a) for r in range(3) for a in range(29) if answered[r][a + 1] and documents[r][a] == documents[r][a + 1]
    }
    seen: set[tuple[int, int]] = set()
    for _ in range(40):
        blocks = learner.sample_positions(pack)
        assert blocks.anchors.shape == (3, 30 * 250 // 1024)
        for row in range(3):
            anchors = blocks.anchors[row].tolist()
            assert len(set(anchors)) == len(anchors)
            begun = int(blocks.counted[row, :, 0].sum())
            assert begun == min(len(anchors), sum(one[0] == row for one in everywhere))  # idle where nothing is left
            for block, anchor in enumerate(anchors):
                size = int(blocks.sizes[row, block])
                ends = [at for at in range(anchor + 1, 30) if documents[row][at] == documents[row][anchor]]
                fits = bool(ends) and answered[row][anchor + 1]
                expected = min(len(ends), size - learner.undrafted) if fits else 0
                assert blocks.counted[row, block].tolist() == [at < expected for at in range(learner.drafts_per_block)]
                assert 1 + learner.undrafted <= size <= learner.options.block
                if fits:
                    seen.add((row, anchor))
                    assert blocks.before[row, block, :expected].tolist() == list(range(anchor, anchor + expected))
    assert seen == everywhere


def test_a_block_does_not_see_other_documents_padding_or_later_tokens(tmp_path: Path) -> None:
    learner, pack = draft_head(PLANS["plain"]), sample_targets.pack()
    outputs = sample_targets.outputs(pack, learner.aux_layers)
    blocks = replace(
        learner.sample_positions(pack), anchors=torch.tensor([[10], [8], [16]]), sizes=torch.full((3, 1), 5)
    )
    expected = learner.states(outputs, blocks)
    tokens, states = pack.tokens.clone(), {aux_layer: each.clone() for aux_layer, each in outputs.aux_states.items()}
    for row, (first, anchor) in enumerate(((0, 10), (0, 8), (14, 16))):
        outside = torch.tensor([not first <= at < anchor for at in range(30)])
        tokens[row, anchor + 1 :] = 5
        tokens[row, :first] = 5
        for each in states.values():
            each[row, outside] = 1e3
    other = replace(outputs, pack=replace(pack, tokens=tokens), aux_states=states)
    torch.testing.assert_close(learner.states(other, blocks), expected)
    states[1][2, 15] += 1
    assert not torch.allclose(learner.states(other, blocks)[2], expected[2])


# ---- runs ----


def test_a_resumed_head_trains_to_the_same_bits() -> None:
    outputs = sample_targets.outputs(sample_targets.pack(), (1, 3))
    first, second = draft_head(PLANS["plain"]), draft_head(PLANS["plain"], noise=0.0)
    losses = [float(first(outputs).loss.detach()) for _ in range(3)]
    assert len(set(losses)) == 3
    second.load_state_dict(first.state_dict())
    louder = replace(outputs, aux_states={aux_layer: 2 * each for aux_layer, each in outputs.aux_states.items()})
    for given in (outputs, louder):
        found = []
        for learner in (first, second):
            torch.manual_seed(8)
            found.append(float(learner(given).loss.detach()))
        assert found[0] == found[1]


@pytest.mark.parametrize("name", ["plain", "dflash"])
def test_training_lowers_the_loss(name: str) -> None:
    learner = draft_head(replace(PLANS[name], short=0.0), noise=0.0)
    outputs = sample_targets.outputs(sample_targets.pack(), learner.aux_layers)
    shares = sample_targets.learn(learner, outputs, 30)
    assert sum(shares[:2]) / 2 < 0.15 and sum(shares[-3:]) / 3 > 0.4


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # some processors have no such products
def test_half_precision_stays_close_to_fp32() -> None:
    learner = draft_head(PLANS["some tokens, head learnt"])
    outputs = sample_targets.outputs(sample_targets.pack(), learner.aux_layers)
    sample_targets.check_half_precision(learner, outputs)


def test_aux_states_are_scaled_to_one_rms() -> None:
    """A state that is a thousand times larger does not drown the others; the first token of a text is no measure."""
    learner, pack = draft_head(PLANS["plain"]), sample_targets.pack()
    outputs = sample_targets.outputs(pack, learner.aux_layers)
    loud = outputs.aux_states[3] * 1000
    loud[pack.positions == 0] *= 50
    torch.manual_seed(4)
    expected = learner(outputs)
    other = draft_head(PLANS["plain"])
    torch.manual_seed(4)
    found = other(replace(outputs, aux_states={1: outputs.aux_states[1], 3: loud}))
    torch.testing.assert_close(other.aux_scales / learner.aux_scales, torch.tensor([1.0, 1000.0]))
    torch.testing.assert_close(found.loss, expected.loss, rtol=0.05, atol=0.0)
    kept = other.aux_scales.clone()
    other(outputs)
    assert torch.equal(other.aux_scales, kept)  # settled once: what is exported reads the states as they are


def test_default_options() -> None:
    made = DSparkDraftHead(sample_targets.target_info("gemma3"), Options(), 30)
    assert made.aux_layers == (2, 3, 5)  # leaving the second layer, one between, and the third last
    assert made.mask == 90 and made.method == "dspark"  # 2 ends texts, 40 comes before
    assert (
        DSparkDraftHead(sample_targets.target_info(), Options(), 30).aux_layers
        == sample_targets.target_info().aux_layers
    )


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        (Options(block=0), "`block` is 0"),
        (Options(block=1, from_anchor=False), "`block` is 1"),
        (Options(layers=0), "`layers` is 0"),
        (Options(aux_layers=(1, 4)), "entering layer 4"),
        (Options(mask=101), "`mask` is 101"),
        (Options(draft_vocabulary=102), "`draft_vocabulary` is 102"),
        (Options(short=1.5), "`short` is 1.5"),
        (Options(gamma=0.0), "`gamma` is 0.0"),
        (Options(markov_rank=-1), "`markov_rank` is -1"),
        (DFlashOptions(markov_rank=4), "`markov_rank` is an option of DSpark"),
        (DFlashOptions(confidence=True), "`confidence` is an option of DSpark"),
    ],
)
def test_invalid_options_are_refused(options: Options, culprit: str) -> None:
    kind = DFlashDraftHead if isinstance(options, DFlashOptions) else DSparkDraftHead
    assert culprit in refusal(lambda: kind(sample_targets.target_info(), options, 30))
