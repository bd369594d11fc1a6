"""EAGLE-1 and P-EAGLE in training give what the engine's heads give, have the losses of their papers, and learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import unrolled
from torch.nn import functional

import tiny
from outrider import LLM, SamplingParams
from outrider.errors import UserError
from outrider.models.heads import EagleHead
from outrider.speculation.checkpoints import choose_aux_layers, open_head
from outrider.train.data.pack import Pack
from outrider.train.heads import eagle1, peagle
from outrider.train.heads.autoregressive import AutoregressiveHead
from outrider.train.io.vllm_export import read_back, translate, with_d2t
from outrider.train.target import TargetOutputs

HEADS = {"eagle": (eagle1.Eagle1DraftHead, eagle1.Options), "peagle": (peagle.PEagleDraftHead, peagle.Options)}
SMALL: dict[str, dict[str, Any]] = {"eagle": {"length": 3, "rows": 7}, "peagle": {"length": 3, "rows": 7, "layers": 2}}
EACH = pytest.mark.parametrize("method", HEADS)


def make(method: str, name: str = "llama", positions: int = unrolled.POSITIONS, **variant: Any) -> AutoregressiveHead:
    head, options = HEADS[method]
    target_info = unrolled.target_info(unrolled.model(name), name)
    return head(target_info, options(**SMALL[method] | variant), positions)  # type: ignore[arg-type]


def stirred(method: str, name: str = "llama", **variant: Any) -> tuple[AutoregressiveHead, TargetOutputs]:
    draft_head = make(method, name, **variant)
    unrolled.stir(draft_head)
    return draft_head, unrolled.forward(unrolled.model(name), unrolled.pack(), draft_head.aux_layers)


def by_engine(method: str, network: EagleHead[Any], outputs: TargetOutputs, aux_layers: tuple[int, ...]) -> Any:
    """By row of the pack, token of the row and step: logits [V]."""
    if method == "eagle":
        return unrolled.draft_by_engine(network, outputs, aux_layers, 3)
    found = {}
    for where in unrolled.documents(outputs.pack):
        tokens = where.of(outputs.pack.tokens).tolist()
        features = torch.cat([where.of(outputs.aux_states[layer]) for layer in aux_layers], 1)
        for row in range(len(tokens) - 1):
            count = min(3, len(tokens) - 1 - row)
            entries = [*tokens[1 : row + 2], *[network.mask] * (count - 1)]
            text = network.project_features(features[: row + 1].contiguous())
            assert network.mask_features is not None
            states = torch.cat([text, network.mask_features.expand(count - 1, -1)])
            out = network.run(tiny.batch([(entries, 1, unrolled.TABLE)], unrolled.PAGE), states)
            for step, logits in enumerate(network.logits(out[row:])):
                found[where.row, where.begin + row, step] = logits
    return found


@EACH
@pytest.mark.parametrize("target", ["llama", "llama3-rope", "gemma3"])
def test_the_engine_drafts_what_was_trained(method: str, target: str, tmp_path: Path) -> None:
    draft_head, outputs = stirred(method, target, mlp_width=40)
    model = unrolled.model(target)
    head = open_head(str(unrolled.write(draft_head.export(), tmp_path)), model.config, method)
    network = EagleHead(head, model, unrolled.pages(head), unrolled.POSITIONS)
    found = unrolled.logits_of(draft_head, outputs)  # [S, B, L, U]
    wanted = by_engine(method, network, outputs, choose_aux_layers(head, model))
    assert len(wanted) > 50 and found.std() > 0.3
    for (row, at, step), logits in wanted.items():
        logits = logits if draft_head.ids is None else logits[draft_head.ids]
        assert unrolled.close(found[step, row, at], logits), (row, at, step)


def test_eagle_1_learns_the_targets_states_and_logits() -> None:
    """The loss of every row that predicts a token of an answer, by its formula."""
    draft_head, outputs = stirred("eagle", length=2, decay=0.5)
    wanted, first = torch.zeros(()), 0
    for step, states in enumerate(draft_head.outputs(outputs)):
        for where in unrolled.documents(outputs.pack):
            answered, last = where.of(outputs.pack.answered).tolist(), where.of(outputs.last_state)
            for row, state in enumerate(where.of(states)):
                token = row + 2 + step
                if token >= len(answered) or not answered[token]:
                    continue
                p, q = (x.log_softmax(-1) for x in (where.of(outputs.logits)[token - 1], draft_head.matrix @ state))
                feature = functional.smooth_l1_loss(state, last[token - 1])
                wanted = wanted + 0.5**step * (feature + 0.1 * (p.exp() * (p - q)).sum())
                first += step == 0
    assert unrolled.close(draft_head(outputs).loss.detach(), (wanted / first).detach())


@EACH
def test_all_parameters_learn_and_nothing_of_the_target_is_written(method: str) -> None:
    draft_head, outputs = stirred(method)
    draft_head(outputs).loss.backward()
    for name, parameter in draft_head.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    names = set(draft_head.export().tensors)
    if method == "eagle":  # no norm but the one between attention and MLP, as in the original
        assert len(names) == 9 and [name for name in names if "norm" in name] == [
            "layers.0.post_attention_layernorm.weight"
        ]
    else:
        assert {"mask_hidden", "layers.1.input_layernorm.weight", "fc_norm.2.weight", "lm_head.weight"} < names


@EACH
def test_the_export_for_vllm_is_the_same_head(method: str) -> None:
    draft_head = make(method)
    target_info = unrolled.target_info(unrolled.model())
    export = draft_head.export()
    config, tensors = translate(export, target_info, 3)
    ours, theirs = read_back(export.config, with_d2t(export)).shape, read_back(config, tensors).shape
    assert ours.kind == theirs.kind == method and ours.mask == theirs.mask
    assert config["architectures"] == [{"eagle": "LlamaForCausalLM", "peagle": "PEagleDraftModel"}[method]]


def as_pack(texts: list[list[int]], prompt: int) -> Pack:
    tokens = torch.tensor(texts)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return Pack(tokens, positions, torch.zeros_like(tokens), positions >= prompt)


def drafted(
    model: Path, method: str, head: Path, prompts: list[list[int]], params: SamplingParams
) -> tuple[Any, float]:
    llm = LLM(str(model), backend="cpu", speculate=f"{method}:model={head},width=3,adaptive=no")
    outputs = llm.generate(prompts, params)
    return [one.completions[0].token_ids for one in outputs], llm.method_stats[method].tokens_per_step


@EACH
def test_a_trained_head_drafts_far_more_than_an_untrained_one(method: str, tiny_folder: Any, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    prompts = [tiny.prompt(8, seed=seed) for seed in range(6)]
    answers = LLM(str(tiny_folder()), backend="cpu").generate(prompts, params)
    texts = [one.completions[0].token_ids for one in answers]
    draft_head = make(method, positions=40, rows=512)
    folders = [unrolled.write(draft_head.export(), tmp_path / "before")]
    pack = as_pack([prompt + text for prompt, text in zip(prompts, texts, strict=True)], 8)
    outputs = unrolled.forward(unrolled.model(), pack, draft_head.aux_layers)
    losses = unrolled.learn(draft_head, outputs, 80)
    folders.append(unrolled.write(draft_head.export(), tmp_path / "after"))
    assert losses[-1] < 0.5 * losses[0]
    before, after = (drafted(tiny_folder(), method, folder, prompts, params) for folder in folders)
    assert before[0] == after[0] == texts
    assert before[1] < 1.3 and after[1] > before[1] + 0.8


@EACH
@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({"length": 0}, "`length` is 0: pass 1 or more"),
        ({"rows": 0}, "`rows` is 0: pass 1 or more"),
        ({"mlp_width": -1}, "`mlp_width` is -1: pass 0 or more"),
        ({"decay": 0.0}, "`decay` is 0.0: pass a number above 0, at most 1"),
    ],
)
def test_invalid_options_are_refused(method: str, variant: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(method, **variant)
