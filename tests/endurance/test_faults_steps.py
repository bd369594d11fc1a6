"""A kernel raises, or memory runs out, at any call of any step: at most the request that ran alone ends, and says why.

A batch that fails is run again row by row, so a failure that occurs once in a batch has no effect; what fails over and
over on one request costs that one. Drafters that fail cost their own speculation.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from endurance.sabotage import CAUSE, ERRORS, LONG, METHODS, Fragile, Tight, Trap, check_nothing_left
from endurance.scenes import BASE, MIXED, PROMPTS, STEADY, alone, check_broken, check_most
from outrider import LLM, UserError, engine
from outrider.request import Row, Step

TRAPS: dict[str, Callable[[Fragile], Trap]] = {"kernels": lambda each: each.kernels, "memory": lambda each: each.memory}
FEW = 6  # places of each kind that the short form tries
KINDS = {"kernels": ("a kernel fails", "the device has no memory"), "memory": tuple(ERRORS)[1:]}


def calls(count: int) -> Iterable[int]:
    """Return the calls that fail: all, or the first, the last and some between, the same in each run."""
    if LONG or count <= FEW:
        return range(count)
    return sorted({0, count - 1, *random.Random(count).sample(range(count), FEW - 2)})


def cause(kind: str) -> str:
    return "MemoryError" if kind == "the host has no memory" else CAUSE


def sweep(llm: LLM, trap: Trap, kinds: tuple[str, ...], run: Callable[[str], object], times: int = 1) -> int:
    """Run with a fault at each call, with a cold and a warm cache; return how many faults were raised."""
    for _ in range(2):
        llm.engine.clear_cache()
        run("")  # steps are recorded at their second use, and take other calls from then on
    llm.engine.clear_cache()
    with trap.counting():
        run("")
    struck = 0
    for number, call in enumerate(calls(trap.count)):
        kind = kinds[number % len(kinds)]
        if number % 2:
            llm.engine.clear_cache()
        trap.arm(call, ERRORS[kind], times)
        try:
            run(kind)
        finally:
            struck += bool(trap.sprung)
            trap.rest()
        check_nothing_left(llm)
    return struck


@pytest.mark.parametrize("where", TRAPS)
@pytest.mark.parametrize("method", METHODS)
def test_one_fault_in_a_batch(fragile: Callable[..., Fragile], method: str, where: str) -> None:
    expected = alone(fragile().llm, MIXED)
    made = fragile(method)

    def run(kind: str) -> None:
        check_most(made.llm.generate(PROMPTS, MIXED), expected, cause(kind))

    assert sweep(made.llm, TRAPS[where](made), KINDS[where], run) >= FEW // 2
    run("")


@pytest.mark.parametrize("where", TRAPS)
@pytest.mark.parametrize("method", METHODS)
def test_one_fault_while_alone(fragile: Callable[..., Fragile], method: str, where: str) -> None:
    expected = alone(fragile().llm, MIXED)[1:2]
    made = fragile(method)
    broken = 0

    def run(kind: str) -> None:
        nonlocal broken
        found = check_most(made.llm.generate(PROMPTS[1:2], MIXED[1]), expected, cause(kind))
        assert found or method != "none" or not kind, "no request was left to try again"
        broken += found

    struck = sweep(made.llm, TRAPS[where](made), KINDS[where], run)
    assert 0 < broken <= struck


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("ngram", "medusa", "dspark")])
@pytest.mark.parametrize("where", TRAPS)
def test_one_fault_in_rounds_without_the_host(fragile: Callable[..., Fragile], method: str, where: str) -> None:
    expected = alone(fragile().llm, STEADY)
    made = fragile(method, decode_steps=4)
    runs = 0
    run_steps = made.llm.engine.runner.multi_step.run

    def counted(step: Step) -> object:
        nonlocal runs
        runs += 1
        return run_steps(step)

    def run(kind: str) -> None:
        way = slice(None, None, next(ways))  # others sit in each seat than in the run before
        check_most(made.llm.generate(PROMPTS[way], STEADY[way]), expected[way], cause(kind))

    ways = itertools.cycle([1, -1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made.llm.engine.runner.multi_step, "run", counted)
        assert sweep(made.llm, TRAPS[where](made), KINDS[where], run) >= FEW // 2
    run("")
    assert runs > FEW


@pytest.mark.parametrize("where", TRAPS)
@pytest.mark.parametrize("method", METHODS)
def test_what_stays_broken_ends_everybody_and_heals(fragile: Callable[..., Fragile], method: str, where: str) -> None:
    expected = alone(fragile().llm, MIXED)
    made = fragile(method)

    def run(kind: str) -> None:
        found = check_most(made.llm.generate(PROMPTS, MIXED), expected, cause(kind), broken=3)
        assert found or method != "none" or not kind  # else the last draft may have failed, which has no effect
        broken.append(found)

    broken: list[int] = []
    assert sweep(made.llm, TRAPS[where](made), KINDS[where], run, times=10**9) >= FEW // 2
    assert max(broken) == 3
    run("")
    assert broken[-1] == 0


SEAMS: dict[str, Callable[[LLM], tuple[object, str]]] = {
    "target": lambda llm: (llm.engine.runner, "_run_target"),
    "gather": lambda llm: (llm.engine.runner, "gather"),
    "prepare": lambda llm: (llm.engine.runner.sampler, "prepare"),
    "observe": lambda llm: (llm.engine.spec_manager, "observe"),
}


@pytest.mark.parametrize("seam", SEAMS)
@pytest.mark.parametrize("method", METHODS)
def test_a_request_that_breaks_every_step_it_is_in(fragile: Callable[..., Fragile], method: str, seam: str) -> None:
    """The other requests are not affected, at whichever step it begins and whichever request it is."""
    expected = alone(fragile().llm, MIXED)
    llm = fragile(method).llm
    call, name = SEAMS[seam](llm)
    llm.engine.runner.single_row.recordings.enabled = seam not in ("gather", "prepare")  # replays call neither
    whole = getattr(call, name)
    for culprit, begins in itertools.product(range(3), range(6)) if LONG else [(0, 0), (1, 1), (2, 2), (1, 5)]:

        def breaking(rows: list[Row], *rest: object) -> object:
            aboard = [row.request for row in rows if row.request.prompt == PROMPTS[culprit]]  # noqa: B023
            if any(len(request.output) >= begins for request in aboard):  # noqa: B023
                raise RuntimeError(CAUSE)
            return whole(rows, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(call, name, breaking)
            outputs = llm.generate(PROMPTS, MIXED)
        check_broken(outputs[culprit], expected[culprit])
        assert check_most(outputs, expected) == 1
        check_nothing_left(llm)
    llm.engine.runner.single_row.recordings.enabled = True
    assert check_most(llm.generate(PROMPTS, MIXED), expected, broken=0) == 0


def test_of_several_samples_one_may_break(fragile: Callable[..., Fragile], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = fragile().llm
    params = replace(BASE, temperature=0.9, n=3)
    whole = llm.generate([PROMPTS[0]], params)[0].completions
    run_target = llm.engine.runner._run_target

    def breaking(rows: list[Row], aux_layers: tuple[int, ...]) -> object:
        if any(row.request.index == 1 and len(row.request.output) == 4 for row in rows):
            raise RuntimeError(CAUSE)
        return run_target(rows, aux_layers)

    monkeypatch.setattr(llm.engine.runner, "_run_target", breaking)
    first, second, third = llm.generate([PROMPTS[0]], params)[0].completions
    assert [first, third] == [whole[0], whole[2]]
    assert (second.token_ids, second.finish_reason, second.stop_reason) == (whole[1].token_ids[:4], "error", CAUSE)
    check_nothing_left(llm)


@pytest.mark.parametrize("kind", tuple(ERRORS)[1:])
def test_memory_that_does_not_suffice_at_the_start(
    fragile: Callable[..., Fragile], tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The engine is not made, and the sentence says what would take less."""
    trap, open_device = Trap(), engine.open_device
    monkeypatch.setattr(engine, "open_device", lambda name: Tight(open_device(name), trap))
    LLM(str(tiny_folder()), backend="cpu")
    assert trap.count > 6
    for call in calls(trap.count):
        trap.arm(call, ERRORS[kind])
        with pytest.raises(UserError, match=r"more memory than .* lower `cache_tokens`"):
            LLM(str(tiny_folder()), backend="cpu")
