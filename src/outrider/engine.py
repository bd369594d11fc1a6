"""The engine: requests in, outputs out, one step at a time."""

from __future__ import annotations

import itertools
import logging
import reprlib
import time
from dataclasses import dataclass, replace

from . import config as configuration
from .adapters import AdapterManager, LoRARequest
from .cache.pages import Pages, StateShape
from .catalog import with_revision
from .config import DeviceFacts, EngineConfig, ResolvedConfig
from .detokenizer import ParentRequest, error_text
from .device import (
    SingleThreadedTorch,
    check_activations,
    check_kv_dtype,
    choose_backend,
    open_device,
    within_memory,
)
from .device.collection import suspended_collection
from .device.graphs import Graphs
from .errors import UserError
from .input_processor import InputProcessor, Prompt, PromptInput, end_tokens, read_prompt
from .kernels import load
from .models import build
from .models.lora import LoraLayers
from .multi_step.planner import RunLength
from .prompt_chunks import PromptChunks
from .request import Request, RowResult, Step
from .runner import Runner
from .scheduler import Scheduler
from .speculation import Target
from .speculation.auto import choose, is_auto
from .speculation.checkpoints import has_modules
from .speculation.config import SpeculationPlan, parse
from .speculation.manager import SpeculationManager
from .structured_output.compiler import Compiler
from .tokenizer import Tokenizer
from .types import FinishReason, Output, Progress, SamplingParams, unwatched
from .warm_up import LateWorkCounter, WarmUp
from .weights import open_checkpoint
from .weights.lora import read_lora
from .weights.stated_format import resolve_quantize

log = logging.getLogger(__name__)
KEPT_DRAFTS = 8  # drafted tokens whose inputs recurrent layers keep, if no method is loaded at start-up
SPARE_STATES = 2  # slots beyond one for each request: chunks of prompts write their states there, see Scheduler
# Snapshots of states that the prefix cache keeps: one for each request that can run, for its next turn,
# within this share of the memory that weights and states leave free. The rest is for keys and values.
SNAPSHOT_SHARE = 1 / 4


@dataclass
class StepTimes:
    steps: int = 0
    seconds: float = 0.0


class Engine:
    """Runs requests step by step. Not thread-safe: one thread calls `step`, `add` and `abort`."""

    @within_memory()
    def __init__(self, config: EngineConfig, progress: Progress = unwatched) -> None:
        started = time.perf_counter()
        configuration.check(config)
        config = replace(config, model=with_revision(str(config.model), config.revision))
        backend = choose_backend(config.backend)
        check_activations(backend, config.activations)
        auto = is_auto(config.speculate)
        if not auto:  # refuse a wrong method before the model is downloaded
            speculation = parse(config.speculate, config.speculative_config, config.always_draft)
        self.device = open_device(backend)
        self.ops = load(backend, config.threads, config.deterministic, config.activations)
        checkpoint = open_checkpoint(config.model, progress, self.device.torch_device)
        if auto:
            speculate = choose(str(config.model), backend, has_modules(checkpoint), config.always_draft)
            speculation = parse(speculate, config.speculative_config, config.always_draft)
        config = replace(config, quantize=resolve_quantize(config.quantize, checkpoint.path))
        self.tokenizer = Tokenizer.open(checkpoint.tokenizer_source)
        lora = LoraLayers(self.ops, config.max_loras, config.max_lora_rank) if uses_lora(config) else None
        self.model = build(checkpoint, self.ops, config.quantize, config.max_context, progress, lora)
        self.adapters = AdapterManager(lora, read_lora, config.max_cpu_loras)
        for name, path in (config.lora or {}).items():
            self.adapters.add(name, str(path))
        dtype = configuration.kv_dtype(config, checkpoint.float32 and config.quantize is None)
        check_kv_dtype(backend, dtype)
        progress(0, 2, "warming up")
        graphs = Graphs(self.device, "NONE" if config.enforce_eager else config.cudagraph_mode)
        self.spec_manager = self._make_spec_manager(config, speculation, dtype, graphs)
        pages = self._make_pages(config, dtype)
        storages = [pages, *self.spec_manager.target.storages]
        self.resolved = self._resolve(config, backend, dtype, storages)
        log.info("key/value cache: %s", self.resolved.kv_memory)
        if pages.recurrent is not None:
            log.info("states of recurrent layers: %s", pages.recurrent.memory)
        progress(1, 2, "warming up")
        self._allocate(storages, self.resolved)
        self.runner = self._make_runner(pages, graphs, self.resolved)
        self.scheduler = self._make_scheduler(self.resolved, pages)
        self.single_threaded_torch = SingleThreadedTorch(backend)
        with self.single_threaded_torch:
            if self.device.defaults.warms_up:
                WarmUp(self.runner, self.resolved).run()
            if speculation.method and speculation.adaptive:
                self.runner.warm_up(speculation.method, self.resolved.decode_steps)
        self.late_work = LateWorkCounter(graphs)
        progress(2, 2, "warming up")
        self.input_processor = InputProcessor(
            self.resolved,
            self.tokenizer,
            self.spec_manager,
            self.model.config.vocabulary,
            self.model.config.context,
            end_tokens(checkpoint, self.tokenizer, self.model.config.vocabulary),
        )
        self.parents: dict[str, ParentRequest] = {}
        self.counter = itertools.count()
        self.times = StepTimes()
        self.run_length = RunLength(self.resolved.decode_steps)
        self.prompt_chunks = PromptChunks(self.resolved.max_step_tokens)
        self.load_seconds = time.perf_counter() - started

    # Most objects of a step are freed with it. A collection before that counts them as survivors, and after enough
    # survivors a collection scans all objects of the process, which takes 0.2 s.
    @suspended_collection()
    def step(self, quiet: bool = False) -> list[Output]:
        """Run one step and return the outputs that it changed; if `quiet`, only those that are finished."""
        started = time.perf_counter()
        prompt_tokens = self.prompt_chunks.limit(self.scheduler.running_count)
        step = self.scheduler.next(self.run_length.decode_steps, prompt_tokens)
        if step is None:
            return []
        with self.single_threaded_torch:
            results = self._run(step)
        try:
            outputs = self._outputs(step, self.scheduler.commit(step, results), quiet)
        finally:  # also if this fails: `abort` releases only requests that have not finished
            finished = [row.request for row in step.rows if row.request.finish_reason is not None]
            if finished:
                self.spec_manager.release(finished)
        self._measure(step, results, started)
        return outputs

    def add(
        self,
        prompt: Prompt | PromptInput,
        params: SamplingParams,
        request_id: str | None = None,
        lora_request: LoRARequest | str | None = None,
    ) -> str:
        """Queue a prompt and return the id that its outputs carry. lora_request: the adapter, or the name of one."""
        read = read_prompt(prompt)
        if not isinstance(params, SamplingParams):
            raise UserError(f"`params` is {reprlib.repr(params)}: expected SamplingParams")
        number = next(self.counter)
        while request_id is None and str(number) in self.parents:  # a caller chose this number as an id
            number = next(self.counter)
        parent_id = str(number) if request_id is None else request_id
        if parent_id in self.parents:
            raise UserError(f"request id `{parent_id}` is in use: pick another, or leave it out")
        adapter = self.adapters.find(lora_request)
        requests = self.input_processor.requests(parent_id, number, read, params, adapter)
        parent = ParentRequest.open(parent_id, read.text, requests, self.tokenizer)
        for request in requests:
            self.scheduler.add(request)
        self.parents[parent_id] = parent
        return parent_id

    def abort(self, parent_id: str) -> Output | None:
        """End a request and free its pages. Return its last output; None if the id is unknown or finished."""
        parent = self.parents.pop(parent_id, None)
        if parent is None:
            return None
        running = [request for request in parent.requests if request.finish_reason is None]
        for request in running:  # the objects and not their ids: the id of a sample may be another parent's id
            self.scheduler.finish(request, FinishReason.ABORT)
        self.spec_manager.release(running)
        return parent.output()

    def clear_cache(self) -> None:
        """Drop all cached prefixes. Running requests recompute theirs and lose no token."""
        self.scheduler.preempt_all()
        self.scheduler.clear_cache()

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of weights that every decode step reads."""
        return self.model.weight_bytes

    @property
    def end_tokens(self) -> frozenset[int]:
        return self.input_processor.end_tokens

    @property
    def compiler(self) -> Compiler:
        """Return the grammar compiler. It is thread-safe: `add` finds what another thread has compiled."""
        return self.input_processor.compiler

    def reset_times(self) -> None:
        self.times = StepTimes()

    def _run(self, step: Step) -> list[RowResult]:
        """Run a step. If it fails, run each row alone, so that only the failing request ends.

        A failed multi-step run has advanced the states of recurrent layers. Then all of its texts are read again, and
        decoded with the host after each step.
        """
        try:
            return self.runner.step(step)
        except Exception as error:
            if step.decode_steps > 1 and self.runner.pages.recurrent is not None:
                log.debug("a run of %d rows failed: the texts are read again", len(step.rows), exc_info=True)
                for row in step.rows:
                    row.request.multi_step = False
                    self.scheduler.preempt(row.request)
                return [RowResult([]) for _ in step.rows]
            if len(step.rows) > 1:
                log.debug("a step of %d rows failed: each row runs again alone", len(step.rows), exc_info=True)
                return [result for row in step.rows for result in self._run(Step([row]))]
            request = step.rows[0].request
            log.exception("request `%s` failed", request.id)
            self.scheduler.finish(request, FinishReason.ERROR, error_text(error))
            return [RowResult([])]

    def _outputs(self, step: Step, advanced: list[Request], quiet: bool) -> list[Output]:
        """Detokenize the new tokens, finish requests at stop strings, and collect the outputs that changed."""
        failed = [row.request for row in step.rows if row.request.finish_reason is FinishReason.ERROR]
        changed: dict[str, ParentRequest] = {}
        now = time.perf_counter()
        for request in advanced + failed:
            parent = self.parents.get(request.parent_id)
            if parent is None:
                continue
            if request.output:
                parent.first_token = parent.first_token or now - parent.started
            detokenizer = parent.detokenizers[request.index]
            if quiet and detokenizer.can_wait:
                continue
            known = detokenizer.num_read
            ending = detokenizer.advance()
            if ending is not None:
                self.scheduler.finish(request, *ending)
            # A chunk of a prompt, or of a preempted text, adds no token.
            if detokenizer.num_read > known or request.finish_reason is not None:
                changed[parent.id] = parent
        outputs = [parent.output() for parent in changed.values() if parent.finished or not quiet]
        for parent in changed.values():
            if parent.finished:
                del self.parents[parent.id]
        return outputs

    def _measure(self, step: Step, results: list[RowResult], started: float) -> None:
        seconds, runs = time.perf_counter() - started, self.runner.multi_step
        self.times.steps += max([result.passes for result in results])
        self.times.seconds += seconds
        self.prompt_chunks.observe(step, seconds)
        if step.decode_steps > 1:
            requests = [row.request for row in step.rows]
            self.run_length.observe(seconds, runs.busy, runs.step_seconds, requests)

    # ---- start-up ----

    def _make_spec_manager(
        self, config: EngineConfig, speculation: SpeculationPlan, dtype: str, graphs: Graphs
    ) -> SpeculationManager:
        target = Target(
            model=self.model,
            tokenizer=self.tokenizer,
            ops=self.ops,
            device=self.device,
            page_size=config.page_size,
            max_context=self._max_context(config),
            kv_dtype=dtype,
            sampled=speculation.sampled,
            coupled=speculation.verification in ("exact", "synthetic"),
            replacement=speculation.replacement,
            can_suspend=speculation.adaptive and self.device.defaults.decode_steps == 1,
            quantize=config.quantize,
            source=str(config.model),
            graphs=None if speculation.eager else graphs,
        )
        return SpeculationManager(speculation, target)

    def _make_pages(self, config: EngineConfig, dtype: str) -> Pages:
        """Return the storage of the target's KV and states, not allocated yet."""
        shape = self.model.config
        return Pages(
            shape.layers,
            shape.kv_heads,
            config.page_size,
            shape.head_dim,
            dtype,
            recurrent=self._state_shape(config),
            has_window=[window > 0 for window in shape.windows] if self._window(config) else (),
        )

    def _make_scheduler(self, resolved: ResolvedConfig, pages: Pages) -> Scheduler:
        return Scheduler(
            resolved.pages,
            resolved.page_size,
            resolved.max_requests,
            resolved.max_step_tokens,
            resolved.prefix_cache,
            resolved.decode_steps,
            self.adapters,
            resolved.window,
            resolved.window_pages,
            0 if pages.recurrent is None else pages.recurrent.slots,
        )

    def _make_runner(self, pages: Pages, graphs: Graphs, resolved: ResolvedConfig) -> Runner:
        limits = resolved.max_context, resolved.max_step_tokens
        return Runner(self.model, self.device, pages, self.spec_manager, graphs, *limits)

    def _resolve(self, config: EngineConfig, backend: str, dtype: str, storages: list[Pages]) -> ResolvedConfig:
        """Resolve the configuration. The cache gets its share of the memory that the largest step leaves free."""
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
            window=self._window(config),
            window_bytes_per_token=storages[0].window_bytes_per_token,
        )
        peak = self.device.peak_bytes(lambda: self._profile_run(config, facts, storages))
        free = max(self.device.free_bytes() - peak, 0)
        states = storages[0].recurrent
        if states is not None:
            free -= states.bytes
            if free <= 0:
                raise UserError(
                    f"the states of {config.max_requests} requests would take {states.bytes / 2**30:.1f} GiB, which is "
                    "more than the free memory: lower `max_requests`"
                )
            if config.prefix_cache:
                affordable = int(SNAPSHOT_SHARE * free) // states.slot_bytes
                states = replace(states, snapshots=min(config.max_requests, affordable))
                storages[0].recurrent = states
                free -= states.snapshots * states.slot_bytes
        return configuration.resolve(config, replace(facts, free_bytes=free))

    def _state_shape(self, config: EngineConfig) -> StateShape | None:
        """Return the shape of the states of recurrent layers; None if the model has none."""
        shape = self.model.config.recurrent
        if shape is None:
            return None
        widths = [proposer.needs.width for proposer in self.spec_manager.methods.values()]
        drafted = self.spec_manager.max_width = max(widths, default=KEPT_DRAFTS)
        return StateShape(
            layers=shape.layers,
            heads=shape.heads,
            head_dim=shape.head_dim,
            state_dim=shape.state_dim,
            inputs=shape.inputs,
            requests=config.max_requests + SPARE_STATES,
            # The newest token and its draft, or the end of a prompt after its last full page; and what the convolution
            # reads before.
            lines=max(1 + drafted, config.page_size if config.prefix_cache else 0) + shape.conv_size - 1,
        )

    def _window(self, config: EngineConfig) -> int:
        """Return the widest sliding window of all layers; 0 if no text is longer."""
        widest = max(self.model.config.windows)
        return widest if widest < self._max_context(config) else 0

    def _max_context(self, config: EngineConfig) -> int:
        """Return the tokens that a text may have: those of the user, at most those that the model was trained for."""
        trained = self.model.config.context
        return min(config.max_context or trained, trained)

    def _allocate(self, storages: list[Pages], resolved: ResolvedConfig) -> None:
        target, *others = storages
        target.allocate(resolved.pages, self.device, resolved.window_pages)
        for storage in others:
            storage.allocate(resolved.pages, self.device)

    def _profile_run(self, config: EngineConfig, facts: DeviceFacts, storages: list[Pages]) -> None:
        """Run the largest steps over a cache that just holds them, to measure the memory that they take."""
        context = config.max_context or facts.trained_context
        tokens = min(configuration.step_tokens(config, facts), context)
        held = tokens + 2 * config.page_size
        small = replace(config, cache_tokens=held, max_context=min(context, held))
        resolved = configuration.resolve(small, facts)
        self._allocate(storages, resolved)
        runner = self._make_runner(storages[0], Graphs(self.device, "NONE"), resolved)
        runner.profile_run(tokens, min(config.max_requests, tokens))


def uses_lora(config: EngineConfig) -> bool:
    """Return whether requests may name adapters."""
    return config.enable_lora or bool(config.lora)
