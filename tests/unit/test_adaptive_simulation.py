"""The width by measured cost, in a simulated engine: as good as the best fixed width, and never under plain."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

import pytest
from simulated_engine import Drafter, Noise, Simulation, write

from outrider.request import Request
from outrider.speculation.adaptive import AdaptiveController
from outrider.types import Draft, SamplingParams

Alpha = Callable[[float], float]


def flat(requests: int, drafted: int) -> float:
    """Tiles of sixteen rows: the first is nearly free."""
    rows = requests + drafted
    return 1 + 0.2 * (min(rows, 16) - 1) / 15 + 0.06 * max(rows - 16, 0)


def steep(requests: int, drafted: int) -> float:
    return 1 + 0.5 * (requests + drafted - 1)


def stairs(requests: int, drafted: int) -> float:
    """What a machine does that pads its rows."""
    rows = requests + drafted
    edges = {8: 1.0, 16: 1.15, 32: 1.4, 64: 1.9}
    return next((cost for edge, cost in edges.items() if rows <= edge), 1.9 + 0.9 * ((rows - 1) // 64))


def each(seconds: float) -> Callable[[int], float]:
    return lambda width: seconds * width


def block(seconds: float) -> Callable[[int], float]:
    return lambda width: seconds if width else 0.0


COSTS = {"flat": flat, "steep": steep, "stairs": stairs}
DRAFTERS = {
    "lookup": Drafter(8),
    "sure lookup": Drafter(8, confidence=lambda rate: rate**0.5),
    "cheap chain": Drafter(8, each(0.05)),
    "dear chain": Drafter(8, each(0.3)),
    "sure chain": Drafter(8, each(0.1), confidence=lambda rate: rate),
    "boastful chain": Drafter(8, each(0.1), confidence=lambda rate: 0.5 + rate / 2),
    "modest chain": Drafter(8, each(0.1), confidence=lambda rate: rate**2.5),
    "block": Drafter(8, block(0.3)),
    "sure block": Drafter(8, block(0.2), confidence=lambda rate: rate),
    "tree": Drafter(12, lambda width: 0.1 * min(width, 4), tree=True),
    "sure tree": Drafter(12, lambda width: 0.1 * min(width, 4), tree=True, confidence=lambda rate: rate),
}
TEXTS: dict[str, list[Alpha]] = {
    "easy": [lambda far: 0.9],
    "hard": [lambda far: 0.2],
    "useless": [lambda far: 0.02],
    "up": [lambda far: 0.05 if far < 0.5 else 0.9],
    "down": [lambda far: 0.9 if far < 0.5 else 0.05],
    "mixed": [lambda far: 0.9, lambda far: 0.05],
}


# Drafters that rest: to wake them takes time as well.
LAZY = {
    "lazy chain": Drafter(4, each(0.15), waking=0.4),
    "lazy sure chain": Drafter(4, each(0.15), confidence=lambda rate: rate, stops=True, waking=0.4),
    "lazy modest chain": Drafter(4, each(0.15), confidence=lambda rate: rate**2, stops=True, waking=0.4),
    "lazy block": Drafter(8, lambda width: 0.15 * (width > 0) + 0.1 * width, confidence=lambda rate: rate, waking=0.3),
    "lazy tree": Drafter(
        8, lambda width: 0.1 * min(width, 4), tree=True, confidence=lambda rate: rate, stops=False, waking=0.4
    ),
}
DRAFTERS |= LAZY


def simulation(costs: str, drafter: str, text: str, batch: int = 1, length: int = 3000, seed: int = 0) -> Simulation:
    chosen, kinds = DRAFTERS[drafter], TEXTS[text]
    spread = 0.5 if chosen.confidence is not None else 0.0
    found = 0.7 if "lookup" in drafter else 1.0
    texts = [write(length, kinds[row % len(kinds)], 1000 * seed + row, spread, found) for row in range(batch)]
    return Simulation(texts, chosen, COSTS[costs], Noise(seed + 1))


def tokens_per_second(made: Simulation, widths: range) -> dict[int, float]:
    return {width: made.fixed(width) for width in widths}


@pytest.mark.parametrize(
    "costs, drafter, text",
    [
        ("flat", "lookup", "easy"),
        ("flat", "lookup", "up"),
        ("steep", "lookup", "hard"),
        ("stairs", "sure lookup", "down"),
        ("flat", "cheap chain", "useless"),
        ("steep", "cheap chain", "easy"),
        ("stairs", "cheap chain", "up"),
        ("flat", "dear chain", "easy"),
        ("flat", "dear chain", "hard"),
        ("stairs", "dear chain", "down"),
        ("flat", "sure chain", "hard"),
        ("steep", "sure chain", "up"),
        ("stairs", "boastful chain", "easy"),
        ("flat", "boastful chain", "useless"),
        ("steep", "modest chain", "easy"),
        ("flat", "block", "easy"),
        ("stairs", "block", "hard"),
        ("steep", "sure block", "useless"),
        ("flat", "tree", "easy"),
        ("stairs", "sure tree", "up"),
    ],
)
def test_one_request_is_as_fast_as_with_the_best_width(costs: str, drafter: str, text: str) -> None:
    made = simulation(costs, drafter, text)
    got = made.controlled(AdaptiveController())
    fixed = tokens_per_second(made, range(made.drafter.width + 1))
    assert got >= 0.97 * max(fixed.values())
    assert got >= 0.99 * fixed[0]


@pytest.mark.parametrize(
    "costs, drafter, text, batch, length",
    [
        ("flat", "lookup", "easy", 4, 2000),
        ("stairs", "cheap chain", "mixed", 4, 1500),
        ("steep", "block", "useless", 4, 800),
        ("stairs", "sure chain", "mixed", 16, 800),
        ("stairs", "lookup", "up", 16, 1000),
        ("steep", "dear chain", "hard", 16, 800),
        ("stairs", "cheap chain", "easy", 64, 1000),
        ("flat", "sure lookup", "mixed", 64, 300),
    ],
)
def test_a_batch_is_as_fast_as_with_the_best_width(
    costs: str, drafter: str, text: str, batch: int, length: int
) -> None:
    made = simulation(costs, drafter, text, batch, length)
    got = made.controlled(AdaptiveController())
    fixed = tokens_per_second(made, range(made.drafter.width + 1))
    assert got >= 0.97 * max(fixed.values())
    assert got >= 0.99 * fixed[0]


def test_requests_that_differ_get_widths_that_differ() -> None:
    made = simulation("stairs", "cheap chain", "mixed", 16, 800)
    assert made.controlled(AdaptiveController()) > 1.1 * max(tokens_per_second(made, range(9)).values())


def test_a_text_that_changes_is_followed_both_ways() -> None:
    for text in ("up", "down"):
        made = simulation("flat", "dear chain", text)
        assert made.controlled(AdaptiveController()) > 1.05 * max(tokens_per_second(made, range(9)).values())


@pytest.mark.parametrize("suspendable", [(), ("some",)])
def test_an_easy_text_is_drafted_for_at_once_by_an_expensive_drafter(suspendable: tuple[str, ...]) -> None:
    """Measured costs of a 0.5B draft for a 1.5B target: drafts pay only if nearly all of their tokens are accepted."""
    verification = [1, 1.43, 1.79, 2.15, 2.38]
    drafter = Drafter(4, lambda width: 0.08 + 0.35 * width if width else 0.0, waking=0.4)
    ratios = []
    for seed in range(8):
        texts = [write(160, lambda far: 0.99, seed)]
        made = Simulation(texts, drafter, lambda requests, drafted: verification[min(drafted, 4)] + max(drafted - 4, 0))
        ratios.append(made.controlled(AdaptiveController(*suspendable)) / made.fixed(4))
    assert mean(ratios) > 0.88


@pytest.mark.parametrize("suspendable", [(), ("some",)])
def test_drafts_that_are_accepted_but_take_too_long_are_not_repeated(suspendable: tuple[str, ...]) -> None:
    texts = [write(3000, TEXTS["easy"][0], 0)]
    made = Simulation(texts, Drafter(4, each(3.0)), flat)
    assert made.controlled(AdaptiveController(*suspendable)) >= 0.98 * made.fixed(0)


@pytest.mark.parametrize("text", ["easy", "useless"])
def test_a_machine_that_becomes_twice_as_slow_changes_no_choice(text: str) -> None:
    made = simulation("flat", "cheap chain", text)
    made.noise.slower = 2.0
    assert made.controlled(AdaptiveController()) >= 0.96 * max(tokens_per_second(made, range(9)).values())


def test_a_machine_that_was_busy_at_start_up_is_noticed_in_the_first_text() -> None:
    """Drafts look cheap then, beside steps without drafts that took 1.6 times as long as they do now."""
    verification = [
        1,
        1.12,
        1.3,
        1.49,
        1.77,
    ]  # a 0.5B draft for a 1.5B target, with drafts that seem better than they are
    drafter = Drafter(4, each(0.48), confidence=lambda rate: min(1.4 * rate, 0.99), stops=True)
    ratios = []
    for seed in range(8):
        texts = [write(256, lambda far: 0.5, seed, spread=0.3)]
        made = Simulation(texts, drafter, lambda requests, drafted: verification[drafted], measured=False)
        controller = AdaptiveController("some")
        controller.latency.begin({drafted: 1.6 * verification[drafted] for drafted in (0, 1, 2, 4)})
        for width in (0, 1, 4):
            controller.draft_latency("some").observe(width, 0.48 * width)
        ratios.append(made.controlled(controller))
    assert mean(ratios) > 0.87, "0.8 if start-up counts as much as five steps"


def test_costs_that_were_not_measured_at_start_are_learned() -> None:
    made = simulation("stairs", "cheap chain", "easy")
    made.measured = False
    assert made.controlled(AdaptiveController()) >= 0.96 * max(tokens_per_second(made, range(9)).values())


def test_easy_texts_are_drafted_far_and_others_hardly_ever() -> None:
    easy, useless = (simulation("flat", "cheap chain", text) for text in ("easy", "useless"))
    for made in (easy, useless):
        made.controlled(AdaptiveController())
    assert easy.widths.most_common(1)[0][0] >= 6
    assert useless.widths[0] > 0.8 * useless.widths.total()


@pytest.mark.parametrize(("following", "gone"), [(0.2, True), (0.01, False)])
def test_who_is_not_asked_for_long_and_dear_to_follow_is_let_go(following: float, gone: bool) -> None:
    params = SamplingParams(max_tokens=1000)  # 0.6 % of them are 6 steps
    controller, request = AdaptiveController(), Request("r", [1], params, 0, method="m")
    for _ in range(9):
        for drafted in (0, 1, 3):
            controller.latency.observe(1, drafted, 1.0 + drafted)  # a further row costs a whole pass
            controller.draft_latency("m").observe(drafted, following + drafted)
    steps = 0
    while steps < 400 and not controller.should_drop(request, 1):
        steps += 1
        width = controller.plan([request], [3])[0]
        if width:
            controller.learn(request, Draft([1] * width), [])
    assert 24 <= steps < 64 if gone else steps == 400


@pytest.mark.parametrize("drafter", list(LAZY))
@pytest.mark.parametrize("text", list(TEXTS))
@pytest.mark.parametrize("costs", ["flat", "steep", "stairs"])
def test_a_drafter_that_rests_is_as_fast_as_with_the_best_width(costs: str, drafter: str, text: str) -> None:
    made = simulation(costs, drafter, text)
    got = made.controlled(AdaptiveController("some"))
    fixed = tokens_per_second(made, range(made.drafter.width + 1))
    # What would gain a few hundredths may be missed by those that look seldom; what loses is not done.
    assert got >= (0.94 if text == "hard" else 0.97) * max(fixed.values())
    assert got >= 0.98 * fixed[0]
