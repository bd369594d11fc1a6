"""Before the first request: compile all kernels and capture all CUDA graphs that the configuration can need.

Rows that only pad stand in for requests: their tokens have no slot, so no page is written. Shapes are few by design
(device/graphs.py): an 8B model with an EAGLE-3 head has some hundred. The largest come first, because all graphs share
their memory. After that `Graphs.freeze` ends capturing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, product

import torch

from .config import ResolvedConfig
from .device import Fence
from .device.graphs import MAX_TOKENS, Graphs, padded_sizes, pages_sizes, step_sizes
from .input_batch import Shape
from .kernels.compilations import COMPILATIONS
from .multi_step.planner import run_widths
from .request import Request, Row, Step
from .runner import Runner
from .speculation.combined import CombinedDrafter
from .speculation.interface import Proposer
from .types import Draft, SamplingParams

log = logging.getLogger(__name__)
TOKENS = 4  # of the text that warms up sampling
# Tokens of prompts that are not captured: quantized matmuls have tilings for the first two, attention for long ones.
PROMPTS = 320, 384, 2 * MAX_TOKENS + 16, 1040
PREFIXES = 4096, 8192, 16384, 32768  # positions before a chunk of a prompt: lengths of slices in prompt_attention.py
DRAFTED_KINDS = 3  # of sampling_kinds: sampled after drafts of all widths
MAX_LOGPROBS = 32  # numbers of log-probabilities are rounded up to powers of two, and kernels compiled up to this one


@dataclass(frozen=True)
class LateWork:
    """Work in the path of requests that belongs before them: all 0 if the warm-up was complete."""

    captures: int = 0  # CUDA graphs
    compilations: int = 0  # kernels compiled, or loaded from Triton's cache on disk
    eager_runs: int = 0  # runs of work that is captured in other shapes


class LateWorkCounter:
    def __init__(self, graphs: Graphs) -> None:
        """Count from now on."""
        self.graphs, self._compiled = graphs, COMPILATIONS.count

    def read(self) -> LateWork:
        graphs = self.graphs
        return LateWork(graphs.late_captures, COMPILATIONS.count - self._compiled, graphs.late_eager_runs)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let measurements compile and capture shapes that no request needs, without counting them."""
        graphs, compiled = self.graphs, COMPILATIONS.count
        frozen, graphs.frozen = graphs.frozen, False
        try:
            yield
        finally:
            graphs.frozen = frozen
            self._compiled += COMPILATIONS.count - compiled


class WarmUp:
    def __init__(self, runner: Runner, resolved: ResolvedConfig) -> None:
        self.runner, self.resolved, self.graphs = runner, resolved, runner.graphs
        self.spec_manager = runner.spec_manager
        self.pages = pages_sizes(-(-resolved.max_context // resolved.page_size))
        widths = [proposer.needs.width for proposer in self.spec_manager.methods.values()]
        self.max_drafted = max(widths, default=0)  # tokens that a request drafts in one step
        self.has_trees = any(proposer.needs.trees for proposer in self.spec_manager.methods.values())
        self.adapted = (False,) if runner.model.lora is None else (False, True)  # whether some row has an adapter

    def run(self) -> None:
        """Compile and capture everything. Without memory for all graphs, the other steps run without one."""
        started, compiled, loaded = time.perf_counter(), COMPILATIONS.count, COMPILATIONS.loaded
        try:
            self._capture_runs()
            self._capture_steps()
            self._capture_passes()
            self._sample()
            self._read_prompts()
        except torch.OutOfMemoryError:
            log.warning("no memory for all CUDA graphs: some steps run without, lower `cache_share` or `max_requests`")
        self.graphs.freeze()
        log.info(
            "captured %d CUDA graphs and compiled %d kernels, %d of them found in Triton's cache, in %.1f s",
            len(self.graphs.captured),
            COMPILATIONS.count - compiled,
            COMPILATIONS.loaded - loaded,
            time.perf_counter() - started,
        )

    def _capture_runs(self) -> None:
        """Capture multi-step runs, and measure their latency where widths adapt to it."""
        runs, most = self.runner.multi_step, self.resolved.max_requests
        if not self.graphs.decoding or self.resolved.decode_steps < 2:
            return
        method = self.spec_manager.plan.method
        timed: dict[tuple[int, int], list[Fence]] = {}  # runs of the method, by rows and width
        for rows in reversed(padded_sizes(most)):
            for name, width in self._drafts(rows):
                for pages, sampled, adapted in product(reversed(self.pages), (True, False), self.adapted):
                    runs.capture((name, rows, width, pages, sampled, adapted))
                is_timed = bool(name) or runs.planner.can_miss_runs(method)
                if is_timed and runs.planner.learns(method):
                    timed[rows, width] = runs.time_padding((name, rows, width, self.pages[0], False, False))
        runs.planner.begin(method, timed, most)

        for name, width in self._members():
            for rows, pages, sampled in product(reversed(padded_sizes(most)), reversed(self.pages), (True, False)):
                runs.capture((name, rows, width, pages, sampled, False))

    def _members(self) -> Iterator[tuple[str, int]]:
        """Yield the combined drafters that draft by graphs, and how many tokens they draft."""
        plan = self.spec_manager.plan
        proposer = self.spec_manager.methods.get(plan.method)
        for name, member in proposer.members if isinstance(proposer, CombinedDrafter) else ():
            if member.needs.multi_step and member.needs.costs_time and not plan.eager:
                yield f"{plan.method}/{name}", member.needs.width

    def _drafts(self, rows: int) -> Iterator[tuple[str, int]]:
        """Yield the methods of runs, and how many tokens they may draft in a batch of `rows`."""
        plan, name = self.spec_manager.plan, self.spec_manager.plan.method
        yield "", 0
        if name and self.spec_manager.can_multi_step(name):
            most = self.spec_manager.methods[name].needs.width
            fixed = {plan.width(rows) if plan.widths else most}
            for width in sorted(set(run_widths(most)) if plan.adaptive else fixed, reverse=True):
                if width or not self.runner.multi_step.planner.can_miss_runs(name):
                    yield name, width

    def _capture_steps(self) -> None:
        """Capture steps with the host: prompts, and what needs the host after each token."""
        for shape in self._step_shapes():
            self.runner.capture(shape)
        # Longer prompts are not captured: compile their kernels.
        for rows in {1, self.resolved.max_requests} if self.graphs.mixed else ():
            for tokens in {min(tokens, self.resolved.max_step_tokens) for tokens in PROMPTS}:
                for pages, adapted in product(self.pages, self.adapted):
                    self.runner.run_padding(Shape(tokens, rows, pages, has_adapters=adapted))
        chunk = self.resolved.max_step_tokens
        for prefix in PREFIXES if self.graphs.mixed else ():
            if prefix + chunk <= self.resolved.max_context:
                self.runner.run_padding(Shape(chunk, 1, self.pages[-1]), prefix)

    def _capture_passes(self) -> None:
        """Capture the drafter's passes in steps with the host: over prompts, and over trees."""
        plan, shapes = self.spec_manager.plan, [shape for shape in self._step_shapes() if not shape.has_adapters]
        for drafter in drafters_of(self.spec_manager.methods[plan.method]) if plan.method and not plan.eager else ():
            if shapes and hasattr(drafter, "capture_passes"):
                drafter.capture_passes([shape for shape in shapes if self.graphs.mixed or shape.is_tree])

    def _step_shapes(self) -> Iterator[Shape]:
        if not self.graphs.decoding:
            return
        for tokens, rows in step_sizes(self.resolved.max_requests, self.max_drafted):
            if tokens <= self.runner.graph_tokens:
                flags = (False, True) if self.has_trees else (False,)
                for pages, is_tree, adapted in product(reversed(self.pages), flags, self.adapted):
                    yield Shape(tokens, rows, pages, is_tree, adapted)

    def _sample(self) -> None:
        """Sample with each kind of parameters, with and without drafts, for one request and for several."""
        most = self.max_drafted
        pages = self._some_pages(TOKENS + most + 2)
        widths = [0, *(width for width in (1, 2, 4, 8, 16, 32) if width < most), *([most] if most else [])]
        for kind, params in enumerate(sampling_kinds() if pages else ()):
            request = Request("warm-up", [0] * TOKENS, params, 0, max_length=TOKENS + most + 2, pages=pages)
            for rows in (1, 3):
                for width in widths if kind < DRAFTED_KINDS else (0, most):  # kernels are compiled by powers of two
                    draft = Draft([0] * width) if width else None
                    row = Row(request, TOKENS - 1, [0], sample=True, draft=draft)
                    self.runner.step(Step([row] * rows))
        self.runner.sampler.warm_up_masks()
        if self.has_trees:
            self.runner.warm_up_moves()
        if self.resolved.decode_steps > 1:
            self.runner.multi_step.processing.warm_up(run_widths(most) if most else [0])

    def _read_prompts(self) -> None:
        """Let the drafter read prompts, and draft after them, also with noise: longer prompts are not captured."""
        if not self.spec_manager.plan.method:
            return
        size = self.resolved.page_size
        greedy, sampled = islice(sampling_kinds(), 2)
        prompts = [(TOKENS, greedy), (TOKENS, sampled), (5 * size, greedy), *((tokens, greedy) for tokens in PROMPTS)]
        for (tokens, params), rows in product(prompts, (1, 4)):
            self._read(tokens, params, rows)

    def _read(self, tokens: int, params: SamplingParams, rows: int) -> None:
        """Let the drafter read `rows` prompts of `tokens` tokens, if they fit into a step."""
        name = self.spec_manager.plan.method
        proposer = self.spec_manager.methods[name]
        length = tokens + 1 + max(proposer.needs.width, proposer.needs.lookahead)
        pages = self._some_pages(length)
        if not pages or rows * tokens > self.resolved.max_step_tokens or length > self.resolved.max_context:
            return
        requests = [Request("warm-up", [0] * tokens, params, 0, max_length=length, pages=pages) for _ in range(rows)]
        for request in requests:
            request.method, request.width = name, proposer.needs.width
            request.lookahead = proposer.needs.lookahead
        self.runner.step(Step([Row(request, 0, request.prompt, sample=True) for request in requests]))
        proposer.release(requests)
        for request in requests:
            self.spec_manager.controller.forget(request)

    def _some_pages(self, length: int) -> list[int]:
        """Return pages for `length` tokens; none if there are too few."""
        count = -(-length // self.resolved.page_size)
        return list(range(count)) if count <= self.resolved.pages else []


def drafters_of(proposer: Proposer) -> list[Proposer]:
    """Return the members of combined drafters, else the drafter itself."""
    return [member for _, member in proposer.members] if isinstance(proposer, CombinedDrafter) else [proposer]


def sampling_kinds() -> Iterator[SamplingParams]:
    """Yield parameters that use all kernels of sampling."""
    yield SamplingParams(temperature=0.0)
    yield SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05)
    yield SamplingParams(temperature=0.0, logit_bias={0: 1.0})
    count = 1
    while count <= MAX_LOGPROBS:
        yield SamplingParams(temperature=0.0, logprobs=count)
        count *= 2
    yield SamplingParams(temperature=0.0, logprobs=0)
