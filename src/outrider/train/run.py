"""A whole run: prompts, the target's answers, heads that learn from them, and their files.

Every stage goes on where it was: a run that was cut is taken up by the same command.
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
from .data.answers import described, gather, of_card
from .data.pack import Pack, Packer, ahead
from .data.store import Store
from .heads.base import Student
from .io import card, checkpoints
from .io.disk import write_whole
from .io.export import write_head, write_model, write_speculators
from .io.init_from import begin, find
from .job import Interrupts, Job, Result, Watcher
from .loop import Cadence, Loop, Moment, seed_for
from .methods import Asked
from .metrics import Log
from .target import Subject, Teacher

HELD_OUT = 4  # packs of held-out documents that are looked at
ELSEWHERE = ("model", "methods", "prompts", "out", "answers", "begin")  # a card says it in other words, or not: places
AGAIN = "the same command goes on from there"


def run(job: Job, watch: Watcher, cadence: Cadence | None = None) -> Result:
    """UserError: what the user can change. A run that was asked to stop is not finished, and says how to go on."""
    prepare(job.out)
    settings = settings_of(job)
    known = job.answers_only or checkpoints.check(job.out, settings)
    if not known and job.answers is None:
        rehearse(job)
    with Interrupts() as interrupts:
        try:
            store = gather(job, watch)
        except KeyboardInterrupt:
            return Result(False, f"interrupted while the target answers; what it wrote is kept, and {AGAIN}", {})
        found = described(store)
        if job.answers_only:
            said = f"{found['documents']} answers of {found['answered']} tokens are in `{store.folder}`"
            return Result(True, said, card.read(store.folder))
        checkpoints.agree(job.out, settings | {"data": found})
        packer = Packer(store, job.rows, job.length, job.seed, answer=job.answer_length)
        done = card.read(job.out)
        if done and done["limits"] == asdict(job.limits(packer.steps_per_pass)):
            return Result(True, f"`{job.out}` is finished: give more `--steps`, `--passes` or `--seconds`", done)
        return Training(job, watch, store, packer, interrupts, cadence).run()


class Training:
    """The second stage: from answers to files."""

    def __init__(
        self, job: Job, watch: Watcher, store: Store, packer: Packer, interrupts: Interrupts, cadence: Cadence | None
    ) -> None:
        watch.stage(f"open `{card.called(job.model)}`")
        self.job, self.watch, self.store, self.packer, self.interrupts = job, watch, store, packer, interrupts
        self.teacher = Teacher(job.model, job.backend)
        self.subject = self.teacher.subject(store.counts(self.teacher.model.config.vocabulary))
        self.students = students_of(job, self.subject)
        self.limits = job.limits(packer.steps_per_pass)
        recipes = {one.name: one.recipe for one in job.methods}
        self.loop = Loop(self.teacher, self.students, recipes, self.limits, job.seed, cadence)
        state = checkpoints.load(job.out, self.subject.torch_device)
        if state is not None:
            self.loop.load(state)
        elif job.begin is not None:
            begin(job, self.subject, self.students, watch)
        self.log = Log(job.out / "log.jsonl", self.loop.step)
        figures = [one for line in self.log.lines() for one in line["figures"].items()]
        self.places = {name: len(one["acceptance"]) for name, one in figures}  # of a draft, as each student learns it
        self.saved = self.loop.step  # the step that is on disk
        self.failure = ""  # why the last state is not

    def run(self) -> Result:
        begun = f", from step {self.loop.step} on" if self.loop.step else ""
        self.watch.stage(f"train {', '.join(self.students)}{begun}")
        self.interrupts.patient = True
        with closing(ahead(self.packer, self.loop.step, self.subject.torch_device)) as packs:  # type: ignore[type-var]
            ended = self.loop.run(packs, self.held_out(), self.tell, self.keep, lambda: self.interrupts.asked)
        self.interrupts.patient = False
        if not ended:
            if self.failure:
                raise UserError(f"{self.failure}; make room and run the same command: it goes on from there")
            return Result(False, f"stopped after step {self.loop.step}; it is saved, and {AGAIN}", {})
        self.watch.stage("write the heads")
        made = self.card()
        for one in self.job.methods:
            self.export(one, card.of_head(made, one.name))
        card.write(self.job.out, made)
        return Result(True, f"`{self.job.out}` holds {', '.join(self.students)} after {self.loop.step} steps", made)

    def held_out(self) -> list[Pack]:
        """A fixed handful; where no document is held out, there is nothing to look at."""
        job = self.job
        packer = Packer(self.store, job.rows, job.length, job.seed, held_out=True, answer=job.answer_length)
        return [packer.pack(step) for step in range(min(packer.steps_per_pass, HELD_OUT))]

    def tell(self, moment: Moment) -> None:
        self.places |= {name: len(one.acceptance) for name, one in moment.figures.items()}
        try:
            self.log.add(asdict(moment))
        except OSError as error:
            self.watch.note(f"cannot write `{self.log.file}` ({error.strerror}): make room, training goes on")
        self.watch.moment(moment)

    def keep(self, state: dict[str, Any]) -> None:
        try:
            checkpoints.save(self.job.out, state)
            self.saved, self.failure = state["step"], ""
        except OSError as error:
            earlier = f"what was saved at step {self.saved} is intact" if self.saved else "nothing was saved before"
            self.failure = f"cannot save step {state['step']} in `{self.job.out}` ({error.strerror}): {earlier}"
            self.watch.note(f"{self.failure}; make room, training goes on")

    def card(self) -> dict[str, Any]:
        job, loop = self.job, self.loop
        return {
            "target": card.target(job.model),
            "made_with": card.machine(self.teacher.device),
            "heads": {
                one.name: {**one.described(), "parameters": parameters(self.students[one.name])} for one in job.methods
            },
            "data": of_card(self.store),
            "packing": {"rows": job.rows, "length": job.length, "padding": round(self.packer.padding, 4)},
            "seed": job.seed,
            "began_with": None if job.begin is None else Path(job.begin).name,
            "flags": {name: value for name, value in asdict(job).items() if name not in ELSEWHERE},
            "limits": asdict(self.limits),
            "steps": loop.step,
            "passes": round(loop.step / self.packer.steps_per_pass, 3),
            "tokens_seen": loop.tokens,
            "seconds": round(loop.seconds, 1),
            **card.progress(self.log.lines()),
        }

    def export(self, asked: Asked, own: Mapping[str, Any]) -> None:
        name = asked.name
        exported, folder = self.students[name].exported(), self.job.out / name
        if asked.is_model:
            write_model(exported, folder, self.subject, self.job.storage, own)
            return
        write_head(exported, folder, self.job.storage, own)
        named = replace(self.subject, model=card.called(self.job.model))
        try:
            beside = folder.with_name(f"{name}-speculators")
            write_speculators(exported, beside, named, self.places.get(name, MethodOptions.width), own)
        except UserError as error:
            self.watch.note(f"`{name}` is not written for vLLM: {error}")


def prepare(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / ".writable", b"")
        (out / ".writable").unlink()
    except OSError as error:
        raise UserError(f"cannot write to `{out}` ({error.strerror}): pass another folder as `--out`") from error


def settings_of(job: Job) -> dict[str, Any]:
    """What a run must be told again to go on: all but where it ends."""
    return {
        "model": card.called(job.model),
        "methods": {one.name: one.described() for one in job.methods},
        "rows": job.rows,
        "length": job.length,
        "answer_length": job.answer_length,
        "seed": job.seed,
        "begin": None if job.begin is None else Path(job.begin).name,
    }


def rehearse(job: Job) -> None:
    """Build the students once for a model without numbers: what they refuse is refused before hours of answers."""
    if job.begin is not None:
        find(job, torch.device("cpu"))
    config = read_config(open_checkpoint(job.model).config)
    table = torch.zeros(1, 1).expand(config.vocabulary, config.width)  # [V, E], and takes no memory
    counts = torch.zeros(config.vocabulary, dtype=torch.int64)
    students_of(job, Subject(job.model, config, table, table, (0,), counts, table.device, lambda _: table[0, 0]))


def students_of(job: Job, subject: Subject) -> dict[str, Student]:
    positions = min(job.length, subject.config.context)
    found = {}
    for one in job.methods:
        seed_for(job.seed, 0)
        found[one.name] = one.build(subject, positions)
    return found


def parameters(student: Student) -> int:
    return sum(one.numel() for one in student.parameters() if one.requires_grad)
