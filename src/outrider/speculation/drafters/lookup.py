"""Shared parts of drafters that copy from texts: an n-gram index, and acceptance rates by the length of a match."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from ...multi_step.state import DecodeState, HostSteps, StepDrafter
from ...request import Request, Row
from ...types import Draft
from ..adaptive.acceptance_model import Rates
from ..interface import DraftBatch, DraftContext, Needs
from .tree_builder import best_first

if TYPE_CHECKING:
    from ...multi_step.progress import RowProgress

TOKEN_BITS = 24  # more than any vocabulary needs; the key of an n-gram is its tokens side by side, so none collide
MAX_MATCH = 24  # tokens; a longer match does not raise the acceptance rate further
RESUME_WINDOW = 32  # tokens after the end of the last accepted copy in which a match is preferred
NO_POSITION = -1

RequestState = TypeVar("RequestState")
NodeState = TypeVar("NodeState")


class LookupOptions(Protocol):
    @property
    def least(self) -> float | None: ...

    @property
    def branches(self) -> int: ...


def min_path_acceptance(options: LookupOptions) -> float:
    """Return the acceptance rate at which a path ends; it is lower for trees, whose paths share the work of a step."""
    return options.least if options.least is not None else 0.1 if options.branches == 1 else 0.02


class LookupDrafter(ABC, Generic[RequestState]):
    """A Proposer that reads only texts. It creates the state of a request with the first draft for it."""

    def __init__(self, width: int, trees: bool = False, on_host: bool = True) -> None:
        """on_host: multi-step runs look chains up on the host; else a subclass does it on the device."""
        self.needs = Needs(width=width, trees=trees, multi_step=not trees, on_host=on_host and not trees)
        self.states: dict[Request, RequestState] = {}

    @abstractmethod
    def new_state(self, request: Request) -> RequestState: ...

    @abstractmethod
    def draft(self, state: RequestState, context: DraftContext, width: int) -> Draft: ...

    def propose(self, contexts: Sequence[DraftContext], last: Tensor, hidden: Tensor | None) -> DraftBatch:
        drafts = [
            self.draft_request(context) if context.num_draft_tokens and context.new_tokens else Draft([])
            for context in contexts
        ]
        return DraftBatch(
            [draft.tokens for draft in drafts],
            parents=[draft.parents or [] for draft in drafts] if self.needs.trees else None,
            confidence=[draft.confidence or [] for draft in drafts],
        )

    def draft_request(self, context: DraftContext) -> Draft:
        state = self.states.get(context.request)
        if state is None:
            state = self.states[context.request] = self.new_state(context.request)
        return self.draft(state, context, min(context.num_draft_tokens, self.needs.width))

    def accept(self, requests: Sequence[Request], accepted: Sequence[int]) -> None:
        """Do nothing: only accepted text is ever read, so there is nothing to rewind."""

    def ready(self, requests: Sequence[Request], computed: Sequence[int] | None = None) -> bool:
        return True

    def read(self, contexts: Sequence[DraftContext], hidden: Tensor | None) -> None:
        """Do nothing: a lookup reads what it lacks with the next draft."""

    def bind(self, state: DecodeState) -> StepDrafter | HostSteps:
        return LookupSteps(self, state.width)

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.states.pop(request, None)


class LookupSteps:
    """A HostSteps: the lookups of a multi-step run."""

    logits: Tensor | None = None

    def __init__(self, drafter: LookupDrafter[RequestState], width: int) -> None:
        self.lookups, self.width = drafter, width

    def begin(self, rows: Sequence[Row]) -> None:
        """Do nothing: `draft_rows` has the texts."""

    def finish(self, requests: Sequence[Request], computed: Sequence[int]) -> None:
        """Do nothing: the state is the host's."""

    def forget(self, requests: Sequence[Request]) -> None:
        self.lookups.release(requests)

    def draft_rows(self, texts: Sequence[RowProgress]) -> list[list[int]]:
        return [self._draft_row(text) if text.remaining > 0 else [] for text in texts]

    def _draft_row(self, text: RowProgress) -> list[int]:
        request, length = text.request, text.request.length + len(text.tokens)
        width = min(self.width, request.max_length - length - 1)
        if width < 1:
            return []
        return self.lookups.draft_request(DraftContext(request, length - 1, length - 1, text.tokens, width, 0)).tokens


class NgramIndex:
    """A growing text, and the position after the latest occurrence of each of its n-grams.

    With `all_positions` it also links earlier occurrences. Each token is read once.
    """

    def __init__(self, shortest: int, longest: int, all_positions: bool = False) -> None:
        self.shortest = shortest
        self.longest = longest
        self.text: list[int] = []
        self.suffix_keys: list[int] = []  # keys of the n-grams that end the text, shortest first
        self.positions: dict[int, int] = {}  # n-gram -> position after its latest occurrence; 100 to 300 bytes a token
        # By n-gram size, for each position: where the n-gram before it occurred the time before; else NO_POSITION.
        self.previous: list[list[int]] = [[] for _ in range(shortest, longest + 1)] if all_positions else []

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        positions, keys, first, rest = self.positions, self.suffix_keys, self.shortest - 1, self.longest - 1
        for position, token in enumerate(tokens, len(self.text)):
            # An n-gram is indexed when a token follows it: until then it is the one to look up.
            for links in self.previous:
                links.append(NO_POSITION)
            for links, key in zip(self.previous, keys[first:], strict=False):
                links[-1] = positions.get(key, NO_POSITION)
            for key in keys[first:]:
                positions[key] = position
            last = token + 1  # never 0, so that n-grams of different lengths have different keys
            keys = [last, *[key << TOKEN_BITS | last for key in keys[:rest]]]
        self.text.extend(tokens)
        self.suffix_keys = keys

    def match(self, resume: int | None) -> tuple[int, int] | None:
        """Return the position to copy from, and how many tokens before it match the end of the text.

        The longest n-gram wins. Among its occurrences it is the one at or soon after `resume`, the position where the
        last copy ended; else the latest.
        """
        text, position, size = self.text, None, self.shortest - 1
        for key in self.suffix_keys[size:]:
            known = self.positions.get(key)
            if known is None:
                break
            position = known
            size += 1
        if position is None:
            return None
        if resume is not None and position != resume:
            position = self._match_after(resume, size) or position
        return position, match_length(text, position, text, size)

    def other_matches(self, first: int, limit: int) -> list[tuple[int, int]]:
        """Return up to `limit` more positions than `first`, each with its match length: longest, then latest first."""
        text, lengths = self.text, {first: 0}
        keys = self.suffix_keys[self.shortest - 1 :]
        for size, links, key in reversed(
            [*zip(range(self.shortest, self.longest + 1), self.previous, keys, strict=False)]
        ):
            position, steps = self.positions.get(key, NO_POSITION), 0
            while position != NO_POSITION and steps < limit and len(lengths) <= limit:
                if position not in lengths:
                    lengths[position] = match_length(text, position, text, size)
                position, steps = links[position], steps + 1
        del lengths[first]
        return sorted(lengths.items(), key=lambda item: -item[1])

    def _match_after(self, resume: int, size: int) -> int | None:
        """Return the first position in the window after `resume` behind the n-gram that ends the text."""
        text = self.text
        stop = min(resume + RESUME_WINDOW, len(text)) - 1
        position = max(resume, size) - 1
        while position < stop:
            try:
                position = text.index(text[-1], position, stop) + 1
            except ValueError:
                return None
            if text[position - size : position] == text[-size:]:
                return position
        return None


def match_length(text: Sequence[int], position: int, other: Sequence[int], known: int) -> int:
    """Return how many tokens before `position` equal the last ones of `other`, up to MAX_MATCH; `known`: a minimum."""
    limit = min(position, len(other), MAX_MATCH)
    while known < limit and text[position - known - 1] == other[-known - 1]:
        known += 1
    return known


def rates_by_match_length() -> list[float]:
    """Return the prior acceptance rate of a copied token by match length; measured on SmolLM2's code, chats, sums."""
    return [0.1] + [1 - 0.8 * count**-0.8 for count in range(1, MAX_MATCH + 1)]


def growing_matches(width: int) -> list[int]:
    """Return match lengths: each accepted copied token makes the match of the next one longer, up to MAX_MATCH."""
    return [min(count, MAX_MATCH) for count in range(MAX_MATCH + width + 1)]


class EvidenceTree(NamedTuple, Generic[NodeState]):
    """A draft tree, one entry a token in each list."""

    tokens: list[int]
    parents: list[int]
    evidence: list[int]  # keys of the acceptance rates
    states: list[NodeState]


def grow_tree(
    rates: Rates,
    root: NodeState,
    children: Callable[[NodeState], Iterable[tuple[int, int, NodeState]]],
    width: int,
    depth: int,
) -> EvidenceTree[NodeState]:
    """Grow the tree of the most probable tokens by the prior rates.

    `children` returns the tokens that may follow a state, in the order in which verification tries them: the token,
    the key of its acceptance rate, and its state.
    """

    def expand(parent_depth: int, state: NodeState) -> Iterator[tuple[tuple[int, int, int, NodeState], float]]:
        remaining = probability = 1.0
        for token, key, child in children(state) if parent_depth < depth else ():
            probability = min(remaining * rates.prior[key], probability)  # never above that of an earlier sibling
            remaining -= probability
            yield (parent_depth + 1, token, key, child), probability

    grown = best_first(expand(0, root), lambda item: expand(item[0], item[3]), width)
    tree: EvidenceTree[NodeState] = EvidenceTree([], grown.parents, [], [])
    for _, token, key, state in grown.items:
        tree.tokens.append(token)
        tree.evidence.append(key)
        tree.states.append(state)
    return tree


class AcceptanceTracker:
    """The last draft of a request, and the acceptance rates that its drafts have had.

    It compares the draft with the text that followed. So it also learns from tokens that were cut before verification.
    """

    __slots__ = ("evidence", "parents", "rates", "start", "tokens")

    def __init__(self) -> None:
        self.start = 0
        self.tokens: Sequence[int] = ()
        self.evidence: Sequence[int] = ()
        self.parents: Sequence[int] | None = None
        self.rates: Rates | None = None  # acceptance rates of this request by evidence

    def start_draft(
        self,
        shared: Rates,
        start: int,
        tokens: list[int],
        evidence: Sequence[int],
        least: float,
        parents: list[int] | None = None,
    ) -> Draft:
        """Keep a draft for position `start`; return the part of it that is worth verifying, with its confidence.

        The rate of a key is that of tokens which verification tries: it tries a sibling if the ones before it were
        rejected. A path ends where the probability that all of it is accepted falls below `least`. That probability
        comes from the prior, so the draft does not depend on other requests. The confidence is learned.
        """
        self.start, self.tokens, self.evidence, self.parents = start, tokens, evidence, parents
        rates = self._request_rates(shared)
        confidence: list[float] = []
        # One entry for the text's end, then one a token. By the prior: the probability of its path, the probability
        # that all children so far are rejected, and that of its last child. As learned: that all are rejected.
        path, rejected, last_child, rejected_learned = [1.0], [1.0], [1.0], [1.0]
        for index, key in enumerate(evidence):
            parent = index if parents is None else parents[index] + 1
            prior = min(rejected[parent] * shared.prior[key], last_child[parent])
            if path[parent] * prior < least:
                break
            learned = rejected_learned[parent] * rates.rate(key)
            last_child[parent] = prior
            rejected[parent] -= prior
            rejected_learned[parent] -= learned
            path.append(path[parent] * prior)
            for values in (rejected, rejected_learned, last_child):
                values.append(1.0)
            confidence.append(learned)
        count = len(confidence)
        return Draft(tokens[:count], None if parents is None else parents[:count], confidence=confidence)

    def _request_rates(self, shared: Rates) -> Rates:
        if self.rates is None:
            self.rates = Rates(shared.prior, shared)
        return self.rates

    def observe(self, shared: Rates, text: Sequence[int]) -> list[int]:
        """Learn from the text that followed the draft; return the indices of the draft tokens that it contains."""
        path: list[int] = []
        following = text[self.start : self.start + len(self.tokens)]
        if self.parents is None:
            for index, token in enumerate(following):
                if not self._observe_token(shared, index, token):
                    break
                path.append(index)
        else:
            children: dict[int, list[int]] = {}
            for index, parent in enumerate(self.parents):
                children.setdefault(parent, []).append(index)
            last = -1
            for token in following:
                tried = children.get(last, ())
                last = next((index for index in tried if self._observe_token(shared, index, token)), -1)
                if last == -1:
                    break
                path.append(last)
        self.tokens = self.evidence = ()
        return path

    def _observe_token(self, shared: Rates, index: int, token: int) -> bool:
        """Learn whether the draft token at `index` is the token of the text."""
        accepted = self.tokens[index] == token
        self._request_rates(shared).learn(self.evidence[index], accepted)
        return accepted
