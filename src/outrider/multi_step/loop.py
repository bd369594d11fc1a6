"""Run several decode steps of the target one after the other, without the host between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..cache.pages import Pages
from ..device import Buffer, Device, Fence
from ..device.graphs import Graphs, padded, padded_pages
from ..input_batch import slot_of
from ..kernels import Batch, SamplingMetadata, VerifyInputs
from ..models import Model
from ..request import Request, Row, RowResult, Step
from ..speculation.manager import SpeculationManager
from ..types import DecodeStep
from .drafting import CapturedDrafting
from .planner import RunPlanner
from .processing import RunProcessing, StepProcessing
from .progress import RunOutputs, as_draft, queued_steps
from .state import DecodeState, HostSteps, StepDrafter

MAX_BUFFERS = 64  # shapes of which buffers are kept, beside those that the warm-up captured
TIMED_STEPS = 4  # steps of a run whose latency is measured
# Method, rows, width, pages in a table, whether some temperature is above 0, whether some row has an adapter.
Key = tuple[str, int, int, int, bool, bool]


@dataclass
class RunBuffers:
    """The DecodeState of runs of one shape, and the buffers that fill it."""

    state: DecodeState
    drafter: StepDrafter | HostSteps | None
    aux_layers: tuple[int, ...]
    integers: Buffer  # newest, positions, max_lengths, drafts, top_k, adapters
    floats: Buffer  # temperature, top_p, min_p
    seeds: Buffer
    tables: Buffer
    states: Buffer | None  # None: the model has no recurrent layers
    verify_inputs: VerifyInputs  # its tokens are written in each step: -1 and the draft of each row
    # [B, 1 + (W + 1) + W] int32: count, tokens, the draft that was verified; then the number of its tokens that were
    # ignored, if verification reads distributions.
    output: Tensor
    num_drafted: Tensor  # [B] int32: W
    unsampled: Tensor  # [B] uint8: 0, every row chooses a token
    requests: list[Request] = field(default_factory=list)  # requests whose floats and seeds are in the buffers
    captured: bool = False  # its graphs exist: steps have the latency of all steps to come
    kept: bool = False  # captured by the warm-up
    # By part of a step, on devices without CUDA graphs: its recording; None: it cannot be recorded.
    replays: dict[str, Any] = field(default_factory=dict)


class StepGraphs(Protocol):
    """Runs the target by the graphs of steps with the host (runner.py)."""

    def gather_run(self, rows: list[Row], count: int, width: int) -> Batch | None:
        """Return a captured batch of `count` rows with `width` + 1 tokens each; None: there is no graph."""
        ...

    def forward(self, batch: Batch, aux_layers: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]: ...


class MultiStepRunner:
    def __init__(
        self,
        model: Model,
        device: Device,
        pages: Pages,
        spec_manager: SpeculationManager,
        graphs: Graphs,
        context: int,
        step_graphs: StepGraphs,
    ) -> None:
        self.step_graphs = step_graphs
        self.processing = RunProcessing(model.ops, device, model.config.vocabulary)
        self.model, self.ops, self.device, self.pages = model, model.ops, device, pages
        self.spec_manager, self.verifier = spec_manager, spec_manager.verifier
        self.planner, self.graphs, self.context = RunPlanner(spec_manager, graphs.decoding), graphs, context
        self.eager_drafter = spec_manager.plan.eager
        self.busy = 0.0  # seconds that the device worked in all runs so far
        self.step_seconds = 0.0  # of a decode step in the last run; 0: not known
        self.buffers: dict[Key, RunBuffers] = {}
        self._hidden: dict[int, Tensor] = {}  # by floats of a token
        if graphs.decoding:
            spec_manager.use(CapturedDrafting(self))

    def run(self, step: Step) -> list[RowResult] | None:
        """Run all decode steps; None if rows have different drafters, or a drafter has to catch up."""
        requests = [row.request for row in step.rows]
        drafting = [request for request in requests if request.width]
        names = {request.method for request in drafting}
        if len(names) > 1:
            return None
        name, others = next(iter(names), ""), len(requests) - len(drafting)
        if not self.planner.ready(name, drafting):
            return None
        width = self.planner.width(name, drafting, others, step.decode_steps)
        drops = not width and self.planner.drops(name, drafting, others, step.decode_steps)
        is_plain = drops or (not width and self.planner.can_miss_runs(name))
        unverified = self.planner.unverified(name, drafting) if is_plain else None
        if is_plain:
            name = ""
        elif name and others:
            return None
        key, buffers = self.buffers_for(name, step.rows, width)
        processing = self.processing.begin(step.rows, buffers.state, step.decode_steps)
        if processing is not None and self.graphs.decoding:
            processing.batch = self.step_graphs.gather_run(step.rows, buffers.state.rows, width)
            if processing.batch is None:
                return None
        self.fill(buffers, step.rows)
        learns = self.planner.learns(name)
        waits = processing is not None and processing.masks is not None  # for the host: tells nothing of other steps
        timed = TIMED_STEPS if buffers.captured and (learns or is_plain) and not waits else 0
        queued = queued_steps(self.step_seconds)
        learn = self.planner.learn_step if learns else None
        outputs = RunOutputs(
            self.device, step.rows, step.decode_steps, buffers.output, queued, learn, None if waits else unverified
        )
        lookups = buffers.drafter if unverified is None else unverified.lookups
        try:
            fences = self._launch(buffers, key, step.decode_steps, timed, outputs, processing)
        except Exception:
            if isinstance(lookups, HostSteps):
                lookups.forget(requests)
            raise
        end = self.device.fence()
        buffers.captured = True
        listed, drafts = outputs.read(), buffers.state.drafts.tolist()
        end.wait()  # for the drafter too, whose last draft may be empty
        seconds = end.since(fences[0])
        self.busy += seconds
        self.step_seconds = seconds / len(listed)
        results = read_results(buffers, step.rows, outputs, drafts)
        if processing is not None:
            self.processing.finish(requests, [len(result.tokens) for result in results])
            results = [
                replace(result, logprobs=processing.logprobs_of(row, result)) for row, result in enumerate(results)
            ]
        if width and self.verifier.reads_drafts:
            ignored = [sum(output[row][-1] for output in listed) for row in range(len(requests))]
            self.spec_manager.count_nonfinite(requests, ignored)
        if is_plain:
            return self.planner.finish_plain(step.rows, results, fences, drops)
        return self.planner.learn(name, step.rows, results, width, fences)

    def warm_up(self, name: str, row: Row, width: int) -> list[Fence]:
        """Run a few steps over a row, three times; return the fences of the last run. The row's pages are written."""
        key, buffers = self.buffers_for(name, [row], width)
        for _ in range(3):  # to compile, to capture, to measure
            for layer in self.pages.state_layers:
                layer.lengths[row.request.state_slot] = row.start  # a run before this one has advanced the state
            self.fill(buffers, [row])
            fences = self._launch(buffers, key, TIMED_STEPS, TIMED_STEPS)
            fences[-1].wait()
        return fences

    def _launch(
        self,
        buffers: RunBuffers,
        key: Key,
        steps: int,
        timed: int,
        outputs: RunOutputs | None = None,
        processing: StepProcessing | None = None,
    ) -> list[Fence]:
        """Start `steps` steps, or as many as the texts need if `outputs` follows them.

        Return fences: at the start, and after the target and the drafter of each of the first `timed` steps.
        """
        drafter, fences = buffers.drafter, [self.device.fence()]
        if processing is not None:
            processing.drafted(buffers.state.drafts)
        for step in range(steps):
            if outputs is not None and not outputs.needs_step():
                break
            if processing is None or outputs is None:
                self._run_part(buffers, key, "target", lambda: self._target(buffers))
            else:
                self._target(buffers, processing, outputs)
            if outputs is not None:
                outputs.put(buffers.output)
            if step < timed:
                fences.append(self.device.fence())
            if drafter is not None:
                if isinstance(drafter, HostSteps):
                    self._draft_on_host(drafter, buffers.state, outputs)
                else:
                    self._run_part(buffers, key, "extend", drafter.extend)
                    if buffers.state.width:
                        self._run_part(buffers, key, "decode", drafter.decode)
                if processing is not None:
                    processing.drafted(buffers.state.drafts)
            if step < timed:
                fences.append(self.device.fence())
        return fences

    def _draft_on_host(self, drafter: HostSteps, state: DecodeState, outputs: RunOutputs | None) -> None:
        """Wait for the step that was just started, and write the drafts for the next one. outputs: None in warm-ups."""
        if outputs is None or not state.width:
            return
        outputs.read()
        tokens: list[int] = []
        for draft in drafter.draft_rows(outputs.rows):
            tokens += draft + [-1] * (state.width - len(draft))
        tokens += [-1] * (state.drafts.numel() - len(tokens))
        state.drafts.copy_(self.device.upload(tokens, torch.int32).view_as(state.drafts))

    def _run_part(self, buffers: RunBuffers, key: Key, part: str, run: Callable[[], None]) -> None:
        """Run a part of a decode step: by CUDA graphs, or by a recording, which is made when it first runs."""
        if self.graphs.decoding:
            if self.eager_drafter and part != "target":
                run()
            else:
                self.graphs.run((part, *key), run)
            return
        if part not in buffers.replays:
            changed = [buffer.tensor for buffer in (buffers.integers, buffers.states) if buffer is not None]
            before = [tensor.clone() for tensor in changed]
            buffers.replays[part] = self.ops.record(lambda _: run())
            if buffers.replays[part] is not None:
                return
            for tensor, values in zip(changed, before, strict=True):  # a part of it may have run
                tensor.copy_(values)
        (buffers.replays[part] or run)()

    # ---- one decode step, all of it on the device ----

    def _target(
        self, buffers: RunBuffers, processing: StepProcessing | None = None, outputs: RunOutputs | None = None
    ) -> None:
        """Run the newest tokens and their drafts, verify, and advance the state. outputs: of the steps before."""
        state, batch, width = buffers.state, buffers.state.batch, buffers.state.width
        tables = batch.page_tables
        positions, slots = self.ops.next_slots(
            state.positions - 1, tables, self.pages.page_size, self.context, width + 1
        )
        if buffers.drafter is None and not width:
            batch = replace(batch, tokens=state.newest, positions=positions, slots=slots)
        else:
            state.ran_positions.copy_(state.positions)
            batch.positions.copy_(positions)
            batch.slots.copy_(slots)
            torch.cat([state.newest[:, None], state.drafts.clamp(min=0)], 1, out=batch.tokens.view(-1, width + 1))
        hidden, aux_states = self._forward(buffers, batch, None if processing is None else processing.batch)
        if batch.states is not None:  # the first step may read a snapshot; the others read what the one before wrote
            batch.states[:, 0].copy_(batch.states[:, 1])
        if aux_states:
            torch.cat(aux_states, 1, out=state.hidden)
        sampling, logits = replace(state.sampling, positions=state.positions + 1), self.model.logits(hidden)
        if processing is not None and outputs is not None:
            processing.before(logits, state, outputs)
        if width:
            self._verify(buffers, logits, sampling, processing)
        else:
            self.ops.sample(logits, sampling, state.newest)
            if processing is not None:
                processing.after(state.newest[:, None], torch.ones_like(state.newest))
            state.positions.add_(1)
            if buffers.drafter is not None:
                state.last_accepted.copy_(buffers.verify_inputs.starts[:-1])  # of one token each
            torch.cat([torch.ones_like(state.newest)[:, None], state.newest[:, None]], 1, out=buffers.output)

    def _forward(self, buffers: RunBuffers, batch: Batch, captured: Batch | None) -> tuple[Tensor, list[Tensor]]:
        """Run the target over a batch; `captured`: by the graph that reads this one. Return states [T, E]."""
        if captured is None:
            return self.model.forward(batch, self.pages.storages, buffers.aux_layers)
        count = batch.tokens.shape[0]
        captured.tokens[:count].copy_(batch.tokens)
        captured.positions[:count].copy_(batch.positions)
        captured.slots[:count].copy_(batch.slots)
        if captured.states is not None and batch.states is not None:
            captured.states[: len(batch.states)].copy_(batch.states)
        hidden, aux_states = self.step_graphs.forward(captured, buffers.aux_layers)
        return hidden[:count], [states[:count] for states in aux_states]

    def _verify(
        self, buffers: RunBuffers, logits: Tensor, sampling: SamplingMetadata, processing: StepProcessing | None
    ) -> None:
        """Verify the drafts of all rows; logits [T, V]."""
        state, inputs, width = buffers.state, buffers.verify_inputs, buffers.state.width
        inputs.tokens.view(-1, width + 1)[:, 1:] = state.drafts
        verified = self.verifier.verify(logits, sampling, inputs, torch.empty_like(inputs.tokens))
        following = self.ops.next_tokens(
            verified.tokens,
            buffers.num_drafted,
            inputs.starts,
            state.newest,
            buffers.unsampled,
            self.model.config.vocabulary,
        )
        if processing is not None:
            processing.after(verified.tokens, verified.counts)
        parts = [following.counts[:, None], verified.tokens, state.drafts]
        if verified.nonfinite is not None:
            parts.append(verified.nonfinite[:, None])
        torch.cat(parts, 1, out=buffers.output)
        state.newest.copy_(following.tokens)
        state.positions.add_(following.counts)
        state.last_accepted.copy_(following.ends)

    # ---- before and after a run, on the host ----

    def key(self, name: str, rows: list[Row], width: int) -> Key:
        """Return the shape of a run of these rows."""
        count = padded(len(rows)) if self.graphs.decoding else len(rows)
        pages = padded_pages(max(len(row.request.pages) for row in rows))
        sampled = any(row.request.params.temperature > 0 for row in rows)
        adapted = any(row.request.adapter is not None for row in rows)
        return name, count, width, pages, sampled, adapted

    def buffers_for(self, name: str, rows: list[Row], width: int) -> tuple[Key, RunBuffers]:
        key = self.key(name, rows, width)
        return key, self._buffers_of(key)

    def _buffers_of(self, key: Key) -> RunBuffers:
        if key not in self.buffers:
            others = [other for other, buffers in self.buffers.items() if not buffers.kept]
            if len(others) == MAX_BUFFERS:
                for other in others:
                    del self.buffers[other]
                if not self.graphs.frozen:
                    self.graphs.forget()
            self.buffers[key] = self._allocate(*key)
        return self.buffers[key]

    # ---- before the first request ----

    def capture(self, key: Key) -> None:
        """Capture all parts of a decode step, over rows that pad."""
        buffers = self._buffers_of(key)
        self.fill(buffers, [])
        drafter = buffers.drafter
        if not self.spec_manager.is_member(key[0]):  # members of combined drafters draft after steps with the host
            name, rows, width, _, _, adapted = key
            similar = "target", name, rows, width, adapted  # few kernels depend on the rest
            self.graphs.capture(("target", *key), lambda: self._target(buffers), similar)
        if drafter is not None and not isinstance(drafter, HostSteps) and not self.eager_drafter:
            self.graphs.capture(("extend", *key), drafter.extend)
            if buffers.state.width:
                self.graphs.capture(("decode", *key), drafter.decode)
        buffers.kept = buffers.captured = True

    def time_padding(self, key: Key) -> list[Fence]:
        """Run a few steps over rows that pad; return their fences."""
        buffers = self._buffers_of(key)
        self.fill(buffers, [])
        fences = self._launch(buffers, key, TIMED_STEPS, TIMED_STEPS)
        fences[-1].wait()
        return fences

    def _allocate(self, name: str, rows: int, width: int, pages: int, sampled: bool, adapted: bool) -> RunBuffers:
        buffer, zeros, upload = self.device.buffer, self.device.zeros, self.device.upload
        adapted_tokens = rows * (width + 1) if adapted else 0
        integers = buffer(rows * (4 + width) + adapted_tokens, torch.int32)
        newest, positions, max_lengths, drafts, top_k, adapters = torch.split(
            integers.tensor, [rows, rows, rows, rows * width, rows, adapted_tokens]
        )
        floats, seeds = buffer(3 * rows, torch.float32), buffer(rows, torch.int64)
        tables = buffer(rows * pages, torch.int32)
        states = None if self.pages.recurrent is None else buffer(rows * 3, torch.int32)
        temperature, top_p, min_p = torch.split(floats.tensor, rows)
        starts = upload(range(0, rows * (width + 1) + 1, width + 1), torch.int32)
        ran_tokens, ran_positions, ran_slots = zeros((3, rows * (width + 1)), torch.int32)
        aux_layers = self.planner.aux_layers(name)
        state = DecodeState(
            width=width,
            newest=newest,
            positions=positions,
            max_lengths=max_lengths,
            drafts=drafts.view(rows, width),
            sampling=SamplingMetadata(temperature, top_k, top_p, min_p, seeds.tensor, positions, greedy=not sampled),
            batch=Batch(
                ran_tokens,
                ran_positions,
                ran_slots,
                starts,
                tables.tensor.view(rows, pages),
                adapters=adapters if adapted else None,
                states=None if states is None else states.tensor.view(rows, 3),
            ),
            ran_positions=zeros((rows,), torch.int32),
            last_accepted=starts[:-1].clone(),
            hidden=self._hidden_storage(rows * (width + 1), len(aux_layers) * self.model.config.width),
            sampled=sampled,
            estimates=zeros((rows, width), torch.float32) if self.spec_manager.is_member(name) else None,
        )
        drafter = self.planner.bind(name, state)
        logits = drafter.logits if drafter is not None else None
        has_logits = None if logits is None else upload(([0] + [1] * width) * rows, torch.int32).to(torch.uint8)
        tokens, parents = upload([-1] * (rows * (width + 1)), torch.int32), list(range(-1, width)) * rows
        return RunBuffers(
            state,
            drafter,
            aux_layers,
            integers,
            floats,
            seeds,
            tables,
            states,
            VerifyInputs(starts, tokens, upload(parents, torch.int32), width, logits, has_logits),
            output=zeros((rows, 2 + 2 * width + (width > 0 and self.verifier.reads_drafts)), torch.int32),
            num_drafted=upload([width] * rows, torch.int32),
            unsampled=upload([0] * rows, torch.uint8),
        )

    def _hidden_storage(self, tokens: int, floats: int) -> Tensor:
        """Return storage [T, F] for aux hidden states, which all shapes share: one run at a time."""
        found = self._hidden.get(floats)
        if found is None or len(found) < tokens:
            found = self._hidden[floats] = self.device.zeros((tokens, floats), torch.float32)
        return found[:tokens]

    def fill(self, buffers: RunBuffers, rows: list[Row]) -> None:
        """Write the requests into the buffers, and every value of the rows that pad."""
        state, requests = buffers.state, [row.request for row in rows]
        count, width = state.rows, state.width
        spare = [0] * (count - len(rows))
        integers = [row.tokens[0] for row in rows] + spare
        integers += [row.start for row in rows] + spare
        integers += [request.max_length for request in requests] + spare
        for row in rows if width else ():
            draft = [] if row.draft is None else row.draft.tokens[:width]
            integers += draft + [-1] * (width - len(draft))
        integers += [-1] * (width * len(spare))
        integers += [request.params.top_k for request in requests] + spare
        if state.batch.adapters is not None:
            for request in requests:
                integers += [slot_of(request)] * (width + 1)
            integers += [-1] * ((width + 1) * len(spare))
        buffers.integers.fill(integers)
        table = np.full((count, state.batch.page_tables.shape[1]), -1, np.int32)
        for index, request in enumerate(requests):
            table[index, : len(request.pages)] = request.pages
        buffers.tables.fill(table.ravel())
        if buffers.states is not None and self.pages.recurrent is not None:
            padding = self.pages.recurrent.padding
            buffers.states.fill([each for row in rows for each in row.states] + [padding, padding, 0] * len(spare))
        if buffers.drafter is not None:
            buffers.drafter.begin(rows)
        if buffers.verify_inputs.logits is not None:
            self._fill_logits(buffers.verify_inputs.logits.view(count, width + 1, -1)[:, 1:], rows)
        if buffers.requests != requests:
            params = [request.params for request in requests]
            zeros, ones = [0.0] * len(spare), [1.0] * len(spare)
            floats = [p.temperature for p in params] + zeros + [p.top_p for p in params] + ones
            buffers.floats.fill(floats + [p.min_p for p in params] + zeros)
            buffers.seeds.fill([request.seed for request in requests] + spare)
            buffers.requests = requests  # last: after a failure above the buffers do not count as filled

    @staticmethod
    def _fill_logits(logits: Tensor, rows: list[Row]) -> None:
        """Write the logits that the drafts of the rows were sampled from to `logits` [B, W, V]."""
        for index, row in enumerate(rows):
            if row.draft is not None and row.draft.logits is not None:
                stored = row.draft.logits[: logits.shape[1]]
                logits[index, : len(stored)] = stored


def read_results(
    buffers: RunBuffers, rows: list[Row], outputs: RunOutputs, next_drafts: list[list[int]]
) -> list[RowResult]:
    """Return the new tokens of each row from all steps, and the draft that it would verify next."""
    width, logits, passes = buffers.state.width, buffers.verify_inputs.logits, len(outputs.steps)
    results = []
    for index, read in enumerate(outputs.rows):
        if not width:
            one = (DecodeStep(None, read.tokens),) if passes == 1 else ()  # a draft of the row was not verified
            results.append(RowResult(read.tokens, decode_steps=one, passes=passes))
            continue
        draft = as_draft(next_drafts[index])
        if draft is not None and logits is not None:
            first = index * (width + 1) + 1
            draft = replace(draft, logits=logits[first : first + len(draft.tokens)].clone())
        results.append(RowResult(read.tokens, draft=draft, decode_steps=read.steps, passes=passes))
    if buffers.drafter is not None:
        computed = [row.start + len(result.tokens) for row, result in zip(rows, results, strict=True)]
        buffers.drafter.finish([row.request for row in rows], computed)
    return results
