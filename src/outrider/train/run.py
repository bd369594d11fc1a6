"""A whole training run: prompts, the target's answers to them, heads that learn from these, and their files.

Every stage resumes: the same command continues a run that was interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from ..models import read_config
from ..speculation import MethodOptions
from ..weights import open_checkpoint
from .data.answers import data_card, prepare_answers, summary
from .data.pack import Pack, Packer, ahead
from .data.store import Store
from .heads.base import DraftHead
from .io import card, checkpoints
from .io.disk import write_whole
from .io.export import write_head, write_model, write_speculators
from .io.init_from import find_sources, init_heads
from .job import Interrupts, Job, RunResult
from .loop import Cadence, TrainLoop, seed_for
from .methods import HeadSpec
from .progress import ProgressEvent, ProgressReporter, TrainLog
from .target import TargetInfo, TargetModel

HELD_OUT = 4  # packs of held-out documents for an evaluation
# Fields of a Job that a card leaves out of `flags`: it has them under other keys, or they are local paths.
NOT_FLAGS = ("model", "methods", "prompts", "out", "answers", "init_from", "begin")
RESUME = "the same command continues from there"


def run(job: Job, progress: ProgressReporter, cadence: Cadence | None = None) -> RunResult:
    """Run or resume a job. An interrupted run returns a result that is not finished and explains how to resume.

    Raises UserError for everything that the user can change.
    """
    check_writable(job.out)
    settings = settings_of(job)
    known = job.answers_only or checkpoints.check(job.out, settings)
    if not known and job.answers is None:
        validate_heads(job)
    with Interrupts() as interrupts:
        try:
            store = prepare_answers(job, progress)
        except KeyboardInterrupt:
            return RunResult(False, f"interrupted while the target answers; its answers are kept, and {RESUME}", {})
        data = summary(store)
        if job.answers_only:
            said = f"{data['documents']} answers of {data['answered']} tokens are in `{store.folder}`"
            return RunResult(True, said, card.read(store.folder))
        checkpoints.agree(job.out, settings | {"data": data})
        packer = Packer(store, job.rows, job.length, job.seed, answer=job.answer_length)
        done = card.read(job.out)
        if done and done["limits"] == asdict(job.limits(packer.steps_per_pass)):
            return RunResult(True, f"`{job.out}` is finished: pass more `--steps`, `--passes` or `--seconds`", done)
        return TrainRun(job, progress, store, packer, interrupts, cadence).run()


class TrainRun:
    """The second stage: from answers to exported heads."""

    def __init__(
        self,
        job: Job,
        progress: ProgressReporter,
        store: Store,
        packer: Packer,
        interrupts: Interrupts,
        cadence: Cadence | None,
    ) -> None:
        progress.stage(f"open `{card.model_name(job.model)}`")
        self.job, self.progress, self.store, self.packer, self.interrupts = job, progress, store, packer, interrupts
        self.target_model = TargetModel(job.model, job.backend)
        self.target_info = self.target_model.info(store.counts(self.target_model.model.config.vocabulary))
        self.draft_heads = build_heads(job, self.target_info)
        self.limits = job.limits(packer.steps_per_pass)
        recipes = {spec.name: spec.recipe for spec in job.methods}
        self.loop = TrainLoop(self.target_model, self.draft_heads, recipes, self.limits, job.seed, cadence)
        state = checkpoints.load(job.out, self.target_info.torch_device)
        if state is not None:
            self.loop.load(state)
        elif job.init_from is not None:
            init_heads(job, self.target_info, self.draft_heads, progress)
        self.log = TrainLog(job.out / "log.jsonl", self.loop.step)
        logged = [item for line in self.log.lines() for item in line["figures"].items()]
        self.depths = {name: len(metrics["acceptance"]) for name, metrics in logged}  # of a draft in training, by head
        self.saved_step = self.loop.step
        self.save_error = ""  # why the last save failed

    def run(self) -> RunResult:
        resumed = f", from step {self.loop.step} on" if self.loop.step else ""
        self.progress.stage(f"train {', '.join(self.draft_heads)}{resumed}")
        packs = ahead(self.packer, self.loop.step, self.target_info.torch_device)
        with self.interrupts.deferred(), closing(packs):
            ended = self.loop.run(packs, self.held_out(), self.report, self.save, lambda: self.interrupts.asked)
        if not ended:
            if self.save_error:
                raise UserError(f"{self.save_error}; make room and run the same command to continue from there")
            return RunResult(False, f"stopped after step {self.loop.step}; it is saved, and {RESUME}", {})
        self.progress.stage("write the heads")
        run_card = self.card()
        for spec in self.job.methods:
            self.export(spec, card.of_head(run_card, spec.name))
        card.write(self.job.out, run_card)
        names = ", ".join(self.draft_heads)
        return RunResult(True, f"`{self.job.out}` holds {names} after {self.loop.step} steps", run_card)

    def held_out(self) -> list[Pack]:
        """Return a few fixed packs; none if no document is held out."""
        job = self.job
        packer = Packer(self.store, job.rows, job.length, job.seed, held_out=True, answer=job.answer_length)
        return [packer.pack(step) for step in range(min(packer.steps_per_pass, HELD_OUT))]

    def report(self, event: ProgressEvent) -> None:
        self.depths |= {name: len(metrics.acceptance) for name, metrics in event.metrics.items()}
        try:
            self.log.add(event.as_json())
        except OSError as error:
            self.progress.note(f"cannot write `{self.log.file}` ({error.strerror}): make room, training continues")
        self.progress.event(event)

    def save(self, state: dict[str, Any]) -> None:
        try:
            checkpoints.save(self.job.out, state)
            self.saved_step, self.save_error = state["step"], ""
        except OSError as error:
            earlier = (
                f"the state of step {self.saved_step} is intact" if self.saved_step else "no state was saved before"
            )
            self.save_error = f"cannot save step {state['step']} in `{self.job.out}` ({error.strerror}): {earlier}"
            self.progress.note(f"{self.save_error}; make room, training continues")

    def card(self) -> dict[str, Any]:
        job, loop = self.job, self.loop
        return {
            "target": card.target(job.model),
            "made_with": card.machine(self.target_model.device),
            "heads": {
                spec.name: {**spec.as_json(), "parameters": num_parameters(self.draft_heads[spec.name])}
                for spec in job.methods
            },
            "data": data_card(self.store),
            "packing": {"rows": job.rows, "length": job.length, "padding": round(self.packer.padding, 4)},
            "seed": job.seed,
            "began_with": None if job.init_from is None else Path(job.init_from).name,
            "flags": {name: value for name, value in asdict(job).items() if name not in NOT_FLAGS},
            "limits": asdict(self.limits),
            "steps": loop.step,
            "passes": round(loop.step / self.packer.steps_per_pass, 3),
            "tokens_seen": loop.tokens,
            "seconds": round(loop.seconds, 1),
            **card.progress(self.log.lines()),
        }

    def export(self, spec: HeadSpec, head_card: Mapping[str, Any]) -> None:
        name = spec.name
        export, folder = self.draft_heads[name].export(), self.job.out / name
        if spec.is_model:
            write_model(export, folder, self.target_info, self.job.storage, head_card)
            return
        write_head(export, folder, self.job.storage, head_card)
        named = replace(self.target_info, model=card.model_name(self.job.model))
        try:
            for_vllm = folder.with_name(f"{name}-speculators")
            write_speculators(export, for_vllm, named, self.depths.get(name, MethodOptions.width), head_card)
        except UserError as error:
            self.progress.note(f"`{name}` is not exported for vLLM: {error}")


def check_writable(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / ".writable", b"")
        (out / ".writable").unlink()
    except OSError as error:
        raise UserError(f"cannot write to `{out}` ({error.strerror}): pass another folder as `--out`") from error


def settings_of(job: Job) -> dict[str, Any]:
    """Return the settings that must be equal to resume a run: all but its limits. The keys are a file format."""
    return {
        "model": card.model_name(job.model),
        "methods": {spec.name: spec.as_json() for spec in job.methods},
        "rows": job.rows,
        "length": job.length,
        "answer_length": job.answer_length,
        "seed": job.seed,
        "begin": None if job.init_from is None else Path(job.init_from).name,
    }


def validate_heads(job: Job) -> None:
    """Build the heads once for a model without weights, to refuse wrong options before hours of generation."""
    if job.init_from is not None:
        find_sources(job, torch.device("cpu"))
    config = read_config(open_checkpoint(job.model).config)
    table = torch.zeros(1, 1).expand(config.vocabulary, config.width)  # [V, E], without memory of that size
    counts = torch.zeros(config.vocabulary, dtype=torch.int64)
    build_heads(job, TargetInfo(job.model, config, table, table, (0,), counts, table.device, lambda _: table[0, 0]))


def build_heads(job: Job, target_info: TargetInfo) -> dict[str, DraftHead]:
    positions = min(job.length, target_info.config.context)
    heads = {}
    for spec in job.methods:
        seed_for(job.seed, 0)
        heads[spec.name] = spec.build(target_info, positions)
    return heads


def num_parameters(draft_head: DraftHead) -> int:
    return sum(parameter.numel() for parameter in draft_head.parameters() if parameter.requires_grad)
