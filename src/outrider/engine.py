"""Engine.step, and LLM: its synchronous face."""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass, replace

from . import config as configuration
from .cache.pages import Pages
from .config import DeviceFacts, EngineConfig, ResolvedConfig
from .detokenizer import ParentRequest, cause, open_family
from .device import choose_backend, open_device, single_threaded_torch, within_memory
from .device.graphs import Graphs
from .errors import UserError
from .input_processor import InputProcessor
from .input_processor import Prompt as Prompt
from .kernels import load
from .models import build
from .request import Request, RowResult, Step
from .runner import Runner
from .scheduler import Scheduler
from .speculation import Target
from .speculation.config import SpeculationPlan, parse
from .speculation.manager import SpeculationManager
from .structured_output import Compiler
from .tokenizer import Tokenizer
from .types import FinishReason, Output, Progress, SamplingParams, unwatched
from .weights import open_checkpoint

PACE_RATE = 0.2
TEXT_MEMORY = 0.97  # what a flight says of the length of texts after another one
FEWEST_STOPPED = 0.01  # none may have, for long

log = logging.getLogger(__name__)


@dataclass
class StepTimes:
    steps: int = 0
    seconds: float = 0.0


class Engine:
    """Requests in, outputs out, a step at a time. Not thread-safe: one thread turns the crank."""

    @within_memory()
    def __init__(self, config: EngineConfig, progress: Progress = unwatched) -> None:
        started = time.perf_counter()
        configuration.check(config)
        speculation = parse(config.speculate, config.speculative_config)
        backend = choose_backend(config.backend)
        self.device = open_device(backend)
        self.ops = load(backend, config.threads, config.deterministic)
        checkpoint = open_checkpoint(config.model, progress, self.device.torch_device)
        self.tokenizer = Tokenizer.open(checkpoint.tokenizer_source)
        self.model = build(checkpoint, self.ops, config.quantize, config.max_context, progress)
        dtype = configuration.kv_dtype(config, checkpoint.float32 and config.quantize is None)
        progress(0, 2, "warming up")
        self.spec_manager = self._speculator(config, speculation, dtype)
        shape = self.model.config
        pages = Pages(shape.layers, shape.kv_heads, config.page_size, shape.head_dim, dtype)
        storages = [pages, *self.spec_manager.target.storages]
        graphs = Graphs(self.device, "NONE" if config.enforce_eager else config.cudagraph_mode)
        self.resolved = self._resolve(config, backend, dtype, storages)
        progress(1, 2, "warming up")
        for storage in storages:
            storage.allocate(self.resolved.pages, self.device)
        self.runner = self._runner(pages, graphs, self.resolved)
        self.scheduler = Scheduler(
            self.resolved.pages,
            self.resolved.page_size,
            self.resolved.max_requests,
            self.resolved.max_step_tokens,
            self.resolved.prefix_cache,
            self.resolved.decode_steps,
        )
        if speculation.method and speculation.adaptive:
            with single_threaded_torch(backend):
                self.runner.warm_up(speculation.method, self.resolved.decode_steps)
        progress(2, 2, "warming up")
        ends = frozenset(self.tokenizer.end_ids) | frozenset(checkpoint.end_ids)
        self.input_processor = InputProcessor(
            self.resolved, self.tokenizer, self.spec_manager, self.model.config.vocabulary, ends
        )
        self.parents: dict[str, ParentRequest] = {}
        self.counter = itertools.count()
        self.times = StepTimes()
        self._busy = self._host = 0.0  # seconds that the device worked in rounds, and that the host adds to a step
        self._seated, self._stopped = 1.0, 1.0  # seconds that texts took of late, and how many stopped by themselves
        self.load_seconds = time.perf_counter() - started

    def _speculator(self, config: EngineConfig, plan: SpeculationPlan, dtype: str) -> SpeculationManager:
        target = Target(
            model=self.model,
            tokenizer=self.tokenizer,
            ops=self.ops,
            device=self.device,
            page_size=config.page_size,
            max_context=min(config.max_context or self.model.config.context, self.model.config.context),
            kv_dtype=dtype,
            sampled=plan.sampled,
            coupled=plan.verification in ("exact", "synthetic"),
            replacement=plan.replacement,
            lazy=plan.adaptive and self.device.defaults.decode_steps == 1,
            quantize=config.quantize,
            source=str(config.model),
        )
        return SpeculationManager(plan, target)

    def _resolve(self, config: EngineConfig, backend: str, dtype: str, storages: list[Pages]) -> ResolvedConfig:
        """The configuration in force. The cache takes its share of what the largest steps leave free."""
        defaults = self.device.defaults
        facts = DeviceFacts(
            backend=backend,
            trained_context=self.model.config.context,
            kv_dtype=dtype,
            cache_bytes_per_token=sum(storage.bytes_per_token for storage in storages),
            free_bytes=0,
            cache_share=defaults.cache_share,
            step_tokens=defaults.step_tokens,
            decode_steps=defaults.decode_steps,
        )
        spent = self.device.peak_bytes(lambda: self._dry_run(config, facts, storages))
        free = max(self.device.free_bytes() - spent, 0)
        return configuration.resolve(config, replace(facts, free_bytes=free))

    def _dry_run(self, config: EngineConfig, facts: DeviceFacts, storages: list[Pages]) -> None:
        """The largest steps that may come, over a cache that is just large enough: what they take beside it."""
        tokens = min(configuration.step_tokens(config, facts), config.max_context or facts.trained_context)
        small = replace(config, cache_tokens=tokens + 2 * config.page_size)
        plan = configuration.resolve(small, facts)
        for storage in storages:
            storage.allocate(plan.pages, self.device)
        runner = self._runner(storages[0], Graphs(self.device, "NONE"), plan)
        runner.profile_run(tokens, min(config.max_requests, tokens))

    def _runner(self, pages: Pages, graphs: Graphs, plan: ResolvedConfig) -> Runner:
        return Runner(self.model, self.device, pages, self.spec_manager, graphs, plan.max_context, plan.max_step_tokens)

    @property
    def weight_bytes(self) -> int:
        """Weights that every decode step reads, as they lie in memory."""
        return self.model.weight_bytes

    @property
    def end_tokens(self) -> frozenset[int]:
        return self.input_processor.end_tokens

    @property
    def compiler(self) -> Compiler:
        """Of the shapes that answers must have. Any thread may ask it: what it compiled is at hand for `add`."""
        return self.input_processor.compiler

    def step(self, quiet: bool = False) -> list[Output]:
        """Run one step; return the outputs that it changed, or, where nobody watches, only those that are finished."""
        started = time.perf_counter()
        step = self.scheduler.next()
        if step is None:
            return []
        with single_threaded_torch(self.resolved.backend):
            results = self._run(step)
        try:
            touched = self.scheduler.commit(step, results)
            broken = [row.request for row in step.rows if row.request.finish_reason is FinishReason.ERROR]
            outputs = self._outputs(touched + broken, quiet)
        finally:  # where it fails, too: `abort` lets go of those alone that have not ended
            self.spec_manager.release([row.request for row in step.rows if row.request.finish_reason is not None])
        self.times.steps += max(result.passes for result in results)
        self._pace(time.perf_counter() - started, [row.request for row in step.rows])
        self.times.seconds += time.perf_counter() - started
        return outputs

    def _pace(self, seconds: float, requests: list[Request]) -> None:
        """Let the device run as far ahead as the host's part of a step, and the texts' lengths, of late suggest."""
        busy, self._busy = self.runner.multi_step.busy - self._busy, self.runner.multi_step.busy
        if busy:
            self._host += PACE_RATE * (seconds - busy - self._host)
            stopped = sum(request.finish_reason is FinishReason.STOP for request in requests)
            self._seated = TEXT_MEMORY * self._seated + busy * len(requests)
            self._stopped = max(TEXT_MEMORY * self._stopped, FEWEST_STOPPED) + stopped
            life = self._seated / self._stopped
            self.scheduler.decode_steps = self.runner.multi_step.worth(self.resolved.decode_steps, self._host, life)

    def _run(self, step: Step) -> list[RowResult]:
        """A row that breaks the step ends alone: the others run again without it, to the same bits."""
        try:
            return self.runner.step(step)
        except Exception as error:
            if len(step.rows) > 1:
                log.debug("a step of %d rows failed: each runs again by itself", len(step.rows), exc_info=True)
                return [result for row in step.rows for result in self._run(Step([row]))]
            request = step.rows[0].request
            log.exception("request `%s` failed", request.id)
            self.scheduler.finish(request, FinishReason.ERROR, cause(error))
            return [RowResult([])]

    def reset_times(self) -> None:
        self.times = StepTimes()

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle

    def add(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> str:
        """Queue a prompt (text, or token ids); the outputs of `step` carry the id that is returned."""
        number = next(self.counter)
        while request_id is None and str(number) in self.parents:  # someone chose a number as a name
            number = next(self.counter)
        family = str(number) if request_id is None else request_id
        if family in self.parents:
            raise UserError(f"request id `{family}` is in use: pick another, or leave it out")
        requests = self.input_processor.requests(family, number, prompt, params)
        opened = open_family(family, prompt if isinstance(prompt, str) else None, requests, self.tokenizer)
        for request in requests:
            self.scheduler.add(request)
        self.parents[family] = opened
        return family

    def abort(self, family_id: str) -> Output | None:
        """Drop a request; its pages are free at once. None if it is not known (any more)."""
        family = self.parents.pop(family_id, None)
        if family is None:
            return None
        requests = [transcript.request for transcript in family.transcripts]
        going = [request for request in requests if request.finish_reason is None]
        for request in going:  # by themselves: a sample's id may be another family's name
            self.scheduler.finish(request, FinishReason.ABORT)
        self.spec_manager.release(going)
        return family.output()

    def clear_cache(self) -> None:
        """Forget all shared prefixes. Running requests lose nothing: they are recomputed."""
        self.scheduler.preempt_all()
        self.scheduler.clear_cache()

    def _outputs(self, touched: list[Request], quiet: bool) -> list[Output]:
        """Decode what the step added; requests whose text holds a stop string end here."""
        changed: dict[str, ParentRequest] = {}
        now = time.perf_counter()
        for request in touched:
            family = self.parents.get(request.parent_id)
            if family is None:
                continue
            if request.output:
                family.first_token = family.first_token or now - family.started
            transcript = family.transcripts[request.index]
            if quiet and transcript.can_wait:
                continue
            known = transcript.read
            ending = transcript.advance()
            if ending is not None:
                self.scheduler.finish(request, *ending)
            # Nothing was read while a prompt, or a preempted text, is computed in pieces.
            if transcript.read > known or request.finish_reason is not None:
                changed[family.id] = family
        outputs = [family.output() for family in changed.values() if family.finished or not quiet]
        for family in changed.values():
            if family.finished:
                del self.parents[family.id]
        return outputs
