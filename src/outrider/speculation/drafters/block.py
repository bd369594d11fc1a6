"""Drafters over a head that fills a block of mask tokens in one pass (DFlash, DSpark), with KV in the target's pages.

The KV entry of a position comes from the target's hidden state at that position alone. So pages are shared between
prompts as the target's are, and nothing is kept of a request between steps, unless it is suspended (kv_tracker.py).
Entries of a block are scratch: they lie where the text continues, and those of the text overwrite them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from ...cache.pages import Pages, slots_of
from ...device import Buffer
from ...errors import UserError
from ...input_batch import BatchBuilder, Shape, as_batch, sizes
from ...kernels import Batch
from ...models.block_head import BlockHead
from ...multi_step.state import DecodeState, StepDrafter
from ...recordings import Recorded, Recordings, padded_table, table_width
from ...request import Request
from ..checkpoints import Head, choose_aux_layers, choose_source, open_head
from ..interface import DraftBatch, DraftContext, Needs, Target, TreeOptions
from .chain_builder import BoundDrafter, CallChains, ChainBuilder, StateChains
from .draft_sampler import DraftSampler
from .kv_tracker import KvTracker
from .network import check_mask
from .pass_graphs import PassGraphs
from .recorded import RecordedChain, least_path
from .tree_builder import Parents, TreeBuilder, fixed_shape


@dataclass(frozen=True)
class BlockOptions(TreeOptions):
    width: int = 0  # tokens that it drafts at most, in all branches together; 0: the tokens of a block
    max_depth: int | None = None  # depth of a draft at most; default: the tokens of a block
    model: str = ""  # the head: a folder, or a name on the hub; default: what ships for the model
    quantize: Literal["int8", "int4", "fp8"] | None = None  # format of float weights of the head; default: the target's
    aux_layers: tuple[int, ...] = ()  # read the states that enter these layers of the target, such as 2/15/28


def build_block(method: str, options: BlockOptions, target: Target) -> BlockDrafter:
    """Build a drafter over a head of `method`."""
    head = open_head(choose_source(options.model, method, target), target.model.config, method)
    layers = head.shape.layers
    width, depth = choose_tree(options, head)
    check_tokens(head, target)
    aux_layers = choose_aux_layers(head, target.model, options.aux_layers)
    pages = target.storage(layers.layers, layers.kv_heads, layers.head_dim, target.kv_dtype)
    network = BlockHead(head, target.model, pages, target.max_context, options.quantize or target.quantize)
    return BlockDrafter(network, target, width, aux_layers, options.branches, depth)


def choose_tree(options: BlockOptions, head: Head) -> tuple[int, int]:
    """Return the number of tokens of a draft, and its depth: at most the tokens of a block."""
    most = head.shape.drafts
    width = options.width or most
    replace(options, width=width).check_tree()
    requested = {"max_depth": options.max_depth or most, "width": width if options.branches == 1 else most}
    for name, value in requested.items():
        if value > most:
            raise UserError(
                f"`{name}` is {value}, but `{head.path}` was trained on blocks of {head.shape.block}, which predict "
                f"{most} tokens: pass at most {most}" + (", or `branches` for a tree" if name == "width" else "")
            )
    return width, min(requested["max_depth"], width)


def check_tokens(head: Head, target: Target) -> None:
    """Refuse a head that lacks tokens of the target."""
    check_mask(head, target)
    shape, vocabulary = head.shape, target.model.config.vocabulary
    if shape.markov_rank and 0 < shape.markov_tokens < vocabulary:
        raise UserError(
            f"`markov_w1` of `{head.path}` has {shape.markov_tokens} tokens, but the target has {vocabulary}: "
            "take the head that was made for this model"
        )


@dataclass(frozen=True)
class Block:
    """A request's part of a call: store positions [begin, computed) as context, then fill a block behind them."""

    row: int  # index of the context
    context: DraftContext
    begin: int
    pages: list[int]  # pages of the request that the head reads
    shift: int = 0  # positions that were left out before `begin` (kv_tracker.py)
    size: int = 0  # tokens of the block: the newest token, and masks
    depth: int = 0  # tokens that are predicted
    width: int = 0  # tokens that are drafted: as many, or a tree of them


@dataclass(frozen=True)
class BlockPass:
    """Inputs of the pass that stores the context and fills the blocks: uneven rows from the host, or even ones."""

    stored: Batch  # slots and positions of the context; its tokens do not matter
    hidden: Tensor  # [T, F]: the target's states of those positions
    blocks: Batch | None
    samples: Tensor  # rows of the blocks' states by depth: of all first tokens, then of all second ones, ...


class BlockDrafter:
    """A Proposer over a BlockHead. A request's draft depends on its own text, width and pages alone."""

    def __init__(
        self, head: BlockHead[Pages], target: Target, width: int, aux_layers: tuple[int, ...], branches: int, depth: int
    ) -> None:
        """`width` and `branches` as in TreeOptions; depth: of a draft, at most."""
        self.head, self.ops, self.device, self.sampler = head, target.ops, target.device, DraftSampler(target)
        self.page_size, self.vocabulary = target.page_size, target.model.config.vocabulary
        self.stores, self.blocks = PassGraphs(self._store, target), PassGraphs(lambda batch, _: head.run(batch), target)
        self.skipped = 0 if head.shape.from_anchor else 1  # tokens at the beginning of a block that predict nothing
        self.branches, self.depth = branches, depth
        self.width = width if branches > 1 else depth
        self.shape = fixed_shape(width, branches, depth) if self.sampler.keeps_logits else None
        self.needs = Needs(
            self.width,
            aux_layers,
            has_kv=True,
            lookahead=depth + self.skipped,
            context=head.context,
            trees=branches > 1,
            costs_time=True,
            has_probs=True,
            multi_step=branches == 1,
            suspendable=True,
        )
        self.kv = KvTracker(target.page_size, target.can_suspend)
        self._ids: Tensor | None = None  # tokens that the head drafts, as int32
        self._orders: dict[tuple[int, int], Tensor] = {}  # by rows and tokens of a block
        self._id_list: list[int] | None = None
        self._recordings = Recordings(self.ops, head.pages)
        self._scores: dict[int, Tensor] = {}  # by tokens of a block [depths, U]: recorded, for trees
        self._states: dict[int, Tensor] = {}  # by tokens of a block [size, H]: recorded, for trees

    # ---- a call from the host ----

    def propose(self, contexts: Sequence[DraftContext], last: Tensor, hidden: Tensor | None) -> DraftBatch:
        assert hidden is not None
        reading: list[Block] = []
        num_made = self._recordings.num_made
        for row, context in enumerate(contexts):
            if (block := self._plan(row, context)) is not None:
                reading.append(block)
        draft = self._replay_chain(contexts, reading, hidden) if reading else None
        if draft is None and reading:
            drafting = [block for block in reading if block.width > 0]
            states = self._replay_pass(reading, hidden)
            if states is None:
                states = self.extend(self._call_inputs(reading, drafting, hidden))
            if drafting:
                newest = last if len(drafting) == len(last) else last[[block.row for block in drafting]]
                draft = self._draft(contexts, drafting, states, newest)
        self._update_kv(reading)
        recorded = self._recordings.num_made > num_made
        if draft is None:
            return DraftBatch([[] for _ in contexts], reached=0, recorded=recorded)
        # The pass takes the time of the whole block, wherever the draft ends.
        return replace(draft, reached=None, recorded=recorded)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the head's weights."""
        return self.head.weight_bytes

    def accept(self, requests: Sequence[Request], accepted: Sequence[int]) -> None:
        """Do nothing: the entries of a block are overwritten by those of the text."""

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.kv.pop(request, None)

    # ---- the first pass and the decode loop, for calls and for decode steps alike ----

    def extend(self, inputs: BlockPass) -> Tensor:
        """Store the context and run the blocks; return their states by depth, those that predict nothing first."""
        self.stores.run(inputs.stored, self.head.project_features(inputs.hidden))
        if inputs.blocks is None:
            return inputs.hidden.new_zeros(0, self.head.width)
        states = self.blocks.run(inputs.blocks, None)
        assert states is not None
        return torch.index_select(states, 0, inputs.samples)

    def _store(self, batch: Batch, features: Tensor | None) -> None:
        assert features is not None
        self.head.store(features, batch)

    def capture_passes(self, shapes: Sequence[Shape]) -> None:
        """Capture passes over prompts and blocks of these padded shapes."""
        for shape in shapes:
            if not shape.is_tree:
                self.stores.capture(shape, self.head.width)
                self.blocks.capture(shape, 0)

    def decode(self, chains: ChainBuilder, states: Tensor, newest: Tensor) -> None:
        """Sample the tokens of all blocks from left to right, each with a bias by the one before it.

        newest [R]: the token before the first prediction of each block.
        """
        head, counts = self.head, chains.counts
        predicting = states[counts[0] * self.skipped :]
        by_depth = torch.split(predicting, counts)
        scores = torch.split(head.scores(predicting), counts)  # [R, U] each
        before, memory = newest, head.begin(states[: counts[0]], newest)
        for depth in range(chains.width):
            index = chains.index(depth)
            depth_states = by_depth[depth] if index is None else by_depth[depth][index]
            depth_scores = scores[depth] if index is None else scores[depth][index]
            # The head estimates acceptance before it knows the token; in greedy drafts the logits tell more.
            confidence = head.confidence(depth_states, before) if chains.reads_confidence else None
            logits, memory = self._biased(depth_states, depth_scores, before, memory, chains.ids)
            before = chains.put(depth, logits, confidence)
            going = chains.advance(depth, paid=True)
            if going == []:
                return
            if going is not None:
                before, memory = before[going], memory[going]

    def _biased(
        self, states: Tensor, scores: Tensor, before: Tensor, memory: Tensor, ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return logits [R, U], without `ids` [R, V], after the tokens `before` [R], and the Markov state [R, M]."""
        bias, memory = self.head.bias(states, before, memory)
        logits = scores if bias is None else scores + bias
        return logits if ids is not None else self.head.logits(logits), memory

    def _draft(
        self, contexts: Sequence[DraftContext], blocks: list[Block], states: Tensor, newest: Tensor
    ) -> DraftBatch:
        """Draft the tokens of one call; newest: as in `decode`."""
        if self.branches > 1:
            builder = TreeBuilder(self, contexts, blocks, self.branches, self.shape, paid=True)
            if not self._replay_tree(builder, states):
                self._grow(builder, states, newest)
            return builder.draft()
        chains = CallChains(self.sampler, self.device, contexts, blocks, self.vocabulary, self._known_ids())
        self.decode(chains, states, newest)
        return chains.draft()

    def _grow(self, builder: TreeBuilder[Block], states: Tensor, newest: Tensor) -> None:
        """Grow the trees a depth at a time, all nodes of it at once.

        Only the bias by the token before depends on the path, at one small matmul a depth: so each node is expanded.
        """
        depths = [tree.plan.depth for tree in builder.trees]
        reaching = [[tree for tree, limit in enumerate(depths) if limit > depth] for depth in range(max(depths))]
        begins = [0, *accumulate(len(trees) for trees in reaching)]
        predicting = states[len(depths) * self.skipped :]
        scores = self.head.scores(predicting)
        parents: list[Parents[Block]] = [(tree, [tree.root]) for tree in builder.trees]
        before, memory = newest, self.head.begin(states[: len(depths)], newest)
        ids = self.head.lm_head.ids if builder.is_greedy else None
        for depth in range(self.depth):
            rows = [begins[depth] + reaching[depth].index(tree.root.state) for tree, _ in parents]
            # The head's confidence is one number for all children of a node; the logits tell more.
            logits, memory = self._biased(predicting[rows], scores[rows], before, memory, ids)
            first = builder.num_logits
            builder.put(parents, depth, logits, ids)
            parents = self._to_expand(builder, depth)
            if not parents:
                return
            nodes = [nodes[0] for _, nodes in parents]
            before = self.device.upload([node.token for node in nodes], torch.int32)
            memory = memory[[node.source - first for node in nodes]]

    def _to_expand(self, builder: TreeBuilder[Block], depth: int) -> list[Parents[Block]]:
        """Return the nodes of this depth to expand; together if the token before has no influence."""
        chosen = [(tree, tree.to_expand(depth)) for tree in builder.trees if tree.plan.depth > depth + 1]
        if self.head.markov is None:
            return [(tree, nodes) for tree, nodes in chosen if nodes]
        return [(tree, [node]) for tree, nodes in chosen for node in nodes]

    def _known_ids(self) -> Tensor | None:
        """Return the target's ids of the tokens that the head drafts, as int32; None: all."""
        if self._ids is None and self.head.lm_head.ids is not None:
            self._ids = self.head.lm_head.ids.to(torch.int32)
        return self._ids

    # ---- a call for one request, by replay ----

    def _replay_chain(
        self, contexts: Sequence[DraftContext], reading: list[Block], hidden: Tensor
    ) -> DraftBatch | None:
        """Draft a chain for one request; None if the call is another one, or is not recorded."""
        block = reading[0]
        if self.branches > 1 or self.sampler.keeps_logits:
            return None
        greedy = self.sampler.is_greedy([block.context])
        found = self._find(reading, hidden, partial(self._record_chain, greedy), greedy)
        if found is None:
            return None
        chain: RecordedChain = found.outputs
        chain.take(block.context)
        least = least_path(block.context, paid=True)
        reached = self._recordings.run(found, block.width, least, chain.shares_noise)
        return None if reached < 0 else chain.read(block, contexts, reached, least)

    def _replay_pass(self, reading: list[Block], hidden: Tensor) -> Tensor | None:
        """Store the context of one request and run its block; return its states; None if this is not recorded."""
        found = self._find(reading, hidden, self._record_pass)
        return None if found is None or self._recordings.run(found) < 0 else self._states[reading[0].size]

    def _find(
        self, reading: list[Block], hidden: Tensor, build: Callable[[int, int, int], Recorded], *key: Hashable
    ) -> Recorded | None:
        """Return the recording for the block of one request, with its inputs; None if the call is not recorded.

        build: takes the positions of the context to store, the tokens of a block, and the width of the page table.
        """
        block = reading[0]
        context, begin, size, shift = block.context, block.begin, block.size, block.shift
        count, computed = context.computed - begin, context.computed
        if len(reading) > 1 or not size or computed > self._capacity(block):
            return None
        pages = table_width(len(block.pages))
        at_once = count <= self.depth + 1  # as after each draft; longer ones may not come again
        found = self._recordings.find((count, size, pages, *key), lambda: build(count, size, pages), at_once)
        if found is None:
            return None
        table = padded_table(block.pages, pages)
        slots = slots_of(context.request.pages, range(begin, computed + size), self.page_size)
        values = [*([0] * count), *range(begin - shift, computed - shift), *slots[:count], 0, count, *table]
        values += context.tokens(computed, computed + 1) + [self.head.shape.mask] * (size - 1)
        values += [*range(computed - shift, computed - shift + size), *slots[count:], 0, size, *table]
        found.inputs.fill(values)
        found.load(hidden, context.first_row + begin - context.start)
        return found

    def _pass_inputs(self, count: int, size: int, pages: int) -> tuple[Buffer, BlockPass]:
        shapes = Shape(count, 1, pages), Shape(size, 1, pages)
        inputs = self.device.buffer(sum(sum(sizes(shape)) for shape in shapes), torch.int32)
        lengths = [sizes(shape) for shape in shapes]
        both = torch.split(inputs.tensor, [sum(one) for one in lengths])
        stored, blocks = (
            as_batch(shape, torch.split(part, one)) for shape, part, one in zip(shapes, both, lengths, strict=True)
        )
        hidden = self.device.zeros((count, self.head.features), torch.float32)
        return inputs, BlockPass(stored, hidden, blocks, self._by_depth(1, size))

    def _record_chain(self, greedy: bool, count: int, size: int, pages: int) -> Recorded:
        """Record the pass and the decode loop after it."""
        inputs, block_pass = self._pass_inputs(count, size, pages)
        chain = RecordedChain(self.sampler, self.device, size - self.skipped, self._known_ids(), greedy)
        assert block_pass.blocks is not None
        newest = block_pass.blocks.tokens[:1]

        def run(recorder: object) -> None:
            chain.recorder = recorder
            self.decode(chain, self.extend(block_pass), newest)

        return Recorded(run, inputs, block_pass.hidden, chain)

    def _record_pass(self, count: int, size: int, pages: int) -> Recorded:
        inputs, block_pass = self._pass_inputs(count, size, pages)

        def run(_: object) -> None:
            states = self.extend(block_pass)
            if size not in self._states:
                self._states[size] = torch.empty_like(states)
            self._states[size].copy_(states)

        return Recorded(run, inputs, block_pass.hidden)

    def _replay_tree(self, builder: TreeBuilder[Block], states: Tensor) -> bool:
        """Grow the argmax tree of one request, each depth by a replay; return whether that was possible."""
        block, markov = builder.trees[0].plan, self.head.markov
        size, state_by_state = block.size, markov is not None and markov.joint is not None
        if len(builder.trees) > 1 or not builder.is_greedy or state_by_state or states is not self._states.get(size):
            return False
        scored = self._recordings.find(("scores", size), lambda: self._record_scores(size))
        if scored is None or self._recordings.run(scored) < 0:
            return False
        parents: list[Parents[Block]] = [(tree, [tree.root]) for tree in builder.trees]
        before = block.context.tokens(block.context.computed, block.context.computed + 1)
        for depth in range(self.depth):
            count = len(parents)
            build = partial(self._record_children, size, count)
            found = self._recordings.find(("expand", size, count), build, at_once=True)
            if found is None:
                return False
            found.inputs.fill([depth] * count + before)
            if self._recordings.run(found) < 0:
                assert depth == 0, "all depths have the same operations"
                return False
            tokens, logprobs = (part.read(count * self.branches) for part in found.outputs)
            ids = self._listed_ids()
            tokens = [-1 if token < 0 else ids[token] for token in tokens] if ids is not None else tokens
            starts = range(0, len(tokens), self.branches)
            builder.add(
                parents,
                [tokens[start : start + self.branches] for start in starts],
                [[min(value, 0.0) for value in logprobs[start : start + self.branches]] for start in starts],
            )
            parents = self._to_expand(builder, depth)
            if not parents:
                break
            before = [nodes[0].token for _, nodes in parents]
        return True

    def _record_scores(self, size: int) -> Recorded:
        def run(_: object) -> None:
            self._scores[size] = self.head.scores(self._states[size][self.skipped :])  # [depths, U]

        return Recorded(run, self.device.buffer(0, torch.int32))

    def _record_children(self, size: int, count: int) -> Recorded:
        """Record the children of `count` nodes. Inputs: the depth of each, and its token."""
        inputs = self.device.buffer(2 * count, torch.int32)
        rows, before = torch.split(inputs.tensor, count)
        children = count * self.branches
        outputs = self.device.buffer(children, torch.int32), self.device.buffer(children, torch.float32)
        memory, ids = self.device.zeros((count, 0), torch.float32), self._known_ids()
        sampling = self.sampler.greedy_sampling(count)

        def run(_: object) -> None:
            predicting = self._states[size][self.skipped :]
            chosen = torch.index_select(predicting, 0, rows), torch.index_select(self._scores[size], 0, rows)
            logits, _memory = self._biased(*chosen, before, memory, ids)
            found = self.ops.sample_children(logits, sampling, self.branches)
            outputs[0].tensor.copy_(found.tokens.view(-1))
            outputs[1].tensor.copy_(found.logprobs.view(-1))

        return Recorded(run, inputs, outputs=outputs)

    def _listed_ids(self) -> list[int] | None:
        """Return the target's ids of the tokens that the head drafts; None: all."""
        ids = self._known_ids()
        if self._id_list is None and ids is not None:
            self._id_list = ids.tolist()
        return self._id_list

    # ---- inputs of a call ----

    def _plan(self, row: int, context: DraftContext) -> Block | None:
        """Return what to read and draft for a request; None: tokens before it were missed, and no page begins yet."""
        begin, pages, shift = context.start, context.request.pages, 0
        if self.kv.can_suspend:
            kv = self.kv.of(context)
            resumed = self.kv.begin(context, kv, 0)
            if resumed is None or resumed >= context.computed:
                return None
            begin, pages, shift = resumed, kv.pages(context.request), kv.shift(self.page_size)
        capacity = min(len(context.request.pages) * self.page_size, self.head.context) - context.computed
        width = min(context.num_draft_tokens, self.width) if context.new_tokens else 0
        depth = min(width, self.depth, capacity - self.skipped)
        if depth < 1:
            return Block(row, context, begin, pages, shift)
        width = width if self.branches > 1 else depth
        return Block(row, context, begin, pages, shift, depth + self.skipped, depth, width)

    def _update_kv(self, blocks: list[Block]) -> None:
        for block in blocks if self.kv.can_suspend else ():
            context, kv = block.context, self.kv[block.context.request]
            kv.known = context.computed
            self.kv.share_pages(context, kv)

    def _call_inputs(self, reading: list[Block], drafting: list[Block], hidden: Tensor) -> BlockPass:
        """Concatenate the context of all requests, and their blocks."""
        context, blocks = BatchBuilder(), BatchBuilder()
        rows: list[int] = []
        for block in reading:
            start, computed = block.context.start, block.context.computed
            positions = range(block.begin, computed)
            # Beyond the head's context, or the pages of a prompt that is read in parts, nothing is stored.
            known = positions[: max(min(self._capacity(block), computed) - block.begin, 0)]
            spare = len(positions) - len(known)
            context.add(
                [0] * len(positions),
                [*(position - block.shift for position in known), *([0] * spare)],
                [*slots_of(block.context.request.pages, known, self.page_size), *([-1] * spare)],
                block.pages,
            )
            rows += [block.context.first_row + position - start for position in positions]
        for block in drafting:
            computed = block.context.computed
            positions = range(computed, computed + block.size)
            blocks.add(
                block.context.tokens(computed, computed + 1) + [self.head.shape.mask] * (block.size - 1),
                [position - block.shift for position in positions],
                slots_of(block.context.request.pages, positions, self.page_size),
                block.pages,
            )
        states = hidden if rows == list(range(len(hidden))) else hidden[rows]  # [T, F]
        stored, *_ = self.stores.upload(context, self.head.width)
        if not drafting:
            return BlockPass(stored, states, None, stored.slots)
        deepest = max(block.size for block in drafting)
        samples = [
            first + depth
            for depth in range(deepest)
            for first, block in zip(blocks.starts, drafting, strict=False)
            if block.size > depth
        ]
        batch, (chosen,), _ = self.blocks.upload(blocks, 0, samples)
        return BlockPass(stored, states, batch, chosen)

    def _capacity(self, block: Block) -> int:
        return min(len(block.context.request.pages) * self.page_size, self.head.context + block.shift)

    # ---- decode steps without the host ----

    def ready(self, requests: Sequence[Request], computed: Sequence[int] | None = None) -> bool:
        return True

    def read(self, contexts: Sequence[DraftContext], hidden: Tensor | None) -> None:
        assert hidden is not None
        nothing = hidden.new_empty(0, dtype=torch.int32)  # the newest tokens, which only drafts read
        self.propose([replace(context, num_draft_tokens=0) for context in contexts], nothing, hidden)

    def bind(self, state: DecodeState) -> StepDrafter:
        chains = StateChains(self.sampler, state, self.vocabulary, self.head.context, self.head.lm_head.ids)
        return BoundDrafter(self, state, chains)

    def state_inputs(self, state: DecodeState) -> BlockPass:
        batch, size = state.batch, state.width + self.skipped
        # A text at its maximum length has no slots, and its block gets none.
        has_slot = torch.index_select(batch.slots[:, None], 0, state.last_accepted) >= 0  # [B, 1]
        inputs = self.ops.block_inputs(
            batch.positions,
            batch.query_starts,
            state.last_accepted,
            state.newest,
            torch.where(has_slot, batch.page_tables, -1),
            self.page_size,
            max(size - 1, 0),
            self.head.shape.mask,
            self.head.context,
        )
        slots = inputs.context_slots
        positions = torch.where(slots >= 0, batch.positions, 0)
        stored = Batch(positions, positions, slots, batch.query_starts, batch.page_tables)
        if not state.width:
            return BlockPass(stored, state.hidden, None, slots)
        blocks = Batch(inputs.tokens, inputs.positions, inputs.slots, inputs.query_starts, batch.page_tables)
        samples = self._by_depth(state.rows, size)
        return BlockPass(stored, state.hidden, blocks, samples)

    def decode_state(self, chains: ChainBuilder, states: Tensor, state: DecodeState) -> None:
        self.decode(chains, states, state.newest)

    def _by_depth(self, rows: int, size: int) -> Tensor:
        """Return the order of even blocks by depth. Kept, as CUDA graphs read it."""
        if (rows, size) not in self._orders:
            order = torch.arange(rows * size, dtype=torch.int32, device=self.device.torch_device)
            self._orders[rows, size] = order.view(rows, size).t().flatten()
        return self._orders[rows, size]

    def finish(self, requests: Sequence[Request], computed: Sequence[int], latest: Tensor) -> None:
        """Do nothing: a request has no state beside its pages."""
