"""Outputs of tiny targets, and heads that draft token by token in plain torch: no row and no step is shared."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

import tiny
from outrider import kernels
from outrider.cache.pages import Pages
from outrider.models import Model, build
from outrider.models.heads import EagleHead
from outrider.train.data.pack import Pack
from outrider.train.heads.autoregressive import AutoregressiveHead
from outrider.train.heads.base import HeadExport
from outrider.train.target import TargetInfo, TargetOutputs

PAGE, TABLE, POSITIONS = 4, [7, 2, 5, 0, 8], 20
LENGTHS = ((9, 8), (12, 2, 4))  # of documents, row by row; the rest of the row is padding
LONGEST = 20


def model(name: str = "llama") -> Model:
    return build(tiny.checkpoint(name), kernels.load("reference"))


def target_info(target: Model, name: str = "llama") -> TargetInfo:
    original = tiny.original(name)
    embedding = original.get_input_embeddings().weight.detach()
    counts = torch.randint(0, 9, (tiny.VOCABULARY,), generator=torch.Generator().manual_seed(1))
    return TargetInfo(
        model=name,
        config=target.config,
        embedding=embedding * target.config.embedding_scale,
        lm_head=original.get_output_embeddings().weight.detach(),
        aux_layers=(1, 2, 3),
        token_counts=counts,
        torch_device=torch.device("cpu"),
        weights=lambda name: original.state_dict()[name].float(),
    )


def pack(lengths: tuple[tuple[int, ...], ...] = LENGTHS, seed: int = 0) -> Pack:
    """Documents whose first third is the prompt."""
    shape = (len(lengths), LONGEST)
    tokens, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    documents, answered = torch.full(shape, -1), torch.zeros(shape, dtype=torch.bool)
    for row, counts in enumerate(lengths):
        begin = 0
        for number, count in enumerate(counts):
            part = slice(begin, begin + count)
            tokens[row, part] = torch.tensor(tiny.prompt(count, seed=seed + 10 * row + number))
            positions[row, part] = torch.arange(count)
            documents[row, part] = number
            answered[row, begin + count // 3 : begin + count] = True
            begin += count
    return Pack(tokens, positions, documents, answered)


@dataclass(frozen=True)
class Document:
    row: int
    begin: int
    end: int

    def of(self, values: Tensor) -> Tensor:
        return values[self.row, self.begin : self.end]


def documents(given: Pack) -> list[Document]:
    found = []
    for row, numbers in enumerate(given.documents.tolist()):
        for number in sorted(set(numbers) - {-1}):
            begin = numbers.index(number)
            found.append(Document(row, begin, begin + numbers.count(number)))
    return found


def forward(target: Model, given: Pack, aux_layers: tuple[int, ...]) -> TargetOutputs:
    """Run the target on each document alone; fill padding with noise, which must not be read."""
    generator, shape, config = torch.Generator().manual_seed(2), given.tokens.shape, target.config
    wanted = (*aux_layers, config.layers)
    states = {aux_layer: torch.randn(*shape, config.width, generator=generator) for aux_layer in wanted}
    logits = torch.randn(*shape, config.vocabulary, generator=generator)
    for each in documents(given):
        found, aux_states = tiny.run(target, each.of(given.tokens).tolist(), 100, wanted)
        each.of(logits).copy_(found)
        for aux_layer, state in zip(wanted, aux_states, strict=True):
            each.of(states[aux_layer]).copy_(state)
    last = functional.rms_norm(states[config.layers], (config.width,), target.norm, config.eps)
    return TargetOutputs(given, states, last, logits)


def stir(draft_head: AutoregressiveHead, seed: int = 0) -> None:
    """Weights that tell tokens apart, norms that are not ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in draft_head.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
            elif name != "lm_head.weight":
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)


def learn(draft_head: AutoregressiveHead, outputs: TargetOutputs, steps: int) -> list[float]:
    """Losses, step by step."""
    optimizer = torch.optim.AdamW([each for each in draft_head.parameters() if each.requires_grad], 3e-3)
    losses = []
    for _ in range(steps):
        loss = draft_head(outputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class Plain:
    """A student's formulas over its own parameters, one sequence of entries at a time."""

    def __init__(self, draft_head: AutoregressiveHead, theta: float = 10_000.0) -> None:
        self.draft_head, self.shape, self.theta = draft_head, draft_head.unroll.shape, theta
        self.weights = dict(draft_head.named_parameters())

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[name + ".weight"]
        return x * (x.square().mean(-1, keepdim=True) + self.shape.eps).rsqrt() * weight

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[name + ".weight"].T

    def state(self, outputs: TargetOutputs, where: Document, at: int) -> Tensor:
        """What the entry after token `at` of a document reads of the target: [E]."""
        if self.draft_head.method == "mtp":
            return where.of(outputs.last_state)[at]
        aux_layers = [where.of(outputs.aux_states[aux_layer])[at] for aux_layer in self.draft_head.aux_layers]
        return self.linear(
            torch.cat([self.norm(aux_layer, f"fc_norm.{n}") for n, aux_layer in enumerate(aux_layers)]), "fc"
        )

    def run(self, tokens: Tensor, states: list[Tensor]) -> Tensor:
        """Entries one after the other, from position 1 on: the normed output of the last, [E]."""
        state, word = torch.stack(states), self.draft_head.embedding[tokens]  # [N, E] each
        if self.draft_head.method == "mtp":
            word, state = self.norm(word, "pre_fc_norm_embedding"), self.norm(state, "pre_fc_norm_hidden")
            x = self.linear(torch.cat([word, state], 1), "fc")
            read = self.norm(x, "layers.0.input_layernorm")
        else:
            x, word = state, self.norm(word, "layers.0.input_layernorm")
            read = torch.cat([word, self.norm(state, "layers.0.hidden_norm")], 1)
        for layer in range(self.draft_head.unroll.layers):
            prefix = f"layers.{layer}."
            read = self.norm(x, prefix + "input_layernorm") if layer else read
            x = x + self.attention(read, prefix + "self_attn.")
            y = self.norm(x, prefix + "post_attention_layernorm")
            gated = functional.silu(self.linear(y, prefix + "mlp.gate_proj")) * self.linear(y, prefix + "mlp.up_proj")
            x = x + self.linear(gated, prefix + "mlp.down_proj")
        return self.norm(x[-1], "norm")

    def attention(self, read: Tensor, prefix: str) -> Tensor:
        shape, count = self.shape, len(read)
        query, key, value = (
            self.linear(read, f"{prefix}{part}_proj").view(count, -1, shape.head_dim) for part in "qkv"
        )
        if shape.head_norms:
            query, key = self.norm(query, prefix + "q_norm"), self.norm(key, prefix + "k_norm")
        shared = shape.heads // shape.kv_heads
        key, value = self.rotate(key).repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        scores = torch.einsum("nhd,mhd->hnm", self.rotate(query), key) * shape.head_dim**-0.5
        ahead = torch.arange(count)[None] > torch.arange(count)[:, None]
        mixed = torch.einsum("hnm,mhd->nhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), value)
        return self.linear(mixed.flatten(1), prefix + "o_proj")

    def rotate(self, heads: Tensor) -> Tensor:
        """[N, heads, D], the first at position 1."""
        half = heads.shape[-1] // 2
        angles = torch.arange(1, len(heads) + 1)[:, None] * self.theta ** -(torch.arange(half) / half)
        rotation = torch.polar(torch.ones(angles.shape), angles)[:, None]
        rotated = torch.view_as_complex(torch.stack(heads.chunk(2, -1), -1).contiguous()) * rotation
        return torch.cat([rotated.real, rotated.imag], -1)

    def draft(self, outputs: TargetOutputs, where: Document, row: int, steps: int) -> list[Tensor]:
        """Logits [U] of each step of one row, as far as its document has tokens to read."""
        tokens = where.of(outputs.pack.tokens)
        states = [self.state(outputs, where, at) for at in range(row + 1)]
        found: list[Tensor] = []
        for step in range(min(steps, len(tokens) - 1 - row)):
            out = self.run(tokens[1 : row + 2 + step], states)
            states = [*states, out]
            found.append(self.draft_head.matrix @ out)
        return found


@dataclass
class Sums:
    """A report by the words of its contract."""

    loss: Tensor
    counted: list[int]
    correct: list[int]
    overlap: list[float]
    logits: dict[Any, Tensor]  # [U] by row of the pack, token of the row and step


def report_plainly(draft_head: AutoregressiveHead, outputs: TargetOutputs, weights: list[float]) -> Sums:
    plain, steps, answered = Plain(draft_head), len(weights), outputs.pack.answered
    ids = torch.arange(tiny.VOCABULARY) if draft_head.ids is None else draft_head.ids
    sums, first = Sums(torch.zeros(()), [0] * steps, [0] * steps, [0.0] * steps, {}), 0
    for where in documents(outputs.pack):
        is_answer, logits = where.of(answered).tolist(), where.of(outputs.logits)
        for row in range(len(is_answer) - 1):
            for step, draft_ids in enumerate(plain.draft(outputs, where, row, steps)):
                sums.logits[where.row, where.begin + row, step] = draft_ids.detach()
                drafted = row + 2 + step
                if drafted >= len(is_answer) or not is_answer[drafted]:
                    continue
                target, best = logits[drafted - 1], int(logits[drafted - 1].argmax())
                spread = torch.zeros(tiny.VOCABULARY).index_copy(0, ids, draft_ids.detach().softmax(-1))
                sums.counted[step] += 1
                sums.correct[step] += int(ids[draft_ids.argmax()]) == best
                sums.overlap[step] += float(torch.minimum(target.softmax(-1), spread).sum())
                if best in ids.tolist():
                    wanted = target[ids].softmax(-1)
                    far = (wanted * (wanted.log() - draft_ids.log_softmax(-1))).sum()
                    sums.loss = sums.loss + weights[step] * far
                    first += step == 0
    return replace(sums, loss=sums.loss / first)


def same_as_plain(draft_head: AutoregressiveHead, outputs: TargetOutputs, weights: list[float]) -> None:
    wanted = report_plainly(draft_head, outputs, weights)
    logits = logits_of(draft_head, outputs)
    assert logits.std() > 0.3 and len(wanted.logits) > 30  # else the tolerance would mean nothing
    for (row, at, step), plain in wanted.logits.items():
        assert close(logits[step, row, at], plain), (row, at, step)
    learning = {name: each for name, each in draft_head.named_parameters() if each.requires_grad}
    by_formulas = torch.autograd.grad(wanted.loss, list(learning.values()))
    report = draft_head(outputs)
    found = torch.autograd.grad(report.loss, list(learning.values()))
    assert close(report.loss.detach(), wanted.loss.detach())
    for name, ours, theirs in zip(learning, found, by_formulas, strict=True):
        assert theirs.abs().max() > 1e-4, name
        assert close(ours, theirs, 2e-5), name
    assert report.counted.tolist() == wanted.counted
    assert report.correct.tolist() == wanted.correct
    assert close(report.overlap, torch.tensor(wanted.overlap))
    assert 0 < sum(wanted.correct) < sum(wanted.counted)


def write(export: HeadExport, folder: Path) -> Path:
    tensors = dict(export.tensors)
    if export.draft_ids is not None:
        tensors["d2t"] = export.draft_ids - torch.arange(len(export.draft_ids))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(export.config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def draft_by_engine(
    network: EagleHead[Pages], outputs: TargetOutputs, aux_layers: tuple[int, ...], steps: int
) -> dict[Any, Tensor]:
    """By row of the pack, token of the row and step: logits [V], teacher-forced as the student's."""
    found: dict[Any, Tensor] = {}
    for where in documents(outputs.pack):
        tokens = where.of(outputs.pack.tokens).tolist()
        features = torch.cat([where.of(outputs.aux_states[aux_layer]) for aux_layer in aux_layers], 1)
        if len(tokens) < 2:
            continue
        keys_values = tiny.batch([(tokens[1:], 1, TABLE)], PAGE)
        states = network.run(keys_values, network.project_features(features[:-1].contiguous()))
        for row in reversed(range(len(tokens) - 1)):  # a draft overwrites what comes after its row
            state = states[row : row + 1]
            for step in range(min(steps, len(tokens) - 1 - row)):
                if step:
                    entry = tiny.batch([([tokens[row + 1 + step]], row + 1 + step, TABLE)], PAGE)
                    state = network.run(entry, network.feedback_features(state))
                found[where.row, where.begin + row, step] = network.logits(state)[0]
    return found


def pages(network: Any) -> Pages:
    layers = network.shape.layers
    storage = Pages(layers.layers, layers.kv_heads, PAGE, layers.head_dim, "float32")
    storage.allocate(9)
    return storage


def close(found: Tensor, wanted: Tensor, share: float = 1e-5) -> bool:
    """Within that share of the largest entry."""
    return found.shape == wanted.shape and bool((found - wanted).abs().max() <= share * wanted.abs().max())


@torch.no_grad()
def logits_of(draft_head: AutoregressiveHead, outputs: TargetOutputs) -> Tensor:
    """[S, B, L, U]."""
    return torch.stack([states @ draft_head.matrix.T for states in draft_head.outputs(outputs)])
