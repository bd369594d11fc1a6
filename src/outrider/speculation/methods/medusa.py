"""Medusa: heads beside the target's own, each of which guesses one of the next tokens, all from the same state.

They do not read each other's guesses, so a tree costs no more than a chain: each head's best tokens follow each of
the best of the head before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from ...errors import UserError
from ...models.medusa import MedusaHeads
from ...multi_step.state import DecodeState, StepDrafter
from ...request import Request
from ..checkpoints import Head, choose_aux_layers, choose_source, open_head
from ..drafters.chain_builder import ChainBuilder, StateChains
from ..drafters.draft_sampler import DraftSampler, to_target_ids
from ..drafters.step_drafter import BoundDrafter
from ..drafters.tree_shapes import FALL, LIKELY, Grown, best_first, read_paths
from ..interface import DraftBatch, DraftContext, Needs, Target, TreeOptions

Path = tuple[int, ...]  # ranks: 0 for the best token of the first head, 0.1 for the second best of the next after it
Level = tuple[list[list[int]], list[list[float]], Tensor]  # one head: tokens and chances by row and rank, logits [R, V]


@dataclass(frozen=True)
class Options(TreeOptions):
    width: int = 3  # tokens that it drafts at most; for a tree: nodes
    model: str = ""  # the heads: a folder, or a name on the hub; default: what ships for the model
    quantize: Literal["int8", "int4"] | None = None  # float weights of the heads become this; default: as the target's
    tree: str = ""  # a tree of your own in place of width, branches and max_depth: paths of ranks, such as 0/0.0/0.1/1


def build(options: Options, target: Target) -> Medusa:
    paths = read_paths(options.tree) if options.tree else None
    head = open_head(choose_source(options.model, "medusa", target), target.model.config, "medusa")
    check_vocabulary(head, target.model.config.vocabulary)
    check_options(options, paths, head)
    if paths is not None and target.sampled and not target.coupled:
        check_ranks(paths)
    network = MedusaHeads(head, target.model, options.quantize or target.quantize)
    return Medusa(network, target, options, paths, choose_aux_layers(head, target.model))


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
    """Refuse a draft that is deeper than there are heads."""
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
    usual = {field.name: field.default for field in fields(Options)}
    for name in ("width", "branches", "max_depth"):
        value = getattr(options, name)
        if value != usual[name] and (name, value) != ("width", len(paths)):
            raise UserError(f"`{name}` is {value}, and `tree` says what is drafted: leave out one of them")
    deepest = max(paths, key=len)
    if len(deepest) > heads:
        raise UserError(
            f"`tree` has the path `{'.'.join(map(str, deepest))}`, but `{head.path}` has {heads} heads: "
            "leave out longer paths"
        )


def check_ranks(paths: list[Path]) -> None:
    """Where the order of siblings is that of their draws, none may be left out for what it is."""
    for path in paths:
        if path[-1] and (*path[:-1], path[-1] - 1) not in paths:
            before = ".".join(map(str, (*path[:-1], path[-1] - 1)))
            raise UserError(f"`tree` lacks the path `{before}`, and drawn siblings are tried in their order: add it")


class Medusa:
    def __init__(
        self,
        network: MedusaHeads,
        target: Target,
        options: Options,
        paths: list[Path] | None,
        aux_layers: tuple[int, ...],
    ) -> None:
        self.network, self.device, self.sampler = network, target.device, DraftSampler(target)
        self.following: dict[Path, list[int]] | None = None  # of a tree of the user's own: ranks after each path
        self.branches, self.levels, width = options.branches, options.max_depth or network.shape.heads, options.width
        if paths is not None:
            self.following = {path: [] for path in [(), *paths]}
            for path in paths:
                self.following[path[:-1]].append(path[-1])
            self.branches, self.levels = 1 + max(map(max, paths)), max(map(len, paths))
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
        chances: list[list[float]] = [[] for _ in contexts]
        logits = None  # [B, W, V]
        if rows:
            levels = list(self._draw([contexts[row] for row in rows], hidden))
            trees = [self._grow(levels, at, contexts[row].num_draft_tokens) for at, row in enumerate(rows)]
            for at, (row, tree) in enumerate(zip(rows, trees, strict=True)):
                tokens[row] = [levels[len(path) - 1][0][at][path[-1]] for path in tree.items]
                parents[row], chances[row] = tree.parents, tree.chances
            if self.sampler.keeps_logits:
                logits = self._logits(levels, trees, rows, len(contexts))
        branching = parents if self.needs.trees else None
        # What selects drawn tokens may not depend on them.
        return DraftBatch(tokens, None, branching, logits, None if self.sampler.keeps_logits else chances)

    def _draw(self, contexts: list[DraftContext], hidden: Tensor) -> Iterator[Level]:
        """What each head says, as long as that may pay."""
        states = hidden[[context.first_row + context.computed - 1 - context.start for context in contexts]]  # [R, E]
        count = min(self.levels, max(context.num_draft_tokens for context in contexts))
        best = [1.0] * len(contexts)  # the chance of each row's likeliest path
        choice = self.sampler.sampling(contexts)
        ids = self.network.draft_vocabulary.ids if self.sampler.is_greedy(contexts) else None
        say = self.network.logits if ids is None else self.network.scores
        for depth, logits in enumerate(say(states, count)):  # [R, V or U]
            found, logprobs = self.sampler.sample_children(logits, choice, depth, self.branches)  # [R, branches] each
            if ids is not None:
                found = to_target_ids(found, ids)
            chances = logprobs.exp().tolist()
            yield found.tolist(), chances, logits
            best = [whole * max(row) for whole, row in zip(best, chances, strict=True)]
            if not self.sampler.keeps_logits and all(
                whole < max(context.min_acceptance, context.min_continuation)
                for whole, context in zip(best, contexts, strict=True)
            ):
                return

    def _grow(self, levels: list[Level], row: int, width: int) -> Grown[Path]:
        """A tree of paths. Drawn tokens may not select themselves: their tree goes by ranks alone."""

        def below(path: Path) -> Iterator[tuple[Path, float]]:
            if len(path) < len(levels):
                tokens, chances, _ = levels[len(path)]
                for rank in range(self.branches) if self.following is None else self.following[path]:
                    if tokens[row][rank] >= 0:
                        yield (*path, rank), LIKELY * FALL**rank if self.sampler.keeps_logits else chances[row][rank]

        return best_first(below(()), below, width)

    def _logits(self, levels: list[Level], trees: list[Grown[Path]], rows: list[int], contexts: int) -> Tensor:
        """What each token was drawn from: that of its head."""
        width = max(len(tree.items) for tree in trees)
        every = torch.stack([logits for _, _, logits in levels])  # [K, R, V]
        found = torch.zeros(contexts, width, every.shape[2], device=self.device.torch_device)  # [B, W, V]
        for at, (row, tree) in enumerate(zip(rows, trees, strict=True)):
            found[row, : len(tree.items)] = every[[len(path) - 1 for path in tree.items], at]
        return found

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the heads' weights."""
        return self.network.weight_bytes

    def accept(self, requests: Sequence[Request], kept: Sequence[int]) -> None:
        """Nothing to rewind: a draft comes from one state of the target."""

    def release(self, requests: Sequence[Request]) -> None:
        """Nothing is kept of a request."""

    # ---- decode steps without the host ----

    def ready(self, requests: Sequence[Request]) -> bool:
        return True

    def bind(self, state: DecodeState) -> StepDrafter:
        chains = StateChains(self.sampler, state, self.network.draft_vocabulary.vocabulary, None, None)
        return BoundDrafter(self, state, chains)

    def state_inputs(self, state: DecodeState) -> tuple[Tensor, Tensor]:
        return state.hidden, state.last_accepted

    def extend(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Return the target's state of the last accepted token of each row: [B, E]."""
        hidden, rows = inputs
        return torch.index_select(hidden, 0, rows)

    def decode(self, chains: ChainBuilder, states: Tensor, newest: Tensor, positions: Tensor, tables: Tensor) -> None:
        """Sample a token from each head."""
        for depth, logits in enumerate(self.network.logits(states, chains.width)):
            chains.put(depth, logits)

    def finish(self, requests: Sequence[Request], computed: Sequence[int], latest: Tensor) -> None:
        """Do nothing: nothing is kept of a request."""
