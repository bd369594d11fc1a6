"""Drafters with a network of their own that reads the text token by token, with KV in the target's pages.

The network has one KV entry a position. The entry of position q comes from token q and, for a network that reads the
target's hidden states, from the state of position q - 1. So the entries of a full page depend on nothing but the tokens
up to its end, and pages are shared between prompts as the target's are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...cache.pages import slots_of
from ...errors import UserError
from ...input_batch import BatchBuilder, Shape, make_batch
from ...kernels import Batch
from ...multi_step.state import DecodeState, StepDrafter
from ...recordings import Recorded, Recordings, padded_table, table_width
from ...request import Request
from ..interface import DraftBatch, DraftContext, Needs, Target
from .chain_builder import BoundDrafter, CallChains, ChainBuilder, StateChains
from .draft_sampler import DraftSampler
from .kv_tracker import KvTracker, TrackedKv
from .network import HeadOptions, Network, RequestPlan, open_network
from .pass_graphs import PassGraphs
from .recorded import RecordedChain, least_path
from .tree_builder import Node, Tree, TreeBuilder, fixed_shape

DEFAULT_DEPTH = 6  # of a tree; each depth costs a pass, and few deeper tokens are accepted


def build_head(method: str, options: HeadOptions, target: Target, aux_layers: tuple[int, ...] = ()) -> Autoregressive:
    """Build a drafter over a head of `method`; aux_layers: set by the user, empty for those of the checkpoint."""
    options.check_tree()
    network, chosen = open_network(method, options.model, options.quantize, target, aux_layers)
    return Autoregressive(network, target, options.width, chosen, options.branches, options.max_depth)


@dataclass(frozen=True)
class FirstPass:
    """Inputs of the pass that reads the text: uneven rows from the host, even rows from a DecodeState."""

    batch: Batch  # entries of the text, and mask tokens behind them if the network drafts in parallel
    features: Tensor | None  # [T, H]: input features of the network
    samples: Tensor | None  # rows of the states that drafts are sampled from, by depth; None: all, in their order


class Autoregressive:
    """A Proposer over a Network. A request's draft depends on its own text alone."""

    def __init__(
        self,
        network: Network,
        target: Target,
        width: int,
        aux_layers: tuple[int, ...] = (),
        branches: int = 1,
        max_depth: int | None = None,
        suspendable: bool = True,
    ) -> None:
        """Take `width`, `branches` and `max_depth` as in TreeOptions.

        suspendable: the network can leave out a part of a text.
        """
        self.network, self.ops, self.device = network, target.ops, target.device
        self.page_size, self.vocabulary = target.page_size, target.model.config.vocabulary
        self.sampler = DraftSampler(target)
        self.passes = PassGraphs(network.run, target)
        self.trees: TreeDecoder | None = None
        if branches > 1:
            if network.parallel:
                raise UserError(
                    f"`branches` is {branches}, but this drafter predicts all tokens in one pass, "
                    "independently of each other: leave out `branches`"
                )
            depth = max_depth or min(width, DEFAULT_DEPTH)
            self.trees = TreeDecoder(network, target, self.passes, width, branches, depth)
        elif max_depth is not None:
            width = min(width, max_depth)
        self.width = width
        # The nodes of a tree that run in one pass are some of the `width` best, and the last of those never runs.
        self.needs = Needs(
            width,
            aux_layers,
            has_kv=True,
            lookahead=width,
            context=network.context,
            trees=branches > 1,
            costs_time=True,
            has_probs=True,
            multi_step=branches == 1,
            stops_early=not network.parallel,
            suspendable=suspendable,
        )
        self.kv = KvTracker(target.page_size, target.can_suspend and suspendable)
        self._first = 1 if network.features else 0  # no state comes before the first token
        self._floats: int | None = None  # of its input features
        self._ids: Tensor | None = None  # network.ids as int32
        self._ranges: dict[int, Tensor] = {}  # by length: 0, 1, 2, ...; kept, as CUDA graphs read them
        self._recordings = Recordings(self.ops, network.pages)

    # ---- a call from the host ----

    def propose(self, contexts: Sequence[DraftContext], last: Tensor, hidden: Tensor | None) -> DraftBatch:
        return self._propose(contexts, hidden, self._can_defer)

    def _propose(
        self,
        contexts: Sequence[DraftContext],
        hidden: Tensor | None,
        can_defer: Callable[[DraftContext, TrackedKv], bool],
    ) -> DraftBatch:
        hidden = hidden if self.network.features else None
        num_made = self._recordings.num_made
        tracked: list[TrackedKv] = []
        plans: list[RequestPlan] = []
        for row, context in enumerate(contexts):
            kv = self.kv.of(context, self._first)
            tracked.append(kv)
            if (plan := self._plan(row, context, kv, can_defer)) is not None:
                plans.append(plan)
        draft = self._replay(contexts, plans, hidden) if plans else DraftBatch([[] for _ in contexts])
        if draft is None:
            states = self.extend(self._call_inputs(plans, hidden))
            draft = self._draft(contexts, [plan for plan in plans if plan.width], states)
        for kv in tracked:
            kv.drafted = 0
        for plan in plans:
            plan.kv.known, plan.kv.drafted = plan.stop, self._drafted_entries(plan, draft)
            self.kv.share_pages(plan.context, plan.kv)
        if hidden is not None:
            self._keep_states(contexts, tracked, hidden)
        return replace(draft, recorded=True) if self._recordings.num_made > num_made else draft

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the drafter's weights."""
        return self.network.weight_bytes

    def accept(self, requests: Sequence[Request], accepted: Sequence[int]) -> None:
        for request, count in zip(requests, accepted, strict=True):
            kv = self.kv.get(request)
            if kv is not None:
                kv.known += min(count, kv.drafted)
                kv.drafted = 0

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.kv.pop(request, None)

    # ---- the first pass and the decode loop, for calls and for decode steps alike ----

    def extend(self, inputs: FirstPass) -> Tensor:
        """Read the text; return the states that drafts are sampled from, by depth."""
        states = self.passes.run(inputs.batch, inputs.features)  # [T, S]
        assert states is not None
        return states if inputs.samples is None else torch.index_select(states, 0, inputs.samples)

    def decode(self, chains: ChainBuilder, states: Tensor, positions: Tensor, tables: Tensor) -> None:
        """Sample the tokens of all chains: from a state each, or one at a time, each read before the next.

        positions [R] int32: of the newest tokens, which have been read.
        """
        network, width = self.network, chains.width
        to_logits = network.logits if chains.ids is None else network.scores
        if network.parallel:
            for depth, logits in enumerate(torch.split(to_logits(states), chains.counts)):
                chains.put(depth, logits)
                chains.advance(depth, paid=True, drop=False)
            return
        rows = len(positions)
        next_slots = self.ops.next_slots(positions, tables, self.page_size, network.context, max(width - 1, 1))
        following, slots = (values.view(rows, -1).t().contiguous() for values in next_slots)  # [W - 1, R]
        starts = self._range(rows + 1)
        for depth in range(width):
            tokens = chains.put(depth, to_logits(states))
            going = chains.advance(depth)
            if depth + 1 == width or going == []:
                return
            if going is not None:
                tokens, states, tables = tokens[going], states[going], tables[going]
                following, slots, starts = following[:, going], slots[:, going], starts[: len(going) + 1]
            batch = Batch(tokens, following[depth], slots[depth], starts, tables)
            states = network.run(batch, network.feedback_features(states))

    def _draft(self, contexts: Sequence[DraftContext], plans: list[RequestPlan], states: Tensor) -> DraftBatch:
        """Draft the tokens of one call from the states of the first pass."""
        if self.trees is not None:
            return self.trees.draft(contexts, plans, states)
        chains = CallChains(self.sampler, self.device, contexts, plans, self.vocabulary, self._known_ids())
        if plans:
            width = max(len(plan.pages) for plan in plans)
            numbers = [plan.context.computed - plan.shift for plan in plans]
            for plan in plans:
                numbers += plan.pages
                numbers += [0] * (width - len(plan.pages))
            packed = self.device.upload(numbers, torch.int32)
            positions, tables = packed[: len(plans)], packed[len(plans) :].view(len(plans), width)
            self.decode(chains, states, positions, tables)
        return chains.draft()

    def _known_ids(self) -> Tensor | None:
        """Return the target's ids of the tokens that the network knows, as int32; None: all."""
        if self._ids is None and self.network.ids is not None:
            self._ids = self.network.ids.to(torch.int32)
        return self._ids

    def _range(self, count: int) -> Tensor:
        if count not in self._ranges:
            self._ranges[count] = torch.arange(count, dtype=torch.int32, device=self.device.torch_device)
        return self._ranges[count]

    # ---- a call for one request, by replay ----

    def _replay(
        self, contexts: Sequence[DraftContext], plans: list[RequestPlan], hidden: Tensor | None
    ) -> DraftBatch | None:
        """Draft a chain for one request; None if the call is another one, or is not recorded."""
        plan = plans[0]
        if len(plans) > 1 or not plan.width or self.trees is not None or self.network.parallel:
            return None
        context, count = plan.context, plan.stop - plan.begin
        if self.sampler.keeps_logits or (hidden is not None and plan.begin <= context.start):
            return None  # the first entry reads a state of an earlier step
        key = count, table_width(len(plan.pages)), self.sampler.is_greedy([context])
        at_once = count <= self.width + 1  # as after each draft; longer ones may not come again
        found = self._recordings.find(key, lambda: self._record(*key), at_once)
        if found is None:
            return None
        values = context.tokens(plan.begin, plan.stop)
        values += range(plan.begin - plan.shift, plan.stop - plan.shift)
        values += slots_of(context.request.pages, range(plan.begin, plan.stop), self.page_size)
        values += 0, count
        values += padded_table(plan.pages, key[1])
        found.inputs.fill(values)
        if hidden is not None:
            found.load(hidden, context.first_row + plan.begin - 1 - context.start)
        chain: RecordedChain = found.outputs
        chain.take(context)
        least = least_path(context, paid=False)
        reached = self._recordings.run(found, plan.width, least, chain.shares_noise)
        return None if reached < 0 else chain.read(plan, contexts, reached, least)

    def _record(self, count: int, pages: int, greedy: bool) -> Recorded:
        """Record the first pass over `count` entries and the decode loop after it."""
        network = self.network
        inputs, batch = make_batch(self.device, Shape(count, 1, pages))
        hidden = self.device.zeros((count, network.features), torch.float32) if network.features else None
        chain = RecordedChain(self.sampler, self.device, self.width, self._known_ids(), greedy)
        positions = batch.positions[count - 1 :]  # of the newest token
        self._range(2)  # of `decode`: inside the recording it could not be made

        def run(recorder: object) -> None:
            chain.recorder = recorder
            features = None if hidden is None else network.project_features(hidden)
            state = self.extend(FirstPass(batch, features, None))[count - 1 :]  # [1, S]
            self.decode(chain, state, positions, batch.page_tables)

        return Recorded(run, inputs, hidden, chain)

    # ---- inputs of a call ----

    def _plan(
        self,
        row: int,
        context: DraftContext,
        kv: TrackedKv,
        can_defer: Callable[[DraftContext, TrackedKv], bool],
    ) -> RequestPlan | None:
        """Return what to read and draft for a request; None without a page, context or hidden state for it."""
        capacity = min(len(context.request.pages) * self.page_size, self.network.context)
        # If a step is repeated, the newest token's entry is computed again: drafts begin with its state.
        begin, stop = self.kv.begin(context, kv, self._first), min(context.computed + 1, capacity)
        if begin is None or begin >= stop or (self.network.features and not self._has_states(context, kv, begin)):
            return None
        width = self._drafts_within(context, capacity - context.computed) if context.new_tokens else 0
        if not width and context.new_tokens and can_defer(context, kv):
            return None
        pages, shift = kv.pages(context.request), kv.shift(self.page_size)
        return RequestPlan(row, context, kv, begin, stop, width, pages, shift)

    def _drafts_within(self, context: DraftContext, positions: int) -> int:
        """Return how many tokens to draft if the last of a chain may be `positions` behind the text's last one."""
        if self.trees is not None:
            return context.num_draft_tokens if positions > 0 else 0
        return max(min(context.num_draft_tokens, self.width, positions), 0)

    def _can_defer(self, context: DraftContext, kv: TrackedKv) -> bool:
        """Return whether the text may be read later, several tokens at once.

        Not with hidden states, which are not kept, and not beyond a page, which is shared once it is full. Nor for
        drafters that can be suspended: they take tokens that are read later for missed ones.
        """
        if self.network.features or self.kv.can_suspend:
            return False
        return context.computed < (kv.known // self.page_size + 1) * self.page_size

    def _call_inputs(self, plans: list[RequestPlan], hidden: Tensor | None) -> FirstPass:
        """Concatenate the entries of all plans, each with mask tokens if the network drafts in parallel."""
        network, builder = self.network, BatchBuilder()
        entries: list[int] = []  # indices of the entries of the text among all tokens
        firsts: list[int] = []  # of the plans that draft: the state that the first token is sampled from
        for plan in plans:
            masks = max(plan.width - 1, 0) if network.parallel else 0
            first, pages = len(builder.tokens), plan.context.request.pages
            builder.add(
                plan.context.tokens(plan.begin, plan.stop) + [network.mask] * masks,
                range(plan.begin - plan.shift, plan.stop - plan.shift + masks),
                slots_of(pages, range(plan.begin, plan.stop + masks), self.page_size),
                plan.pages,
            )
            if network.parallel:
                entries += range(first, first + plan.stop - plan.begin)
            if plan.width:
                firsts.append(first + plan.stop - plan.begin - 1)
        depths = range(max(plan.width for plan in plans)) if network.parallel else range(1)
        drafting = [plan for plan in plans if plan.width]
        samples = [
            first + depth
            for depth in depths
            for first, plan in zip(firsts, drafting, strict=True)
            if plan.width > depth
        ]
        batch, (chosen, entry_indices), captured = self.passes.upload(builder, self._input_floats(), samples, entries)
        features = None if hidden is None else self._call_features(plans, hidden, entry_indices, len(builder.tokens))
        in_order = not captured and samples == list(range(len(builder.tokens)))
        return FirstPass(batch, features, None if in_order else chosen)

    def _input_floats(self) -> int:
        """Return the floats of the network's input features, if passes are captured; 0 without features."""
        if self._floats is None:
            network = self.network
            zeros = self.device.zeros((1, network.features), torch.float32)
            self._floats = network.project_features(zeros).shape[1] if network.features and self.passes.enabled else 0
        return self._floats

    def capture_passes(self, shapes: Sequence[Shape]) -> None:
        """Capture passes over prompts and trees of these padded shapes."""
        for shape in shapes:
            if not shape.is_tree:
                self.passes.capture(shape, self._input_floats())
        states = next(iter(self.passes.states.values()), None)
        if self.trees is None or states is None:
            return
        features = self.network.feedback_features(states[:1]) if self.network.features else None
        for shape in shapes:
            if shape.is_tree:
                self.passes.capture(shape, 0 if features is None else features.shape[1])

    def _call_features(self, plans: list[RequestPlan], hidden: Tensor, entries: Tensor, count: int) -> Tensor:
        """Return the input features of all tokens of the first pass, mask tokens included: [count, H]."""
        rows: list[int] = []
        carried: dict[int, Tensor] = {}
        for plan in plans:
            context = plan.context
            if plan.begin == context.start and (state := self._state_before(context, plan.kv)) is not None:
                carried[len(rows)] = state
            rows += [max(context.first_row + entry - 1 - context.start, 0) for entry in range(plan.begin, plan.stop)]
        contiguous = rows == list(range(rows[0], rows[0] + len(rows)))
        states = hidden[rows[0] : rows[0] + len(rows)] if contiguous else hidden[rows]  # [entries, F]
        if carried and contiguous:
            states = states.clone()
        for index, state in carried.items():
            states[index] = state
        projected = self.network.project_features(states)  # [entries, H]
        return projected if len(rows) == count else self._with_mask_features(projected, entries, count)

    def _with_mask_features(self, projected: Tensor, entries: Tensor, count: int) -> Tensor:
        """Return features of `count` tokens: `projected` for `entries`, the learned ones for mask tokens."""
        assert self.network.mask_features is not None
        features = self.network.mask_features.repeat(count, 1)
        features[entries.long()] = projected
        return features

    def _has_states(self, context: DraftContext, kv: TrackedKv, begin: int) -> bool:
        return begin > context.start or (begin == context.start and self._state_before(context, kv) is not None)

    def _state_before(self, context: DraftContext, kv: TrackedKv) -> Tensor | None:
        """Return the target's state [F] of the position before those that the step ran; None: it was not kept."""
        position = context.start - 1
        if kv.state_position == position:
            return kv.state
        if kv.state is None and context.start % self.page_size == 0:  # the prefix cache supplied the text before
            return self.network.pages.states[context.request.pages[position // self.page_size]]
        return None

    def _keep_states(self, contexts: Sequence[DraftContext], tracked: list[TrackedKv], hidden: Tensor) -> None:
        """Keep the state of every page that the step filled, and of the last position if its entry is still to come."""
        size = self.page_size
        pages: list[int] = []
        rows: list[int] = []
        for context in contexts:
            for end in range(context.start // size * size + size, context.computed + 1, size):
                pages.append(context.request.pages[end // size - 1])
                rows.append(context.first_row + end - 1 - context.start)
        if len(pages) == 1:
            self.network.pages.states[pages[0]] = hidden[rows[0]]
        elif pages:
            self.network.pages.states[pages] = hidden[rows]
        for context, kv in zip(contexts, tracked, strict=True):
            if kv.known <= context.computed:
                last = context.computed - 1
                kv.state, kv.state_position = hidden[context.first_row + last - context.start].clone(), last

    def _drafted_entries(self, plan: RequestPlan, draft: DraftBatch) -> int:
        """Return how many drafted tokens, from the first on, have an entry that is right if they are accepted."""
        if self.network.features or self.network.parallel or self.trees is not None:
            return 0  # entries of predicted states, of mask tokens, and of nodes at one position are not
        if draft.lengths is None:
            return 0
        return min(max(len(draft.tokens[plan.row]) - 1, 0), draft.lengths[plan.row])  # the last token never ran

    # ---- decode steps without the host ----

    def ready(self, requests: Sequence[Request], computed: Sequence[int] | None = None) -> bool:
        counts = [request.computed for request in requests] if computed is None else computed
        return all(self._is_ready(request, count) for request, count in zip(requests, counts, strict=True))

    def _is_ready(self, request: Request, computed: int) -> bool:
        kv = self.kv.get(request)
        if kv is None or kv.preemptions != request.preemptions:
            return False
        return kv.known == min(computed + 1, self.network.context)

    def read(self, contexts: Sequence[DraftContext], hidden: Tensor | None) -> None:
        self._propose([replace(context, num_draft_tokens=0) for context in contexts], hidden, lambda *_: False)

    def bind(self, state: DecodeState) -> StepDrafter:
        chains = StateChains(self.sampler, state, self.vocabulary, self.network.context, self.network.ids)
        return BoundDrafter(self, state, chains, keeps_latest=self.network.features > 0)

    def state_inputs(self, state: DecodeState) -> FirstPass:
        """Read all rows whole: shapes may not depend on what was accepted, so rejected tokens get no slot."""
        network, batch, tables = self.network, state.batch, state.batch.page_tables
        per_row = max(state.width, 1) if network.parallel else 1  # the newest token, and masks after it
        inputs = self.ops.draft_inputs(
            batch.tokens,
            batch.positions,
            batch.query_starts,
            state.last_accepted,
            state.newest,
            per_row,
            True,
            network.mask,
        )
        positions, slots = self.ops.next_slots(
            state.ran_positions, tables, self.page_size, network.context, state.width + per_row
        )
        rejected = inputs.rejected > 0  # [X]
        positions, slots = positions.masked_fill(rejected, 0), slots.masked_fill(rejected, -1)
        features = None
        if network.features:
            features = network.project_features(state.hidden)  # [T, H]
            order = self._range(state.rows * (state.width + 1)).view(state.rows, -1)
            accepted = (order <= state.last_accepted[:, None]).flatten()  # [T]
            if per_row > 1:
                count = len(inputs.tokens)  # one row more takes the states of rejected tokens
                entries = torch.where(accepted, inputs.sources, count)
                features = self._with_mask_features(features, entries, count + 1)[:count]
            self._keep_page_states(state, accepted)
        samples = inputs.samples.view(-1, per_row).t().flatten()
        return FirstPass(Batch(inputs.tokens, positions, slots, inputs.query_starts, tables), features, samples)

    def decode_state(self, chains: ChainBuilder, states: Tensor, state: DecodeState) -> None:
        self.decode(chains, states, state.positions, state.batch.page_tables)

    def _keep_page_states(self, state: DecodeState, accepted: Tensor) -> None:
        """Keep the target's state of the last token of every page which the step filled."""
        pages, slots = self.network.pages, state.batch.slots  # [T]
        fills = accepted & (slots >= 0) & ((slots + 1) % pages.page_size == 0)
        pages.states[torch.where(fills, slots // pages.page_size, pages.count).long()] = state.hidden

    def finish(self, requests: Sequence[Request], computed: Sequence[int], latest: Tensor) -> None:
        states = latest.clone()
        for row, (request, done) in enumerate(zip(requests, computed, strict=True)):
            kv = self.kv[request]
            kv.known, kv.drafted = min(done + 1, self.network.context), 0
            if self.network.features:
                kv.state, kv.state_position = states[row], done - 1


class TreeDecoder:
    """Drafts the trees of one call: as in EAGLE-2, or of a shape that does not depend on the sampled tokens.

    A tree grows depth by depth. Each depth is one pass over the nodes to expand and their ancestors, since a token of a
    tree attends to tree tokens of its own batch only. The ancestors compute their KV again.
    """

    def __init__(
        self, network: Network, target: Target, passes: PassGraphs, width: int, branches: int, depth: int
    ) -> None:
        """passes: of the network."""
        self.network, self.device, self.sampler = network, target.device, DraftSampler(target)
        self.passes = passes
        self.page_size, self.vocabulary = target.page_size, target.model.config.vocabulary
        self.branches, self.depth = branches, depth
        self.shape = fixed_shape(width, branches, depth) if self.sampler.keeps_logits else None

    def draft(self, contexts: Sequence[DraftContext], plans: Sequence[RequestPlan], states: Tensor) -> DraftBatch:
        """Draft a tree for each plan. states [R, S]: of their newest tokens, from the pass that read the text."""
        builder = TreeBuilder(self, contexts, plans, self.branches, self.shape)
        if plans:
            self._grow(builder, states)
        return builder.draft()

    def _grow(self, builder: TreeBuilder[RequestPlan], states: Tensor) -> None:
        """Grow all trees depth by depth. states [R, S]: of the newest tokens, then of all nodes that ran."""
        expanded = [(tree, [tree.root]) for tree in builder.trees]
        ids = self.network.ids if builder.is_greedy else None
        to_logits = self.network.logits if ids is None else self.network.scores
        for depth in range(self.depth):
            parents = [(tree, [node]) for tree, nodes in expanded for node in nodes]
            logits = to_logits(states[[node.state for _, nodes in parents for node in nodes]])  # [expanded, V or U]
            builder.put(parents, depth, logits, ids)
            if depth + 1 == self.depth:
                return
            chosen = [(tree, self._fitting(tree, tree.to_expand(depth), depth)) for tree in builder.trees]
            expanded = [(tree, nodes) for tree, nodes in chosen if nodes]
            if not expanded:
                return
            states = torch.cat([states, self._run(expanded, states)])

    def _fitting(self, tree: Tree[RequestPlan], wanted: list[Node], depth: int) -> list[Node]:
        """Return the nodes that fit, with their ancestors, into the context and the request's pages."""
        context, nodes = tree.plan.context, list[Node]()
        if context.computed + 1 + depth >= self.network.context:
            return nodes
        capacity = len(context.request.pages) * self.page_size - context.computed - 1
        running: set[Node] = set()
        for node in wanted:
            longer = running | set(path_to(node))
            if len(longer) <= capacity:
                running = longer
                nodes.append(node)
        return nodes

    def _run(self, expanded: list[tuple[Tree[RequestPlan], list[Node]]], states: Tensor) -> Tensor:
        """Run these nodes and their ancestors in one pass; return the states of the nodes alone: [expanded, S]."""
        builder = BatchBuilder()
        parent_states: list[int] = []  # row of the state that each token reads
        rows: list[int] = []
        for tree, nodes in expanded:
            self._add(builder, tree, nodes, parent_states, rows, len(states))
        features = self.network.feedback_features(states[parent_states]) if self.network.features else None
        batch, *_ = self.passes.upload(builder, 0 if features is None else features.shape[1])
        found = self.passes.run(batch, features)
        assert found is not None
        return found[rows]

    def _add(
        self,
        builder: BatchBuilder,
        tree: Tree[RequestPlan],
        nodes: list[Node],
        parent_states: list[int],
        rows: list[int],
        known_states: int,
    ) -> None:
        """Add a tree's row to the batch, and number the states that its nodes will have."""
        running = {ancestor for node in nodes for ancestor in path_to(node)}
        context, begin = tree.plan.context, len(builder.tokens)
        first = context.computed + 1 - tree.plan.shift  # as the network counts positions
        order = [node for node in tree.nodes if node in running]  # parents first
        index: dict[Node | None, int] = {node: begin + offset for offset, node in enumerate(order)}
        for node in order:
            assert node.parent is not None
            parent_states.append(node.parent.state)
        positions = range(context.computed + 1, context.computed + 1 + len(order))
        builder.add(
            [node.token for node in order],
            [first + node.depth for node in order],
            slots_of(context.request.pages, positions, self.page_size),
            tree.plan.pages,
            [index.get(node.parent, -1) for node in order],
        )
        for node in nodes:
            rows.append(index[node])
            node.state = known_states + len(rows) - 1


def path_to(node: Node) -> list[Node]:
    """Return the node and its ancestors, without the root."""
    path: list[Node] = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path
