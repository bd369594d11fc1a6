"""A small Llama model that is trained to write as the target does and then drafts for it; it reads tokens alone.

Shapes: N sampled positions of a pack, H the hidden size, V the target's vocabulary, U the model's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import UserError
from ..data.pack import Pack
from ..losses import Loss, score
from ..target import TargetInfo, TargetOutputs
from .autoregressive import CausalLayer, UnrolledKV
from .base import DraftHead, DraftVocabulary, StepResult, check_at_least, check_share
from .layers import LayerShape, Norm, Rotary, causal_ranges, layer_keys, layer_shape, plain_rope, to_autocast


@dataclass(frozen=True)
class Options:
    draft_vocabulary: int = 0  # tokens that it knows: the ones that the target writes most often; 0: all
    copied: tuple[int, ...] = ()  # initialise its layers with these layers of the target, whose shape they take
    width: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    mlp_width: int = 768
    share: float = 0.5  # fraction of the positions of a pack that a step trains on
    loss: Loss = "kl"
    spread: float = 0.02  # standard deviation of the initial weights
    rows: int = 4_096  # rows of logits in memory at a time
    seed: int = 0  # of the initial weights; torch's own seed samples the positions


class DraftModelHead(DraftHead):
    method = "draft_model"
    aux_layers = ()
    prefix = "model."
    own_ids: Tensor | None  # [V]: the model's own id of each of the target's tokens; None: the ids are the same

    def __init__(self, target_info: TargetInfo, options: Options, positions: int) -> None:
        super().__init__()
        check(options)
        self.target_info, self.options = target_info, options
        self.vocab = DraftVocabulary(target_info, options.draft_vocabulary)
        self.register_buffer("own_ids", own_ids(self.vocab, target_info.token_counts), persistent=False)
        self.shape = model_shape(target_info, options)
        self.rotary = Rotary(self.shape, positions)
        table = target_info.embedding.detach() / target_info.config.embedding_scale
        table = self.vocab.select(table if options.copied else projected_embedding(target_info, options))
        self.embed_tokens = nn.Embedding(len(table), self.shape.width, _weight=table.clone())
        self.layers = nn.ModuleList(CausalLayer(self.shape) for _ in range(len(options.copied) or options.layers))
        self.norm = Norm(self.shape.width, self.shape.eps)
        if options.copied:
            copy_target_layers(self, target_info, options.copied)
        else:
            init_layers(self.layers, options)
        self.to(target_info.torch_device)

    @property
    def draft_ids(self) -> Tensor | None:
        return self.vocab.ids

    def forward(self, target_outputs: TargetOutputs) -> StepResult:
        index, counted = self.sample_positions(target_outputs.pack)
        targets = self.vocab.targets(target_outputs, index)
        states = self.norm(self.states(target_outputs.pack).flatten(0, 1)[index])  # [N, H]
        factors, weights = [(states, self.embed_tokens.weight)], counted.float().flatten()
        options = self.options
        scores = score(factors, targets.logits, weights, options.loss, targets.logsumexp, options.rows, targets.rows)
        return self.vocab.result(scores.loss / weights.sum().clamp(min=1), scores, targets, counted)

    def sample_positions(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Sample positions to train on among all B * L [N], and which of them count [N, 1] bool.

        N does not depend on the pack.
        """
        after = functional.pad(pack.documents, (0, 1), value=-1)[:, 1:]
        usable = (functional.pad(pack.answered, (0, 1))[:, 1:] & (after == pack.documents)).flatten()  # [B * L]
        count = max(round(self.options.share * len(usable)), 1)
        index = torch.rand(len(usable), device=usable.device).masked_fill(~usable, -1.0).topk(count).indices
        return index, usable[index, None]

    def states(self, pack: Pack) -> Tensor:
        """Run the layers: [B, L, H], before the final norm."""
        ranges = causal_ranges(pack.documents)
        x: Tensor = self.embed_tokens(pack.tokens if self.own_ids is None else self.own_ids[pack.tokens])
        for layer in self.layers:
            assert isinstance(layer, CausalLayer)
            x = layer(x, to_autocast(layer.input_layernorm(x)), pack.positions, self.rotary, UnrolledKV(ranges))
        return x

    def logits(self, pack: Pack) -> Tensor:
        """Compute the logits of a pack: [B, L, U]."""
        return functional.linear(self.norm(self.states(pack)), self.embed_tokens.weight)

    def checkpoint_config(self) -> dict[str, Any]:
        target, ids = self.target_info.config, self.vocab.ids
        end_tokens = list(target.end_tokens)
        ends = end_tokens if self.own_ids is None else self.own_ids[end_tokens].tolist()
        unknown = {} if ids is None else {"unknown_token_id": rarest_draft_token(ids, self.target_info.token_counts)}
        return {
            "architectures": ["LlamaForCausalLM"],
            **layer_keys(self.shape, len(self.layers), target),
            "vocab_size": self.vocab.size,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            **unknown,
            **({"eos_token_id": ends} if ends else {}),
        }


def own_ids(vocab: DraftVocabulary, token_counts: Tensor) -> Tensor | None:
    """Map the target's tokens to the model's own ids: [V]; None: the ids are the same."""
    if vocab.ids is None:
        return None
    ids = torch.full(token_counts.shape, rarest_draft_token(vocab.ids, token_counts), device=vocab.ids.device)
    ids[vocab.ids] = torch.arange(vocab.size, device=vocab.ids.device)
    return ids


def rarest_draft_token(ids: Tensor, token_counts: Tensor) -> int:
    """Return the own id that also stands for all unknown tokens: the one that the target writes least often."""
    return int(token_counts.to(ids.device)[ids].argmin())


def model_shape(target_info: TargetInfo, options: Options) -> LayerShape:
    """Return the shape of the layers, with the rope of the target's first layer that has one."""
    rope = plain_rope(target_info.config)
    if options.copied:
        return replace(layer_shape(target_info.config, 0, head_norms=False), rope=rope)
    return LayerShape(
        width=options.width,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.width // options.heads,
        mlp_width=options.mlp_width,
        eps=target_info.config.eps,
        rope=rope,
        context=target_info.config.context,
    )


def projected_embedding(target_info: TargetInfo, options: Options) -> Tensor:
    """Project the target's embedding on its leading principal components: [V, H].

    The mean is removed, as it moves all logits alike. Tokens are weighted by the square root of their frequency, so
    that tokens that are never written have little influence.
    """
    table = target_info.embedding.detach().float()
    weights = (target_info.token_counts.to(table.device).float() + 1).sqrt()[:, None]  # [V, 1]
    table = table - (weights * table).sum(0) / weights.sum()
    covariance = (weights * table).t() @ table  # [E, E]
    _, directions = torch.linalg.eigh(covariance.double().cpu())  # rising
    leading = directions.flip(-1)[:, : options.width].to(table)  # [E, H or E]
    signs = leading.gather(0, leading.abs().argmax(0, keepdim=True)).sign()  # the same on every machine
    projected = table @ (leading * signs)
    projected = projected * (options.spread / projected.square().mean().sqrt().clamp(min=1e-12))
    missing = options.width - projected.shape[1]
    generator = torch.Generator().manual_seed(options.seed)
    random = options.spread * torch.randn(len(projected), missing, generator=generator)
    return torch.cat([projected, random.to(projected.device)], -1)


@torch.no_grad()
def copy_target_layers(model: DraftModelHead, target_info: TargetInfo, copied: tuple[int, ...]) -> None:
    """Copy these layers of the target, in this order, and its final norm."""
    target = target_info.config
    beyond = [number for number in copied if not 0 <= number < target.layers]
    if beyond:
        raise UserError(
            f"`copied` names layer {beyond[0]}, but the target has {target.layers} layers: "
            f"pass numbers from 0 to {target.layers - 1}"
        )
    plain = target.pre_norms and target.residual_scale == 1
    norms = target.head_norms or target.whole_norms or target.post_norms
    if not plain or norms or target.qkv_bias or target.output_bias or target.mlp_bias:
        raise UserError(
            f"`copied` needs a target with plain Llama layers, but `{target_info.model}` has biases or more norms: "
            "leave it out"
        )
    model.norm.weight.copy_(target_info.weights("model.norm.weight"))
    for layer, number in zip(model.layers, copied, strict=True):
        for name, parameter in layer.named_parameters():
            parameter.copy_(target_info.weights(f"model.layers.{number}.{name}"))


@torch.no_grad()
def init_layers(layers: nn.ModuleList, options: Options) -> None:
    """Initialise matrices at random; those that add to the residual are scaled down by the number of layers."""
    generator = torch.Generator().manual_seed(options.seed)
    for name, parameter in layers.named_parameters():
        if parameter.dim() == 2:
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            parameter.normal_(0, options.spread / (2 * options.layers) ** (adds / 2), generator=generator)


def check(options: Options) -> None:
    check_at_least(
        1,
        width=options.width,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads,
        mlp_width=options.mlp_width,
        rows=options.rows,
    )
    if options.width % (2 * options.heads):
        raise UserError(
            f"`width` is {options.width} and `heads` is {options.heads}, but each head needs an even size: "
            "pass a width that is a multiple of twice the heads"
        )
    if options.heads % options.kv_heads:
        raise UserError(
            f"`heads` is {options.heads} and `kv_heads` is {options.kv_heads}: pass a multiple of `kv_heads` as `heads`"
        )
    check_share(options.share)
    if options.spread <= 0:
        raise UserError(f"`spread` is {options.spread}: pass a number above 0")
