"""One step on one device: gather, run the model, verify, propose."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from .cache.pages import Pages, slots_of
from .device import Buffer, Device
from .device.graphs import Graphs, padded
from .input_batch import Shape, collect, make_batch, pad, widened
from .kernels import Batch
from .models import Model
from .multi_step.loop import MultiStepRunner
from .multi_step.planner import widths
from .request import Request, Row, RowResult, Step
from .sampler import Sampler, SamplerInput
from .speculation.manager import RowOutcome, SpeculationManager
from .types import Draft, SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class Chosen:
    """What the rows that asked for tokens got, each token chosen at a place of its draft."""

    tokens: list[list[int]]
    places: list[list[int]]  # 0: after the row's own tokens; n: after its drafted token n - 1
    logprobs: dict[int, list[TokenLogprobs]]


@dataclass(frozen=True)
class Spent:
    """Seconds of a step: the target's pass with the choice of what stays of its drafts, and the next drafts."""

    target: float = 0.0
    draft: float = 0.0


MOST_SHAPES = 256  # of batches that are kept
LARGEST_REHEARSAL = 256  # tokens of such a step, whatever the steps to come may have


class Runner:
    def __init__(
        self,
        model: Model,
        device: Device,
        pages: Pages,
        spec_manager: SpeculationManager,
        graphs: Graphs,
        context: int,
        step_tokens: int,
    ) -> None:
        self.model, self.ops, self.device, self.pages, self.page_size = model, model.ops, device, pages, pages.page_size
        self.spec_manager, self.graphs, self.step_tokens = (
            spec_manager,
            graphs,
            max(padded(step_tokens), LARGEST_REHEARSAL),
        )
        self.sampler = Sampler(self.ops, device, model.config.vocabulary)
        self.multi_step = MultiStepRunner(model, device, pages, spec_manager, graphs, context)
        # Decoding asks for the same few shapes step after step: the same tensors serve, filled anew.
        self._batches: dict[Shape, tuple[Buffer, Batch]] = {}
        self._recorded: Shape | None = None  # the padded shape of the last batch, if it is one to be recorded
        self.spent = Spent()  # by the last step that was no flight
        self._rooms: dict[Hashable, Tensor] = {}  # where records leave hidden and tapped states

    def step(self, step: Step) -> list[RowResult]:
        if step.decode_steps > 1 and (results := self.multi_step.run(step)) is not None:
            return results
        rows = step.rows
        asking = [index for index, row in enumerate(rows) if row.sample]
        taps = self.spec_manager.aux_layers(rows)
        started = time.perf_counter()
        batch, inputs = self.gather(rows), self.sampler.prepare([rows[index] for index in asking])
        hidden, states = self._forward(batch, taps)  # [T, E] each
        begins = list(accumulate((row.size for row in rows[:-1]), initial=0))  # where each row's first token stands
        prompts = {i: self._prompt_logprobs(hidden, row, begins[i]) for i, row in enumerate(rows) if owes(row)}
        chosen = self._choose(hidden, rows, begins, inputs, asking) if asking else Chosen([], [], {})
        outcomes = self._close_up(rows, begins, asking, chosen, states)
        verified = time.perf_counter() - started
        self.spec_manager.observe(rows, verified)
        proposals = self.spec_manager.propose(outcomes, dict(zip(taps, states, strict=True)))
        self.spent = Spent(verified, time.perf_counter() - started - verified)
        return [
            RowResult(
                outcome.tokens,
                chosen.logprobs.get(index, []),
                prompts.get(index, []),
                proposal.draft,
                proposal.dropped,
            )
            for index, (outcome, proposal) in enumerate(zip(outcomes, proposals, strict=True))
        ]

    def warm_up(self, method: str, rounds: int) -> None:
        """Learn what steps with drafted tokens cost, and drafting them; the pages are still nobody's."""
        most = min(self.spec_manager.methods[method].needs.width, self.pages.count * self.page_size - 2)
        drafts = widths(most)
        request = Request("rehearsal", [0], SamplingParams(temperature=0), 0, max_length=most + 4)
        request.pages = list(range(-(-(most + 2) // self.page_size)))
        self.step(Step([Row(request, 0, [0, 0], sample=True)]))  # for warming up: prompts are no measure
        if rounds > 1 and self.spec_manager.can_multi_step(method):
            row = Row(request, 1, [0], sample=True)
            for width in drafts:
                self.multi_step.pilot.time(method, 1, width, self.multi_step.warm_up(method, row, width))
            return
        for width in drafts:
            draft = Draft([0] * width) if width else None
            self.step(Step([Row(request, 1, [0], sample=True, draft=draft)]))
        self.spec_manager.profile()

    def profile_run(self, tokens: int, rows: int) -> None:
        """The largest steps there are: a prompt of so many tokens, and so many rows that each ask for a token."""
        request = Request("rehearsal", [0] * tokens, SamplingParams(temperature=0), 0, max_length=tokens + 1)
        request.pages = list(range(-(-tokens // self.page_size)))
        self.step(Step([Row(request, 0, request.prompt, sample=True)]))
        single = Request("rehearsal", [0], SamplingParams(temperature=0), 0, max_length=2, pages=[0])
        self.step(Step([Row(single, 0, [0], sample=True)] * rows))

    def _forward(self, batch: Batch, taps: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
        """The model's pass, replayed where the batch has a shape that is kept for that."""
        if self._recorded is None:
            return self.model.forward(batch, self.pages.layers, taps)
        # All records leave their states in the same memory, or each of them would hold some of its own.
        hidden, *states = (self._room(name)[: batch.tokens.shape[0]] for name in ("hidden", *taps))

        def run() -> None:
            found, tapped = self.model.forward(batch, self.pages.layers, taps)
            for room, each in zip((hidden, *states), (found, *tapped), strict=True):
                room.copy_(each)

        self.graphs.run(("forward", self._recorded, taps), run)
        return hidden, states

    def _room(self, name: Hashable) -> Tensor:
        """[most tokens of a step, E]: the same memory for all records of that name."""
        if name not in self._rooms:
            self._rooms[name] = self.device.zeros((self.step_tokens, self.model.config.width), torch.float32)
        return self._rooms[name]

    def gather(self, rows: list[Row]) -> Batch:
        """The tokens of all rows side by side, and where their keys and values lie. Valid until the next call."""
        parts = collect(rows, self.page_size)
        shape, self._recorded = parts.shape, None
        if self.graphs.mixed or (self.graphs.decoding and all(len(row.tokens) == 1 for row in rows)):
            shape = self._recorded = widened(shape)
        if shape not in self._batches:
            if len(self._batches) == MOST_SHAPES:
                self._batches.clear()
                self.graphs.forget()
            self._batches[shape] = make_batch(self.device, *shape)
        inputs, batch = self._batches[shape]
        inputs.fill(pad(shape, parts))
        return batch

    def _choose(
        self, hidden: Tensor, rows: list[Row], begins: list[int], inputs: SamplerInput, asking: list[int]
    ) -> Chosen:
        """Logits after each row's last own token and after its drafted ones; then what of the drafts stays."""
        count = inputs.logits.shape[0]
        if count < begins[-1] + rows[-1].size:  # else decoding asks at every token
            asked = [begins[i] + place for i in asking for place in range(len(rows[i].tokens) - 1, rows[i].size)]
            hidden = hidden[self.device.upload(asked, torch.int64)]
        self.model.logits(hidden[:count], inputs.logits)
        raw = self.sampler.process_logits(inputs)
        if inputs.verify_inputs is None:
            sampled: list[int] = self.ops.sample(inputs.logits, inputs.sampling, inputs.tokens).tolist()
            tokens, found = [[token] for token in sampled], [[0]] * len(sampled)
        else:
            tokens, found = self.spec_manager.verify(
                inputs.logits, inputs.sampling, inputs.verify_inputs, inputs.tokens
            )
        reports = self.sampler.row_logprobs(inputs, raw, tokens, found) if raw is not None else {}
        return Chosen(tokens, found, {asking[row]: report for row, report in reports.items()})

    def _close_up(
        self, rows: list[Row], begins: list[int], asking: list[int], chosen: Chosen, states: list[Tensor]
    ) -> list[RowOutcome]:
        """What each row came to. Where a tree kept a path with gaps, its keys, values and states move together."""
        outcomes = [RowOutcome(row, begin, []) for row, begin in zip(rows, begins, strict=True)]
        sources: list[int] = []  # slots
        targets: list[int] = []
        leaving: list[int] = []  # tokens of the step
        arriving: list[int] = []
        for index, tokens, path in zip(asking, chosen.tokens, chosen.places, strict=True):
            row, begin = rows[index], begins[index]
            outcomes[index] = RowOutcome(row, begin, tokens)
            if path[-1] == len(path) - 1:  # no gap
                continue
            last, pages = len(row.tokens) - 1, row.request.pages
            kept, closed = [last + place for place in path], range(last, last + len(path))
            sources += slots_of(pages, (row.start + at for at in kept), self.page_size)
            targets += slots_of(pages, (row.start + at for at in closed), self.page_size)
            leaving += [begin + at for at in kept]
            arriving += [begin + at for at in closed]
        if sources:
            upload = self.device.upload
            self.ops.copy_kv(self.pages.layers, upload(sources, torch.int32), upload(targets, torch.int32))
            there, here = upload(arriving, torch.int64), upload(leaving, torch.int64)
            for state in states:
                state[there] = state[here]
        return outcomes

    def _prompt_logprobs(self, hidden: Tensor, row: Row, begin: int) -> list[TokenLogprobs]:
        """How likely the prompt's own next tokens were after the tokens that this row ran, from `begin` on."""
        request = row.request
        count = request.params.prompt_logprobs or 0
        known = len(request.prompt_logprobs)  # from earlier chunks
        following = request.prompt[known + 1 : row.start + len(row.tokens) + 1]
        first = begin + known - row.start
        logits = self.model.logits(hidden[first : first + len(following)])
        return self.sampler.logprobs(logits, following, [count] * len(following))


def owes(row: Row) -> bool:
    """Whether this row runs prompt tokens whose successors' log-probabilities are asked for and not yet known."""
    request = row.request
    if request.params.prompt_logprobs is None:
        return False
    known, end = len(request.prompt_logprobs), row.start + len(row.tokens)
    return row.start <= known < min(end, len(request.prompt) - 1)
