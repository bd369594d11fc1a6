"""The first stage of a run: generate the target's answers to prompts and store them.

Documents enter the store in the order of their tasks, not of their completion. So its content does not depend on the
batches, and a run that was killed resumes after the last document. The tasks depend only on the plan (`AnswerPlan`).
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...catalog.shipped import file_bytes
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
from ..io import card
from ..io.disk import as_read
from ..job import Job
from ..progress import ProgressReporter
from .prompts import read_prompts
from .store import Document, Store, StoreHeader

SamplingMode = tuple[float, float, float]  # temperature, top_p, fraction of the documents
DEFAULT_MODES: tuple[SamplingMode, ...] = ((0.0, 1.0, 0.5), (0.7, 0.95, 0.3), (1.0, 1.0, 0.2))
SELF_WRITTEN = -1
ORDER, MODE, NOISE, OWN = range(4)  # the use of a random number, mixed into its seed
FLUSH_SECONDS = 5.0  # between writes: the most that a kill loses
QUEUE = 2  # requests in the engine per row of a step, so that no row waits for the next one
BACKLOG = 16  # finished documents per row of a step that may wait for an earlier one
AHEAD = 1024  # prompts that are tokenized in advance
MAX_DUPLICATES = 256  # tasks in a row, in addition to one per prompt, without a new document before generation ends
MARK = "\u2068"  # placeholder that no chat template contains
log = logging.getLogger(__name__)
Progress = Callable[[int, int, int], None]  # documents, tokens of their answers, tokens wanted
# Of the engine, where generation of answers suits other values than the defaults.
MAX_REQUESTS = {"cuda": 2048}
STEP_TOKENS = {"cuda": 1 << 14}  # prefill new requests at once, so that the whole batch decodes again


@dataclass(frozen=True)
class AnswerPlan:
    """How many answers to generate, and how. The first documents do not depend on the number of tokens."""

    tokens: int  # of all answers
    max_new: int = 512  # tokens of one answer at most
    temperatures: tuple[SamplingMode, ...] = DEFAULT_MODES
    seed: int = 0
    held_out: float = 0.01  # fraction of the prompts
    self_prompted: float = 0.0  # fraction of the documents whose prompt the target writes itself
    longest: int = 1024  # tokens of a document; prompts of more than half of it are skipped

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("max_new", 1), ("seed", 0), ("longest", 4)):
            if getattr(self, name) < least:
                raise UserError(f"`{name}` is {getattr(self, name)}: it must be {least} or more")
        for name in ("held_out", "self_prompted"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"`{name}` is {getattr(self, name)}: it must be between 0 and 1")
        shares = [share for _, _, share in self.temperatures]
        if min(shares, default=-1.0) < 0 or sum(shares) <= 0:
            raise UserError(f"`temperatures` has the fractions {shares}: none may be negative, and one must be above 0")

    def settings(self) -> dict[str, Any]:
        """Return the settings that documents depend on: all but the number of tokens."""
        return {name: value for name, value in asdict(self).items() if name != "tokens"}


def default_modes(greedy: float) -> tuple[SamplingMode, ...]:
    """Return the default modes with another fraction of greedy answers; the others keep their proportion."""
    if not 0 <= greedy <= 1:
        raise UserError(f"`greedy` is {greedy}: it must be between 0 and 1")
    others = sum(share for temperature, _, share in DEFAULT_MODES if temperature > 0)
    return tuple(
        (temperature, top_p, share * (1 - greedy) / others if temperature > 0 else greedy)
        for temperature, top_p, share in DEFAULT_MODES
    )


@dataclass(frozen=True, slots=True)
class AnswerTask:
    """One document to generate."""

    number: int
    prompt: int  # its index; SELF_WRITTEN: the target writes it
    temperature: float
    top_p: float
    seed: int


def answer_tasks(plan: AnswerPlan, prompts: int) -> Iterator[AnswerTask]:
    """Yield all prompts once, in an order that depends on the seed, then all again, mixed with self-written ones.

    Ends when every prompt has its greedy answer and no other answers are wanted.
    """
    given = _given(plan, prompts)
    for number in itertools.count():
        own = _random(plan, OWN, number, 0)
        given_task = None if own / 2**63 < plan.self_prompted else next(given, None)
        if given_task is not None:
            yield AnswerTask(number, *given_task)
        elif plan.self_prompted:
            temperature, top_p = _choose_mode(plan, mix(own, MODE), greedy=True) or (0.0, 1.0)
            yield AnswerTask(number, SELF_WRITTEN, temperature, top_p, mix(own, NOISE))
        else:
            return


def _given(plan: AnswerPlan, prompts: int) -> Iterator[tuple[int, float, float, int]]:
    greedy = bytearray(prompts)  # 1: its greedy answer has been asked for; a second would be equal
    for sample in itertools.count():
        count = 0
        for prompt in sorted(range(prompts), key=lambda prompt: _random(plan, ORDER, prompt, sample)):
            mode = _choose_mode(plan, _random(plan, MODE, prompt, sample), greedy=not greedy[prompt])
            if mode is None:
                continue
            greedy[prompt] |= mode[0] == 0
            count += 1
            yield prompt, *mode, _random(plan, NOISE, prompt, sample)
        if not count:
            return


def _random(plan: AnswerPlan, use: int, index: int, sample: int) -> int:
    return mix(mix(mix(plan.seed, use), index), sample)


def _choose_mode(plan: AnswerPlan, random: int, greedy: bool) -> tuple[float, float] | None:
    """Choose temperature and top_p by their fractions. None: only greedy answers are wanted, and greedy is False."""
    modes = [mode for mode in plan.temperatures if mode[2] > 0 and (greedy or mode[0] > 0)]
    left = random / 2**63 * sum(share for _, _, share in modes)
    for temperature, top_p, share in modes:
        left -= share
        if left < 0:
            return temperature, top_p
    return modes[-1][:2] if modes else None


def write_answers(
    llm: LLM, prompts: list[str], plan: AnswerPlan, store: Store, progress: Progress | None = None
) -> None:
    """Generate until the store has `plan.tokens` tokens of answers, or no new answers come."""
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
class MessageFormat:
    """The tokens with which the chat template opens a user message, and the token that ends it."""

    opening: list[int]
    closing: int


def find_message_format(llm: LLM) -> MessageFormat:
    tokenizer = llm.tokenizer
    if tokenizer.chat_template is None:
        raise UserError(
            f"`{llm.resolved.model}` has no chat template, so it cannot write prompts: pass `--self-prompts 0`"
        )
    text = tokenizer.apply_chat([{"role": "user", "content": MARK}], add_generation_prompt=False)
    before, _, after = text.partition(MARK)
    opening, closing = (tokenizer.encode(part, add_special=False) for part in (before, after.lstrip()))
    ends = tokenizer.special_ids | llm.engine.end_tokens
    if not opening or not closing or closing[0] not in ends:
        raise UserError(
            f"the chat template of `{llm.resolved.model}` has no token that ends a user message, so it cannot write "
            "prompts: pass `--self-prompts 0`"
        )
    return MessageFormat(opening, closing[0])


def header(llm: LLM, prompts: list[str], plan: AnswerPlan) -> StoreHeader:
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(prompt.encode() + b"\0")
    context = {"longest": min(plan.longest, llm.resolved.max_context), "prompts": digest.hexdigest()}
    return StoreHeader(
        model=llm.resolved.model,
        weights=weight_bytes(llm.resolved.model),
        vocabulary=llm.engine.model.config.vocabulary,
        settings=plan.settings() | context,
    )


def weight_bytes(model: str) -> int:
    """Return the bytes of the model's files; 0: it has no files."""
    return 0 if is_random(model) else file_bytes(locate(model))


@dataclass(eq=False)
class _OpenDocument:
    """A task on its way to a document."""

    task: AnswerTask
    prompt: array[int] | None = None  # None: the target is writing it, or it cannot be used
    request: ParentRequest | None = None  # None: nothing is being generated
    answer: list[int] = field(default_factory=list)  # empty: there is none


class _Writer:
    def __init__(self, llm: LLM, prompts: list[str], plan: AnswerPlan, store: Store) -> None:
        self.llm, self.engine, self.prompts, self.plan, self.store = llm, llm.engine, prompts, plan, store
        self.longest = min(plan.longest, llm.resolved.max_context)
        self.format = find_message_format(llm) if plan.self_prompted else None
        store.claim(header(llm, prompts, plan))
        self.documents, self.answered = len(store), store.answered
        self.texts = {prompt.strip() for prompt in prompts}
        listed = store.documents()
        own = np.flatnonzero(listed.prompts == SELF_WRITTEN).tolist()
        self.seen = {_digest(store.tokens(index)) for index in range(len(store))}
        self.seen_prompts = {_digest(store.tokens(index)[: listed.prompt_lengths[index]]) for index in own}
        last = int(listed.numbers[-1]) if len(store) else -1
        self.tasks = (task for task in answer_tasks(plan, len(prompts)) if task.number > last)
        self.duplicates = 0  # tasks in a row without a new document
        self.upcoming: deque[AnswerTask] = deque()
        self.encoder = ThreadPoolExecutor(1, "encode")
        self.encoded: dict[int, array[int] | Future[array[int]]] = {}  # by index of the prompt
        self.open: deque[_OpenDocument] = deque()  # in the order of the tasks
        self.running: dict[Request, _OpenDocument] = {}

    def submit(self) -> bool:
        """Fill the queue of the engine beyond what a step can finish. Return False if nothing is left to do."""
        rows = self.llm.resolved.max_requests
        while self.duplicates < len(self.prompts) + MAX_DUPLICATES:
            if len(self.running) >= QUEUE * rows or len(self.open) >= BACKLOG * rows:
                break
            task = self._next()
            if task is None:
                break
            self._start(task)
            if not self.running:
                self.keep()
        return bool(self.running)

    def collect(self) -> None:
        """Take the finished requests from the engine."""
        for request in [request for request in self.running if request.finish_reason is not None]:
            work = self.running.pop(request)
            work.request = None
            if request.finish_reason is FinishReason.ERROR:
                continue
            if work.prompt is None:
                self._answer_own(work, request.output)
            else:
                work.answer = request.output

    def keep(self) -> None:
        """Store documents whose predecessors are all done."""
        while self.open and self.open[0].request is None and self.answered < self.plan.tokens:
            if self._keep(self.open.popleft()):
                self.duplicates = 0
            else:
                self.duplicates += 1

    def abandon(self) -> None:
        """Abort all requests that still run."""
        self.encoder.shutdown(cancel_futures=True)
        for work in self.running.values():
            if work.request is not None:
                self.engine.parents[work.request.id] = work.request
                self.engine.abort(work.request.id)
        self.running = {}

    def explain(self) -> None:
        if not self.documents:
            raise UserError(
                f"none of {len(self.prompts)} prompts was answered, those of more than {self.longest // 2} tokens are "
                "skipped: pass shorter prompts, or a larger `--length`"
            )
        log.warning("generated %d tokens of answers, not %d: no new answers come", self.answered, self.plan.tokens)

    def _next(self) -> AnswerTask | None:
        """Return the next task. A thread tokenizes prompts while the engine runs those before them."""
        while len(self.upcoming) < AHEAD and (task := next(self.tasks, None)) is not None:
            self.upcoming.append(task)
            if task.prompt != SELF_WRITTEN and task.prompt not in self.encoded:
                self.encoded[task.prompt] = self.encoder.submit(self._templated, self.prompts[task.prompt])
        return self.upcoming.popleft() if self.upcoming else None

    def _start(self, task: AnswerTask) -> None:
        work = _OpenDocument(task)
        self.open.append(work)
        if self.format is None or task.prompt != SELF_WRITTEN:
            self._answer(work, self._encoded(task.prompt))
            return
        params = SamplingParams(
            temperature=1.0,
            top_p=0.95,
            seed=mix(task.seed, 0),
            max_tokens=max(min(self.plan.max_new, self.longest // 2 - len(self.format.opening)), 1),
            stop_token_ids=(self.format.closing,),
        )
        self._generate(work, self.format.opening, params)

    def _answer(self, work: _OpenDocument, prompt: array[int]) -> None:
        if not 0 < len(prompt) <= self.longest // 2:
            return
        work.prompt = prompt
        params = SamplingParams(
            temperature=work.task.temperature,
            top_p=work.task.top_p,
            seed=work.task.seed,
            max_tokens=min(self.plan.max_new, self.longest - len(prompt)),
        )
        self._generate(work, prompt, params)

    def _answer_own(self, work: _OpenDocument, written: list[int]) -> None:
        """Let the target answer the prompt that it wrote, passed through the chat template as a user's would be."""
        assert self.format is not None
        if written[-1] != self.format.closing and written[-1] not in self.engine.end_tokens:
            return
        text = self.llm.tokenizer.decode(written[:-1]).strip()
        if text and "\ufffd" not in text and text not in self.texts:
            self._answer(work, self._templated(text))

    def _generate(self, work: _OpenDocument, prompt: Sequence[int], params: SamplingParams) -> None:
        # The engine detokenizes requests that it knows, which would cost more than all the rest here.
        work.request = self.engine.parents.pop(self.engine.add(prompt, params))
        self.running[work.request.detokenizers[0].request] = work

    def _encoded(self, prompt: int) -> array[int]:
        found = self.encoded[prompt]
        if isinstance(found, Future):
            found = self.encoded[prompt] = found.result()
        return found

    def _templated(self, text: str) -> array[int]:
        if self.llm.tokenizer.chat_template is None:
            return array("I", self.llm.tokenizer.encode(text))
        return array("I", self.llm.chat_prompt([{"role": "user", "content": text}]))

    def _keep(self, work: _OpenDocument) -> bool:
        """Store a document, and return whether it is new."""
        if work.prompt is None or not work.answer:
            return False
        tokens = np.array([*work.prompt, *work.answer], self.store.token)
        prompt = tokens[: len(work.prompt)]
        digest = _digest(tokens)
        if digest in self.seen:
            return False
        if work.task.prompt == SELF_WRITTEN:
            prompt_digest = _digest(prompt)
            if prompt_digest in self.seen_prompts:
                return False
            self.seen_prompts.add(prompt_digest)
        self.seen.add(digest)
        task = work.task
        held_out = _unit_hash(prompt, self.plan.seed) < self.plan.held_out
        self.store.append(Document(tokens, len(prompt), task.number, task.prompt, task.temperature, held_out))
        self.documents += 1
        self.answered += len(work.answer)
        return True


def _digest(tokens: NDArray[Any]) -> bytes:
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()


def _unit_hash(prompt: NDArray[Any], seed: int) -> float:
    """Hash the prompt to [0, 1), so that all its answers are held out or none."""
    hashed = hashlib.blake2b(prompt.tobytes(), digest_size=8, person=b"held out", salt=(seed % 2**64).to_bytes(8))
    return int.from_bytes(hashed.digest()) / 2**64


def prepare_answers(job: Job, watch: ProgressReporter) -> Store:
    """Return the store of answers: that of another run, or this run's, generated as far as it is missing."""
    if job.answers is not None:
        return answers_of_other_run(job)
    plan = AnswerPlan(
        job.tokens,
        job.max_new,
        default_modes(job.greedy),
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
        card.write(folder, {"asked": asked, **summary(Store(folder))})
    return Store(folder)


def generate(job: Job, prompts: list[str], plan: AnswerPlan, folder: Path, watch: ProgressReporter) -> None:
    """Generate answers, and free the engine's memory."""
    watch.stage(f"answers of `{card.model_name(job.model)}` to {len(prompts)} prompts")
    backend = choose_backend(job.backend)
    rows = job.max_requests or MAX_REQUESTS.get(backend, EngineConfig.max_requests)
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
    """Return the context for the longest document, in whole pages, at most the model's: the cache needs no more."""
    pages = -(-longest // EngineConfig.page_size)
    return min(pages * EngineConfig.page_size, read_config(open_checkpoint(model).config).context)


def answers_of_other_run(job: Job) -> Store:
    assert job.answers is not None
    inner = job.answers / "answers"
    store = Store(inner if (inner / "header.json").exists() else job.answers)
    if store.header is None or not len(store):
        raise UserError(f"`{job.answers}` holds no answers: pass the `--out` of a run with `--answers-only`")
    weights = weight_bytes(job.model)
    if store.header.weights != weights:
        raise UserError(
            f"the answers in `{job.answers}` were written by `{card.model_name(store.header.model)}`, a model of "
            f"{store.header.weights} bytes, and `{job.model}` has {weights}: pass the model that wrote them"
        )
    return store


def summary(store: Store) -> dict[str, Any]:
    """Count documents and tokens of the answers."""
    listed = store.documents()
    return {
        "documents": len(store),
        "held_out": int(listed.held_out.sum()),
        "tokens": int(listed.lengths.sum()),
        "answered": store.answered,
    }


def data_card(store: Store) -> dict[str, Any]:
    """Return the data section of a run card: plan, prompt files and counts. The target has its own section."""
    asked = card.read(store.folder).get("asked", {})
    settings = {} if store.header is None else {"settings": dict(store.header.settings)}
    return {**{key: value for key, value in asked.items() if key != "model"}, **settings, **summary(store)}
