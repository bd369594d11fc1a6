"""The target's own answers, through the engine, into the store.

Documents enter the store in the order of their assignments, not in that of their completion: so the store holds the
same whatever the batches were, and a run that was killed goes on behind the last document that is there.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...config import EngineConfig
from ...detokenizer import ParentRequest
from ...device import choose_backend, open_device
from ...errors import UserError
from ...input_processor import mix
from ...llm import LLM
from ...models import read_config
from ...request import Request
from ...types import FinishReason, SamplingParams
from ...weights import locate, open_checkpoint
from ...weights.random import is_random
from ...weights.shipped import file_bytes
from ..io import card
from ..io.disk import as_read
from ..job import Job, Watcher
from .assignments import SELF_WRITTEN, AnswerPlan, Assignment, assignments, usual_ways
from .prompts import read_prompts
from .store import Document, Header, Store

FLUSH_SECONDS = 5.0
QUEUE = 2  # requests in the engine for each row of a step
BACKLOG = 16  # documents for each row of a step that may wait for one before them
AHEAD = 1024  # prompts that become tokens before they are asked for
FRUITLESS = 256  # assignments, beside one for each prompt, that may fail to bring anything new before we give up
MARK = "\u2068"  # what no template writes by itself

log = logging.getLogger(__name__)
Progress = Callable[[int, int, int], None]  # documents, tokens of their answers, tokens wanted


def write_answers(
    llm: LLM, prompts: list[str], plan: AnswerPlan, store: Store, progress: Progress | None = None
) -> None:
    """Let the target answer until the store holds `plan.tokens` tokens of answers, or nothing new comes any more."""
    writer = _Writer(llm, prompts, plan, store)
    flushed = time.perf_counter()
    try:
        while writer.answered < plan.tokens and writer.submit():
            llm.engine.step(quiet=True)
            writer.collect()
            writer.keep()
            if time.perf_counter() - flushed > FLUSH_SECONDS:
                store.flush()
                flushed = time.perf_counter()
            if progress is not None:
                progress(writer.documents, writer.answered, plan.tokens)
    finally:
        try:
            store.flush()
        finally:
            writer.abandon()
    if writer.answered < plan.tokens:
        writer.explain()


@dataclass(frozen=True)
class Turn:
    """How the chat template opens a user's message, and the token that it closes one with."""

    opening: list[int]
    closing: int


def find_turn(llm: LLM) -> Turn:
    tokenizer = llm.tokenizer
    if tokenizer.chat_template is None:
        raise UserError(
            f"`{llm.resolved.model}` has no chat template to write prompts by itself: pass `self_prompted=0`"
        )
    text = tokenizer.apply_chat([{"role": "user", "content": MARK}], add_generation_prompt=False)
    before, _, after = text.partition(MARK)
    opening, closing = (tokenizer.encode(part, add_special=False) for part in (before, after.lstrip()))
    ends = tokenizer.special_ids | llm.engine.end_tokens
    if not opening or not closing or closing[0] not in ends:
        raise UserError(
            f"the chat template of `{llm.resolved.model}` has no token that ends a user's message, so it cannot write "
            "prompts by itself: pass `self_prompted=0`"
        )
    return Turn(opening, closing[0])


def header(llm: LLM, prompts: list[str], plan: AnswerPlan) -> Header:
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(prompt.encode() + b"\0")
    context = {"longest": min(plan.longest, llm.resolved.max_context), "prompts": digest.hexdigest()}
    return Header(
        model=llm.resolved.model,
        weights=weight_bytes(llm.resolved.model),
        vocabulary=llm.engine.model.config.vocabulary,
        settings=plan.settings() | context,
    )


def weight_bytes(model: str) -> int:
    """Of its files; 0: it has none."""
    return 0 if is_random(model) else file_bytes(locate(model))


@dataclass(eq=False)
class _Work:
    """An assignment on its way to a document."""

    assignment: Assignment
    prompt: array[int] | None = None  # None: the target is writing it, or it is no good
    family: ParentRequest | None = None  # None: nothing is being generated any more
    answer: list[int] = field(default_factory=list)  # empty: there is none to keep


class _Writer:
    def __init__(self, llm: LLM, prompts: list[str], plan: AnswerPlan, store: Store) -> None:
        self.llm, self.engine, self.prompts, self.plan, self.store = llm, llm.engine, prompts, plan, store
        self.longest = min(plan.longest, llm.resolved.max_context)
        self.turn = find_turn(llm) if plan.self_prompted else None
        store.claim(header(llm, prompts, plan))
        self.documents, self.answered = len(store), store.answered
        self.texts = {prompt.strip() for prompt in prompts}
        kept = store.documents()
        own = np.flatnonzero(kept.prompts == SELF_WRITTEN).tolist()
        self.seen = {_digest(store.tokens(index)) for index in range(len(store))}
        self.seen_prompts = {_digest(store.tokens(index)[: kept.prompt_lengths[index]]) for index in own}
        last = int(kept.numbers[-1]) if len(store) else -1
        self.assignments = (each for each in assignments(plan, len(prompts)) if each.number > last)
        self.fruitless = 0  # assignments in a row that brought nothing new
        self.upcoming: deque[Assignment] = deque()
        self.encoder = ThreadPoolExecutor(1, "encode")
        self.encoded: dict[int, array[int] | Future[array[int]]] = {}  # by the numbers of prompts
        self.open: deque[_Work] = deque()  # in the order of the assignments
        self.flying: dict[Request, _Work] = {}

    def submit(self) -> bool:
        """Keep the engine's queue longer than a step can empty. False: nothing is left to do."""
        rows = self.llm.resolved.max_requests
        while self.fruitless < len(self.prompts) + FRUITLESS:
            if len(self.flying) >= QUEUE * rows or len(self.open) >= BACKLOG * rows:
                break
            assignment = self._next()
            if assignment is None:
                break
            self._begin(assignment)
            if not self.flying:
                self.keep()
        return bool(self.flying)

    def collect(self) -> None:
        """Take what is finished."""
        for request in [request for request in self.flying if request.finish_reason is not None]:
            work = self.flying.pop(request)
            work.family = None
            if request.finish_reason is FinishReason.ERROR:
                continue
            if work.prompt is None:
                self._answer_own(work, request.output)
            else:
                work.answer = request.output

    def keep(self) -> None:
        """Put documents into the store, as far as all before them are done."""
        while self.open and self.open[0].family is None and self.answered < self.plan.tokens:
            if self._keep(self.open.popleft()):
                self.fruitless = 0
            else:
                self.fruitless += 1

    def abandon(self) -> None:
        """Leave nothing behind in the engine."""
        self.encoder.shutdown(cancel_futures=True)
        for work in self.flying.values():
            if work.family is not None:
                self.engine.parents[work.family.id] = work.family
                self.engine.abort(work.family.id)
        self.flying = {}

    def explain(self) -> None:
        if not self.documents:
            raise UserError(
                f"none of {len(self.prompts)} prompts was answered: those of more than {self.longest // 2} tokens are "
                "left out, so shorten them, or raise `longest`"
            )
        log.warning("%d tokens of answers, not %d: no new ones come", self.answered, self.plan.tokens)

    def _next(self) -> Assignment | None:
        """Prompts become tokens on a thread of their own, while the engine is busy with those before them."""
        while len(self.upcoming) < AHEAD and (found := next(self.assignments, None)) is not None:
            self.upcoming.append(found)
            if found.prompt != SELF_WRITTEN and found.prompt not in self.encoded:
                self.encoded[found.prompt] = self.encoder.submit(self._templated, self.prompts[found.prompt])
        return self.upcoming.popleft() if self.upcoming else None

    def _begin(self, assignment: Assignment) -> None:
        work = _Work(assignment)
        self.open.append(work)
        if self.turn is None or assignment.prompt != SELF_WRITTEN:
            self._answer(work, self._encoded(assignment.prompt))
            return
        params = SamplingParams(
            temperature=1.0,
            top_p=0.95,
            seed=mix(assignment.seed, 0),
            max_tokens=max(min(self.plan.max_new, self.longest // 2 - len(self.turn.opening)), 1),
            stop_token_ids=(self.turn.closing,),
        )
        self._generate(work, self.turn.opening, params)

    def _answer(self, work: _Work, prompt: array[int]) -> None:
        if not 0 < len(prompt) <= self.longest // 2:
            return
        work.prompt = prompt
        params = SamplingParams(
            temperature=work.assignment.temperature,
            top_p=work.assignment.top_p,
            seed=work.assignment.seed,
            max_tokens=min(self.plan.max_new, self.longest - len(prompt)),
        )
        self._generate(work, prompt, params)

    def _answer_own(self, work: _Work, written: list[int]) -> None:
        """Ask the target what it asked itself, in the words of its text, as a user would have."""
        assert self.turn is not None
        if written[-1] != self.turn.closing and written[-1] not in self.engine.end_tokens:
            return
        text = self.llm.tokenizer.decode(written[:-1]).strip()
        if text and "\ufffd" not in text and text not in self.texts:
            self._answer(work, self._templated(text))

    def _generate(self, work: _Work, prompt: Sequence[int], params: SamplingParams) -> None:
        # The engine makes text for the families that it knows, and that would cost more than all else here.
        work.family = self.engine.parents.pop(self.engine.add(prompt, params))
        self.flying[work.family.detokenizers[0].request] = work

    def _encoded(self, prompt: int) -> array[int]:
        found = self.encoded[prompt]
        if isinstance(found, Future):
            found = self.encoded[prompt] = found.result()
        return found

    def _templated(self, text: str) -> array[int]:
        if self.llm.tokenizer.chat_template is None:
            return array("I", self.llm.tokenizer.encode(text))
        return array("I", self.llm.chat_prompt([{"role": "user", "content": text}]))

    def _keep(self, work: _Work) -> bool:
        """Whether it brought anything new."""
        if work.prompt is None or not work.answer:
            return False
        tokens = np.array([*work.prompt, *work.answer], self.store.token)
        prompt = tokens[: len(work.prompt)]
        known = _digest(tokens)
        if known in self.seen:
            return False
        if work.assignment.prompt == SELF_WRITTEN:
            asked = _digest(prompt)
            if asked in self.seen_prompts:
                return False
            self.seen_prompts.add(asked)
        self.seen.add(known)
        assignment = work.assignment
        held_out = _share(prompt, self.plan.seed) < self.plan.held_out
        self.store.append(
            Document(tokens, len(prompt), assignment.number, assignment.prompt, assignment.temperature, held_out)
        )
        self.documents += 1
        self.answered += len(work.answer)
        return True


def _digest(tokens: NDArray[Any]) -> bytes:
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()


def _share(prompt: NDArray[Any], seed: int) -> float:
    """A number in [0, 1) that goes with the prompt, so that all its answers fall on one side."""
    drawn = hashlib.blake2b(prompt.tobytes(), digest_size=8, person=b"held out", salt=(seed % 2**64).to_bytes(8))
    return int.from_bytes(drawn.digest()) / 2**64


ROWS = {"cuda": 2048}  # requests that a device answers at once, where not as many as usual
STEP_TOKENS = {"cuda": 1 << 14}  # so that whoever is finished is followed at once, and all decode together again


def gather(job: Job, watch: Watcher) -> Store:
    """The answers to learn from: those that were made elsewhere, or as many of our own as are asked for."""
    if job.answers is not None:
        return made_elsewhere(job)
    plan = AnswerPlan(
        job.tokens,
        job.max_new,
        usual_ways(job.greedy),
        seed=job.seed,
        self_prompted=job.self_prompts,
        longest=max(job.length, 4),
    )
    prompts = read_prompts(job.prompts, job.skip_broken)
    folder = job.out / "answers"
    asked = {
        "model": card.target(job.model),
        "prompts": card.prompt_files(job.prompts),
        "prompt_count": len(prompts),
        "plan": asdict(plan),
    }
    if card.read(folder).get("asked") != as_read(asked):
        generate(job, prompts, plan, folder, watch)
        card.write(folder, {"asked": asked, **described(Store(folder))})
    return Store(folder)


def generate(job: Job, prompts: list[str], plan: AnswerPlan, folder: Path, watch: Watcher) -> None:
    """Its engine is gone when it returns, and with it the memory that it took."""
    watch.stage(f"answers of `{card.called(job.model)}` to {len(prompts)} prompts")
    backend = choose_backend(job.backend)
    rows = job.max_requests or ROWS.get(backend, EngineConfig.max_requests)
    llm = LLM(
        job.model,
        backend=backend,
        max_context=context_of(job.model, plan.longest),
        max_requests=rows,
        max_step_tokens=STEP_TOKENS.get(backend),
        seed=job.seed,
    )
    try:
        with Store(folder) as store:
            write_answers(llm, prompts, plan, store, watch.answers)
    finally:
        del llm
        gc.collect()
        open_device(backend).empty_cache()


def context_of(model: str, longest: int) -> int:
    """Whole pages for the longest document, as far as the model goes: the cache is to have no room for more."""
    pages = -(-longest // EngineConfig.page_size)
    return min(pages * EngineConfig.page_size, read_config(open_checkpoint(model).config).context)


def made_elsewhere(job: Job) -> Store:
    assert job.answers is not None
    inner = job.answers / "answers"
    store = Store(inner if (inner / "header.json").exists() else job.answers)
    if store.header is None or not len(store):
        raise UserError(f"`{job.answers}` holds no answers: pass the `--out` of a run with `--answers-only`")
    weights = weight_bytes(job.model)
    if store.header.weights != weights:
        raise UserError(
            f"the answers in `{job.answers}` are by `{card.called(store.header.model)}`, a model of "
            f"{store.header.weights} bytes, and `{job.model}` has {weights}: pass the model that wrote them"
        )
    return store


def described(store: Store) -> dict[str, Any]:
    """What a card says of the answers."""
    listed = store.documents()
    return {
        "documents": len(store),
        "held_out": int(listed.held_out.sum()),
        "tokens": int(listed.lengths.sum()),
        "answered": store.answered,
    }


def of_card(store: Store) -> dict[str, Any]:
    """All that is known of the answers, with what is written beside them; whose they are the card says itself."""
    asked = card.read(store.folder).get("asked", {})
    settings = {} if store.header is None else {"settings": dict(store.header.settings)}
    return {**{key: value for key, value in asked.items() if key != "model"}, **settings, **described(store)}
