"""Run one step on one device: gather, forward, verify, draft."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from .adapters import Adapter
from .cache.pages import Pages, slots_of
from .device import Buffer, Device
from .device.graphs import MAX_TOKENS, Graphs
from .input_batch import BatchBuilder, Shape, collect, make_batch, padded_shape, slot_of
from .kernels import Batch
from .models import Model
from .multi_step.loop import MultiStepRunner
from .multi_step.planner import run_widths
from .request import Request, Row, RowResult, Step
from .sampler import Sampler, SamplerInput
from .single_row import SingleRowStep
from .speculation.adaptive.latency_model import least_seconds
from .speculation.manager import AuxStates, RowOutcome, SpeculationManager
from .types import Draft, SamplingParams, TokenLogprobs

CONTEXT = 1024  # tokens of the context at which a step is measured at start-up: enough to stand out from noise
MAX_SHAPES = 256  # batch shapes whose buffers are kept; beyond that all are freed


@dataclass(frozen=True)
class SampledTokens:
    """The new tokens of the rows that sample, and the indices at which they were sampled."""

    tokens: list[list[int]]
    indices: list[list[int]]  # 0: after the row's own tokens; n: after its draft token n - 1
    logprobs: dict[int, list[TokenLogprobs]]


@dataclass(frozen=True)
class TargetResult:
    """The rows of a step after verification, and what their drafters and outputs need; by row of the step."""

    outcomes: list[RowOutcome]
    states: AuxStates
    logprobs: dict[int, list[TokenLogprobs]]
    prompts: dict[int, list[TokenLogprobs]]  # of prompt tokens
    recorded: bool = False  # its kernel calls were recorded, which takes 1 to 5 ms more


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step: the target's pass with verification, and the next drafts."""

    target: float = 0.0
    draft: float = 0.0


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
        self.spec_manager, self.graphs = spec_manager, graphs
        self.graph_tokens = max(1 << (step_tokens - 1).bit_length(), MAX_TOKENS)  # of the largest captured step
        needs = [proposer.needs for proposer in spec_manager.methods.values()]
        self.aux_layers = tuple(sorted({layer for need in needs for layer in need.aux_layers}))  # of all drafters
        self.sampler = Sampler(self.ops, device, model.config.vocabulary)
        self.single_row = SingleRowStep(model, device, pages, spec_manager.verifier)
        self.multi_step = MultiStepRunner(model, device, pages, spec_manager, graphs, context, self)
        # Decode steps have few different shapes, so their tensors are reused.
        self.batches: dict[Shape, tuple[Buffer, Batch]] = {}
        self._graph_shape: Shape | None = None  # padded shape of the last batch, if it is captured
        self.graph_outputs: dict[Hashable, Tensor] = {}  # hidden states that graphs write
        self.spent = StepSeconds()  # by the last step that was not a multi-step run

    def step(self, step: Step) -> list[RowResult]:
        """Run a step: several decode steps without the host if the drafters can, else one."""
        self.pages.assign(step.window_pages)
        if step.decode_steps > 1 and (results := self.multi_step.run(step)) is not None:
            return results
        started, rows = time.perf_counter(), step.rows
        self.spec_manager.begin(rows)
        result = self._run_target(rows, self.spec_manager.aux_layers(rows))
        verified = time.perf_counter() - started
        if not result.recorded:
            self.spec_manager.observe(rows, verified)
        proposals = self.spec_manager.propose(result.outcomes, result.states)
        self.spent = StepSeconds(verified, time.perf_counter() - started - verified)
        return [
            RowResult(
                row.tokens, result.logprobs.get(i, []), result.prompts.get(i, []), proposal.draft, proposal.dropped
            )
            for i, (row, proposal) in enumerate(zip(result.outcomes, proposals, strict=True))
        ]

    def _run_target(self, rows: list[Row], aux_layers: tuple[int, ...]) -> TargetResult:
        """Run the target over all rows; sample, or verify their drafts."""
        if (
            len(rows) == 1
            and not self.graphs.decoding
            and (single := self.single_row.run(rows[0], aux_layers)) is not None
        ):
            states = [] if single.hidden is None else [single.hidden]
            outcomes = [RowOutcome(rows[0], 0, single.tokens)]
            if single.indices[-1] >= len(single.indices):  # the accepted path of a tree has gaps
                self._compact(rows, [0], [0], SampledTokens([single.tokens], [single.indices], {}), states)
            return TargetResult(outcomes, AuxStates(aux_layers, states), {}, {}, single.recorded)
        sampling = [index for index, row in enumerate(rows) if row.sample]
        hidden, states = self.forward(self.gather(rows), aux_layers)  # [T, E] each
        inputs = self.sampler.prepare([rows[index] for index in sampling])
        begins = list(accumulate((row.size for row in rows[:-1]), initial=0))  # index of each row's first token
        prompts = {
            i: self._prompt_logprobs(hidden, row, begins[i]) for i, row in enumerate(rows) if needs_prompt_logprobs(row)
        }
        chosen = (
            self._sample_or_verify(hidden, rows, begins, inputs, sampling) if sampling else SampledTokens([], [], {})
        )
        outcomes = self._compact(rows, begins, sampling, chosen, states)
        return TargetResult(outcomes, AuxStates(aux_layers, states), chosen.logprobs, prompts)

    def gather(self, rows: list[Row]) -> Batch:
        """Return the tokens of all rows side by side, and the slots of their KV. Valid until the next call."""
        builder = collect(rows, self.page_size, self.pages.recurrent is not None)
        shape = builder.shape
        self._graph_shape = self._captured_shape(shape, rows)
        if self._graph_shape is None and self.graphs.frozen:
            return builder.upload(self.device)[0]  # shapes of long prompts rarely come again
        shape = self._graph_shape or shape
        inputs, batch = self._batch(shape)
        inputs.fill(builder.pack(shape, self.device.alignment))
        return batch

    def gather_run(self, rows: list[Row], count: int, width: int) -> Batch | None:
        """Return a captured batch of `count` rows with `width` + 1 tokens each, for a multi-step run; None: no graph.

        The run fills tokens, positions, slots and states in each step. Rows that pad come last.
        """
        builder, size = BatchBuilder(), width + 1
        adapted = any(row.request.adapter is not None for row in rows)
        for row in [*rows, *[None] * (count - len(rows))]:
            pages = [] if row is None else row.request.pages
            adapters = [-1 if row is None else slot_of(row.request)] * size if adapted else ()
            states = () if self.pages.recurrent is None else (0, 0, 0)
            builder.add([0] * size, [0] * size, [-1] * size, pages, (), adapters, states)
        self._graph_shape = self._captured_shape(builder.shape, rows)
        if self._graph_shape is None:
            return None
        inputs, batch = self._batch(self._graph_shape)
        inputs.fill(builder.pack(self._graph_shape, self.device.alignment))
        return batch

    def _captured_shape(self, shape: Shape, rows: list[Row]) -> Shape | None:
        """Return the shape of the graph that runs this batch; None: it runs without one."""
        decodes = all(len(row.tokens) == 1 for row in rows)
        if not (self.graphs.mixed or (self.graphs.decoding and decodes)):
            return None
        found = padded_shape(shape)
        if found[0] > max(MAX_TOKENS, self.graph_tokens if decodes else 0):
            return None
        return found if self.graphs.is_usable(("forward", found)) else None

    def _batch(self, shape: Shape) -> tuple[Buffer, Batch]:
        """Return the buffer and the tensors of a shape, which later steps reuse."""
        if shape not in self.batches:
            if len(self.batches) == MAX_SHAPES:
                self.batches.clear()
                self.graphs.forget()
            self.batches[shape] = make_batch(self.device, shape, self.device.alignment)
        return self.batches[shape]

    def forward(self, batch: Batch, aux_layers: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
        """Run the target over the batch, by replay if its shape is captured."""
        if self._graph_shape is None:
            return self.model.forward(batch, self.pages.storages, aux_layers)
        self.graphs.run(("forward", self._graph_shape), lambda: self._forward_into_outputs(batch))
        outputs = [self._graph_output(name)[: batch.tokens.shape[0]] for name in ("hidden", *aux_layers)]
        return outputs[0], outputs[1:]

    def _forward_into_outputs(self, batch: Batch) -> None:
        """Run the target. All graphs write all states to the same memory, to save a copy for each of them."""
        hidden, states = self.model.forward(batch, self.pages.storages, self.aux_layers)
        for name, state in zip(("hidden", *self.aux_layers), (hidden, *states), strict=True):
            self._graph_output(name)[: state.shape[0]].copy_(state)

    def _graph_output(self, name: Hashable) -> Tensor:
        """Return the memory [graph_tokens, E] that all graphs share for this output."""
        if name not in self.graph_outputs:
            shape = self.graph_tokens, self.model.config.width
            self.graph_outputs[name] = self.device.zeros(shape, torch.float32)
        return self.graph_outputs[name]

    def _sample_or_verify(
        self, hidden: Tensor, rows: list[Row], begins: list[int], inputs: SamplerInput, sampling: list[int]
    ) -> SampledTokens:
        """Compute the logits after each row's last text token and its draft tokens; sample, or verify the drafts."""
        count = inputs.logits.shape[0]
        if count < begins[-1] + rows[-1].size:  # else logits of all tokens are needed, as in decoding
            indices = [begins[i] + offset for i in sampling for offset in range(len(rows[i].tokens) - 1, rows[i].size)]
            hidden = hidden[self.device.upload(indices, torch.int64)]
        self.model.logits(hidden[:count], inputs.logits)
        raw = self.sampler.process_logits(inputs)
        if inputs.verify_inputs is None:
            sampled: list[int] = self.ops.sample(inputs.logits, inputs.sampling, inputs.tokens).tolist()
            tokens, chosen = [[token] for token in sampled], [[0]] * len(sampled)
        else:
            output = self.spec_manager.verifier.verify(
                inputs.logits, inputs.sampling, inputs.verify_inputs, inputs.tokens
            )
            counts: list[int] = output.counts.tolist()
            tokens = [row[:count] for row, count in zip(output.tokens.tolist(), counts, strict=True)]
            chosen = [row[:count] for row, count in zip(output.rows.tolist(), counts, strict=True)]
            if output.nonfinite is not None and inputs.verify_inputs.logits is not None:
                requests = [rows[index].request for index in sampling]
                self.spec_manager.count_nonfinite(requests, output.nonfinite.tolist())
        logprobs = self.sampler.row_logprobs(inputs, raw, tokens, chosen) if raw is not None else {}
        return SampledTokens(tokens, chosen, {sampling[row]: report for row, report in logprobs.items()})

    def _compact(
        self, rows: list[Row], begins: list[int], sampling: list[int], chosen: SampledTokens, states: list[Tensor]
    ) -> list[RowOutcome]:
        """Return the outcome of each row. If the accepted path of a tree has gaps, move its KV and states together."""
        outcomes = [RowOutcome(row, begin, []) for row, begin in zip(rows, begins, strict=True)]
        sources: list[int] = []  # slots
        targets: list[int] = []
        source_lines: list[int] = []  # of inputs that recurrent layers keep
        target_lines: list[int] = []
        source_rows: list[int] = []  # of the hidden states
        target_rows: list[int] = []
        for index, tokens, path in zip(sampling, chosen.tokens, chosen.indices, strict=True):
            row, begin = rows[index], begins[index]
            outcomes[index] = RowOutcome(row, begin, tokens)
            if path[-1] == len(path) - 1:  # no gap
                continue
            last, pages = len(row.tokens) - 1, row.request.pages
            accepted, compact = [last + index for index in path], range(last, last + len(path))
            sources += slots_of(pages, (row.start + offset for offset in accepted), self.page_size)
            targets += slots_of(pages, (row.start + offset for offset in compact), self.page_size)
            source_lines += self._lines(row, accepted)
            target_lines += self._lines(row, compact)
            source_rows += [begin + offset for offset in accepted]
            target_rows += [begin + offset for offset in compact]
        if sources:
            upload = self.device.upload
            self._move(sources, targets, source_lines, target_lines)
            to_rows, from_rows = upload(target_rows, torch.int64), upload(source_rows, torch.int64)
            for state in states:
                state[to_rows] = state[from_rows]
        return outcomes

    def _copy_kv(self, sources: Tensor, targets: Tensor) -> None:
        """Copy keys and values of all layers between slots, in order."""
        window_map, layers = self.pages.window_map, self.pages.layers
        if full := [layer for layer in layers if layer.window_map is None]:
            self.ops.copy_kv(full, sources, targets)
        if window_map is not None:
            windowed = [layer for layer in layers if layer.window_map is not None]
            moves = window_map.translate_slots(sources), window_map.translate_slots(targets)
            self.ops.copy_kv(windowed, *moves)

    def _move(self, sources: list[int], targets: list[int], source_lines: list[int], target_lines: list[int]) -> None:
        """Copy the KV of slots, and lines of inputs that recurrent layers keep."""
        upload = self.device.upload
        self._copy_kv(upload(sources, torch.int32), upload(targets, torch.int32))
        if source_lines:
            moves = upload(source_lines, torch.int32), upload(target_lines, torch.int32)
            self.ops.copy_inputs(self.pages.state_layers, *moves)

    def warm_up_moves(self) -> None:
        """Compile the kernels that move what an accepted path of a tree keeps: copy a slot and a line to themselves."""
        self._move([0], [0], *([[0], [0]] if self.pages.recurrent is not None else [[], []]))

    def _lines(self, row: Row, offsets: Iterable[int]) -> list[int]:
        """Return the lines in which recurrent layers keep the inputs of these tokens of a row."""
        shape = self.pages.recurrent
        if shape is None:
            return []
        return [row.states[1] * shape.lines + (row.start + offset) % shape.lines for offset in offsets]

    def _prompt_logprobs(self, hidden: Tensor, row: Row, begin: int) -> list[TokenLogprobs]:
        """Return the logprobs of the prompt tokens after those of this row, whose first is at index `begin`."""
        request = row.request
        count = request.params.prompt_logprobs or 0
        known = len(request.prompt_logprobs)  # from earlier chunks
        following = request.prompt[known + 1 : row.start + len(row.tokens) + 1]
        first = begin + known - row.start
        logits = self.model.logits(hidden[first : first + len(following)])
        return self.sampler.logprobs(logits, following, [count] * len(following))

    # ---- before the first request: no page is in use ----

    def capture(self, shape: Shape) -> None:
        """Capture steps of a padded shape."""
        shape = shape._replace(has_states=self.pages.recurrent is not None)
        inputs, batch = self._batch(shape)
        inputs.fill(BatchBuilder().pack(shape, self.device.alignment))
        similar = "forward", shape._replace(pages=0)  # few kernels depend on the width of page tables
        self.graphs.capture(("forward", shape), lambda: self._forward_into_outputs(batch), similar)

    def run_padding(self, shape: Shape, prefix: int = 0) -> None:
        """Run a step of this shape without a request, to compile its kernels. prefix: as in Batch."""
        shape = shape._replace(has_states=self.pages.recurrent is not None)
        inputs, batch = make_batch(self.device, shape, self.device.alignment)
        inputs.fill(BatchBuilder().pack(shape, self.device.alignment))
        self.model.forward(replace(batch, prefix=prefix), self.pages.storages, self.aux_layers)

    def warm_up(self, method: str, decode_steps: int) -> None:
        """Measure the latency of steps with drafts of this method, and of drafting."""
        positions = min(self.pages.count * self.page_size, self.multi_step.context)
        most = min(self.spec_manager.methods[method].needs.width, positions - 2)
        if most < 1:
            return  # no draft fits into the context
        request = Request("warm-up", [0], SamplingParams(temperature=0), 0, max_length=most + 4)
        request.pages = list(range(-(-(most + 2) // self.page_size)))
        self.step(Step([Row(request, 0, [0, 0], sample=True)]))  # compiles kernels; prompts are not measured
        if decode_steps > 1 and self.spec_manager.can_multi_step(method):
            if self.graphs.frozen:
                return  # measured in WarmUp
            row, planner = Row(request, 1, [0], sample=True), self.multi_step.planner
            for width in run_widths(most):
                name = method if width or not planner.can_miss_runs(method) else ""
                planner.observe_latency(method, 1, width, self.multi_step.warm_up(name, row, width))
            return
        # Different tokens: rows of the same token would choose the same experts, and cost less than others.
        tokens = [(1 + index) % self.model.config.vocabulary for index in range(most)]

        def drafted(width: int) -> float:
            draft = Draft(tokens[:width]) if width else None
            return self._target_seconds(Row(request, 1, [0], sample=True, draft=draft))

        latency = self.spec_manager.controller.latency
        latency.begin(least_seconds(drafted, run_widths(most)))
        latency.context_cost = self._context_cost(min(CONTEXT, positions - 1))
        self.spec_manager.profile(positions)

    def _context_cost(self, context: int) -> float:
        """Return what each token of the context adds to a step, in proportion to a step with an empty context."""
        request = Request("warm-up", [0], SamplingParams(temperature=0), 0, max_length=context + 1)
        request.pages = list(range(-(-(context + 1) // self.page_size)))

        def after(start: int) -> float:
            for layer in self.pages.state_layers:
                layer.lengths[request.state_slot] = start  # as if the states had read the context
            return self._target_seconds(Row(request, start, [0], sample=True))

        seconds = least_seconds(after, (0, context))
        return max(seconds[context] / seconds[0] - 1, 0.0) / context

    def _target_seconds(self, row: Row) -> float:
        started = time.perf_counter()
        self._run_target([row], ())
        return time.perf_counter() - started

    def profile_run(self, tokens: int, rows: int) -> None:
        """Run the largest steps, to measure their memory: a prompt of `tokens`, and `rows` rows that sample a token.

        With adapters enabled these have one, which is empty: its kernels are compiled now.
        """
        adapter = None if self.model.lora is None else Adapter("profile", "", 0, {}, pinned=False, slot=0)
        request = Request(
            "profile", [0] * tokens, SamplingParams(temperature=0), 0, max_length=tokens + 1, adapter=adapter
        )
        request.pages = list(range(-(-tokens // self.page_size)))
        self.step(Step([Row(request, 0, request.prompt, sample=True)]))
        single = Request("profile", [0], SamplingParams(temperature=0), 0, max_length=2, pages=[0], adapter=adapter)
        self.step(Step([Row(single, 0, [0], sample=True)] * rows))


def needs_prompt_logprobs(row: Row) -> bool:
    """Return whether prompt logprobs are requested, and not known yet, of tokens after those that this row runs."""
    request = row.request
    if not request.wants_prompt_logprobs:
        return False
    known, end = len(request.prompt_logprobs), row.start + len(row.tokens)
    return row.start <= known < min(end, len(request.prompt) - 1)
