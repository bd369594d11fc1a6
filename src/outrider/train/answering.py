"""The first stage of a run: prompts, and the target's answers to them, in a store."""

from __future__ import annotations

import gc
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..device import choose_backend, open_device
from ..errors import UserError
from ..llm import LLM
from ..models import read_config
from ..weights import open_checkpoint
from . import card
from .answers import weight_bytes, write_answers
from .assignments import AnswerPlan, usual_ways
from .disk import as_read
from .job import Job, Watcher
from .prompts import read_prompts
from .store import Store

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
