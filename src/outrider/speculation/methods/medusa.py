"""Medusa: extra heads on the target, each of which predicts one of the next tokens from the same hidden state.

The heads do not read each other's tokens, so a tree costs no more than a chain: the top-k tokens of each head follow
each of the top-k tokens of the head before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from ...errors import UserError
from ...models.heads import MedusaHeads
from ...multi_step.state import DecodeState, StepDrafter
from ...request import Request
from ..checkpoints import Head, choose_aux_layers, choose_source, open_head
from ..drafters.chain_builder import BoundDrafter, ChainBuilder, StateChains
from ..drafters.draft_sampler import DraftSampler, to_target_ids
from ..drafters.tree_builder import FIRST_RATE, RANK_DECAY, GrownTree, best_first, read_paths
from ..interface import DraftBatch, DraftContext, Needs, Target, TreeOptions

Path = tuple[int, ...]  # ranks: (0,) is the best token of the first head, (0, 1) the second best of the next after it
HeadOutput = tuple[list[list[int]], list[list[float]], Tensor]  # tokens and probs by row and rank, logits [R, V]

DEFAULT_WIDTH = 3  # draft tokens: deeper ones of published heads are seldom accepted


@dataclass(frozen=True)
class Options(TreeOptions):
    width: int = 0  # tokens that it drafts at most; for a tree: nodes; 0: 3, but in a chain no more than it has heads
    model: str = ""  # the heads: a folder, or a name on the hub; default: what ships for the model
    quantize: Literal["int8", "int4", "fp8"] | None = None  # format of the heads' float weights; default: the target's
    tree: str = ""  # a tree of your own in place of width, branches and max_depth: paths of ranks, such as 0/0.0/0.1/1


def build(options: Options, target: Target) -> MedusaDrafter:
    paths = read_paths(options.tree) if options.tree else None
    head = open_head(choose_source(options.model, "medusa", target), target.model.config, "medusa")
    check_vocabulary(head, target.model.config.vocabulary)
    if not options.width and paths is None:
        heads = head.shape.heads if options.branches == 1 else DEFAULT_WIDTH
        options = replace(options, width=min(DEFAULT_WIDTH, heads))
    check_options(options, paths, head)
    if paths is not None and target.sampled and not target.coupled:
        check_ranks(paths)
    network = MedusaHeads(head, target.model, options.quantize or target.quantize)
    return MedusaDrafter(network, target, options, paths, choose_aux_layers(head, target.model))


def check_vocabulary(head: Head, vocabulary: int) -> None:
    expected = head.shape.draft_vocabulary or vocabulary
    for name in head.shape.lm_heads:
        rows = head.tensors[name].shape[0]
        if rows != expected:
            raise UserError(
                f"`{name}` of `{head.path}` has {rows} rows, but {expected} tokens to draft: `token_map` is missing, "
                "or the heads are for another model"
            )


def check_options(options: Options, paths: list[Path] | None, head: Head) -> None:
    """Refuse drafts that are deeper than the number of heads, and options that `tree` replaces."""
    heads = head.shape.heads
    if paths is None:
        options.check_tree()
        if options.branches == 1 and options.width > heads:
            raise UserError(
                f"`width` is {options.width}, but `{head.path}` has {heads} heads, one for each token of a chain: "
                f"pass `width={heads}` or less, or `branches` for a tree"
            )
        if options.max_depth is not None and options.max_depth > heads:
            raise UserError(
                f"`max_depth` is {options.max_depth}, but `{head.path}` has {heads} heads: pass that or less"
            )
        return
    defaults = {field.name: field.default for field in fields(Options)}
    for name in ("width", "branches", "max_depth"):
        value = getattr(options, name)
        if value != defaults[name] and (name, value) != ("width", len(paths)):
            raise UserError(f"`{name}` is {value}, but `tree` sets it: leave out one of them")
    deepest = max(paths, key=len)
    if len(deepest) > heads:
        raise UserError(
            f"`tree` has the path `{'.'.join(map(str, deepest))}`, but `{head.path}` has {heads} heads: "
            "leave out longer paths"
        )


def check_ranks(paths: list[Path]) -> None:
    """Refuse missing ranks: rejection sampling tries sampled siblings in their order, without gaps."""
    for path in paths:
        if path[-1] and (*path[:-1], path[-1] - 1) not in paths:
            missing = ".".join(map(str, (*path[:-1], path[-1] - 1)))
            raise UserError(f"`tree` lacks the path `{missing}`, and sampled siblings are tried in order: add it")


class MedusaDrafter:
    def __init__(
        self,
        network: MedusaHeads,
        target: Target,
        options: Options,
        paths: list[Path] | None,
        aux_layers: tuple[int, ...],
    ) -> None:
        self.network, self.device, self.sampler = network, target.device, DraftSampler(target)
        self.user_tree: dict[Path, list[int]] | None = None  # ranks after each path
        self.branches, self.depth, width = options.branches, options.max_depth or network.shape.heads, options.width
        if paths is not None:
            self.user_tree = {path: [] for path in [(), *paths]}
            for path in paths:
                self.user_tree[path[:-1]].append(path[-1])
            self.branches, self.depth = 1 + max(map(max, paths)), max(map(len, paths))
            width = len(paths)
        is_chain = self.branches == 1 and paths is None
        self.needs = Needs(
            width,
            aux_layers,
            trees=self.branches > 1,
            costs_time=True,
            has_probs=True,
            multi_step=is_chain,
            suspendable=True,
        )

    def propose(self, contexts: Sequence[DraftContext], last: Tensor, hidden: Tensor | None) -> DraftBatch:
        assert hidden is not None
        rows = [row for row, context in enumerate(contexts) if context.num_draft_tokens and context.new_tokens]
        tokens: list[list[int]] = [[] for _ in contexts]
        parents: list[list[int]] = [[] for _ in contexts]
        confidence: list[list[float]] = [[] for _ in contexts]
        logits = None  # [B, W, V]
        if rows:
            outputs = list(self._run_heads([contexts[row] for row in rows], hidden))
            trees = [self.grow(outputs, index, contexts[row].num_draft_tokens) for index, row in enumerate(rows)]
            for index, (row, tree) in enumerate(zip(rows, trees, strict=True)):
                tokens[row] = [outputs[len(path) - 1][0][index][path[-1]] for path in tree.items]
                parents[row], confidence[row] = tree.parents, tree.probabilities
            if self.sampler.keeps_logits:
                logits = self._logits(outputs, trees, rows, len(contexts))
        # Rejection sampling forbids selecting tokens by their own probability, so confidence is withheld from it.
        return DraftBatch(
            tokens,
            parents=parents if self.needs.trees else None,
            logits=logits,
            confidence=None if self.sampler.keeps_logits else confidence,
        )

    def _run_heads(self, contexts: list[DraftContext], hidden: Tensor) -> Iterator[HeadOutput]:
        """Return the output of one head after the other, until no row has a path that pays."""
        states = hidden[[context.first_row + context.computed - 1 - context.start for context in contexts]]  # [R, E]
        count = min(self.depth, max(context.num_draft_tokens for context in contexts))
        best = [1.0] * len(contexts)  # probability of each row's best path
        sampling = self.sampler.sampling(contexts)
        ids = self.network.vocab_mapping.ids if self.sampler.is_greedy(contexts) else None
        to_logits = self.network.logits if ids is None else self.network.scores
        for depth, logits in enumerate(to_logits(states, count)):  # [R, V or U]
            tokens, logprobs = self.sampler.sample_children(
                logits, sampling, depth, self.branches
            )  # [R, branches] each
            if ids is not None:
                tokens = to_target_ids(tokens, ids)
            probs = logprobs.exp().tolist()
            yield tokens.tolist(), probs, logits
            best = [path * max(row) for path, row in zip(best, probs, strict=True)]
            if not self.sampler.keeps_logits and all(
                path < max(context.min_acceptance, context.min_continuation)
                for path, context in zip(best, contexts, strict=True)
            ):
                return

    def grow(self, outputs: list[HeadOutput], row: int, width: int) -> GrownTree[Path]:
        """Grow the tree of one row, by probabilities; for rejection sampling by ranks alone."""
        by_rank = self.sampler.keeps_logits

        def children(path: Path) -> Iterator[tuple[Path, float]]:
            if len(path) < len(outputs):
                tokens, probs, _ = outputs[len(path)]
                for rank in range(self.branches) if self.user_tree is None else self.user_tree[path]:
                    if tokens[row][rank] >= 0:
                        yield (*path, rank), FIRST_RATE * RANK_DECAY**rank if by_rank else probs[row][rank]

        return best_first(children(()), children, width)

    def _logits(
        self, outputs: list[HeadOutput], trees: list[GrownTree[Path]], rows: list[int], num_contexts: int
    ) -> Tensor:
        """Return the logits that each token was sampled from, those of its head: [B, W, V]."""
        width = max(len(tree.items) for tree in trees)
        head_logits = torch.stack([logits for _, _, logits in outputs])  # [K, R, V]
        spread = torch.zeros(num_contexts, width, head_logits.shape[2], device=self.device.torch_device)
        for index, (row, tree) in enumerate(zip(rows, trees, strict=True)):
            spread[row, : len(tree.items)] = head_logits[[len(path) - 1 for path in tree.items], index]
        return spread

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the heads' weights."""
        return self.network.weight_bytes

    def accept(self, requests: Sequence[Request], accepted: Sequence[int]) -> None:
        """Do nothing: a draft depends on one hidden state of the target only."""

    def release(self, requests: Sequence[Request]) -> None:
        """Do nothing: no state is kept for a request."""

    # ---- decode steps without the host ----

    def ready(self, requests: Sequence[Request], computed: Sequence[int] | None = None) -> bool:
        return True

    def read(self, contexts: Sequence[DraftContext], hidden: Tensor | None) -> None:
        """Do nothing: a draft depends on one hidden state of the target only."""

    def bind(self, state: DecodeState) -> StepDrafter:
        chains = StateChains(self.sampler, state, self.network.vocab_mapping.vocabulary, None, None)
        return BoundDrafter(self, state, chains)

    def state_inputs(self, state: DecodeState) -> tuple[Tensor, Tensor]:
        return state.hidden, state.last_accepted

    def extend(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Return the target's state of the last accepted token of each row: [B, E]."""
        hidden, rows = inputs
        return torch.index_select(hidden, 0, rows)

    def decode_state(self, chains: ChainBuilder, states: Tensor, state: DecodeState) -> None:
        """Sample a token from each head."""
        for depth, logits in enumerate(self.network.logits(states, chains.width)):
            chains.put(depth, logits)

    def finish(self, requests: Sequence[Request], computed: Sequence[int], latest: Tensor) -> None:
        """Do nothing: no state is kept for a request."""
