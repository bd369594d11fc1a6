"""How a network's drafts grow once it has read the text: token by token, all at once, or as trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import UserError
from ...kernels import Batch
from ..interface import DraftBatch, DraftContext, Target
from .chain_builder import Sheet
from .draft_sampler import DraftSampler
from .network import Network, Run, page_tables
from .tree_decoding import TreeGrowth

DEEP = 6  # levels of a tree: each costs a pass, and few texts are guessed that far


class Growth:
    """Drafts the tokens of one call. `states` are those of the pass that read the text, `places` where in them each
    run's drafts begin [R, masks + 1].
    """

    def __init__(self, network: Network, target: Target, width: int, branches: int, levels: int | None) -> None:
        self.network, self.ops, self.device = network, target.ops, target.device
        self.page_size, self.vocabulary = target.page_size, target.model.config.vocabulary
        self.drawer = DraftSampler(target)
        self.width, self.trees = width, None
        if branches > 1:
            if network.parallel:
                raise UserError(
                    f"`branches` is {branches}, but this drafter guesses all tokens at once, none after another: "
                    "leave out `branches`"
                )
            self.trees = TreeGrowth(network, target, width, branches, levels or min(width, DEEP))
        elif levels is not None:
            self.width = min(width, levels)

    def within(self, width: int, positions: int) -> int:
        """Tokens that may be drafted where the last of a chain may stand so many positions after the text's."""
        if self.trees is None:
            return min(width, self.width, positions)
        return width if positions > 0 else 0

    def entries(self, run: Run, draft: DraftBatch) -> int:
        """How many drafted tokens, from the first on, have left an entry that counts if they are kept."""
        if self.network.features or self.network.parallel or self.trees is not None:
            return 0  # guessed states, mask tokens, and nodes that stand side by side are worth nothing
        assert draft.lengths is not None
        return min(max(len(draft.tokens[run.row]) - 1, 0), draft.lengths[run.row])  # the last that was drawn never ran

    def draft(self, contexts: Sequence[DraftContext], runs: list[Run], states: Tensor, places: Tensor) -> DraftBatch:
        if self.trees is not None:
            return self.trees.grow(contexts, runs, states, places[:, 0])
        sheet = Sheet(self, contexts, runs)
        (self.at_once if self.network.parallel else self.in_turn)(runs, states, places, sheet)
        return sheet.draft()

    def at_once(self, runs: list[Run], states: Tensor, places: Tensor, sheet: Sheet) -> None:
        """Every mask token gives one token, whatever the others are."""
        deep = [[at for at, run in enumerate(runs) if run.width > depth] for depth in range(sheet.width)]
        if not deep:
            return
        chosen = torch.cat([places[rows, depth] for depth, rows in enumerate(deep)])
        ids = self.network.ids if sheet.likeliest else None
        say = self.network.logits if ids is None else self.network.scores
        logits = say(states[chosen.long()])  # [drafted tokens, V or U]
        parts = torch.split(logits, [len(rows) for rows in deep])
        for depth, (rows, part) in enumerate(zip(deep, parts, strict=True)):
            drafting = [runs[at] for at in rows]
            sheet.put(drafting, depth, part, ids=ids)
            sheet.pays(drafting, depth, at_once=True)

    def in_turn(self, runs: list[Run], states: Tensor, places: Tensor, sheet: Sheet) -> None:
        """One token at a time, each read before the next is drawn."""
        active = [at for at, run in enumerate(runs) if run.width]
        if not active:
            return
        state = states[places[active, 0].long()] if len(states) > len(active) else states  # [R, S]
        drafting = [runs[at] for at in active]
        tables = page_tables([run.pages for run in drafting], self.device)
        positions = self.device.upload([run.context.computed - run.shift for run in drafting], torch.int32)
        ids = self.network.ids if sheet.likeliest else None
        say = self.network.logits if ids is None else self.network.scores
        for depth in range(sheet.width):
            drawn = sheet.put(drafting, depth, say(state), ids=ids)
            pays = sheet.pays(drafting, depth)
            going = [at for at, run in enumerate(drafting) if run.width > depth + 1 and pays[at]]
            if not going:
                return
            if len(going) < len(drafting):
                drafting = [drafting[at] for at in going]
                drawn, state, tables, positions = drawn[going], state[going], tables[going], positions[going]
            positions, slots = self.ops.next_slots(positions, tables, self.page_size, self.network.context)
            starts = self.device.upload(range(len(going) + 1), torch.int32)
            state = self.network.run(Batch(drawn, positions, slots, starts, tables), self.network.feedback(state))
