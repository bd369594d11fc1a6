"""A drafter of your own, in one file: guess that each token is followed by what followed it most often so far.

Any module with `Options` and `build` is a method, named by its import path: `LLM(model, speculate="package.module")`.
Whatever it guesses, the text stays the model's; a good guess only makes it come sooner. From the folder above this one:

    python -m examples.own_method
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.request import Request
from outrider.speculation import DraftBatch, DraftContext, MethodOptions, Needs, Target


@dataclass(frozen=True)
class Options(MethodOptions):  # each field is a key of `speculate="examples.own_method:key=value"`
    width: int = 3
    least: int = 1  # how often a follower must have been seen


class Followers:
    def __init__(self, options: Options, target: Target) -> None:
        self.needs = Needs(width=options.width)  # the engine makes room for so many; it asks for nothing else
        self.options = options
        self.known: dict[Request, int] = {}  # tokens of each text that were counted
        self.seen: dict[Request, defaultdict[int, Counter[int]]] = {}

    def propose(self, turns: Sequence[DraftContext], last: Tensor, hidden: Tensor | None) -> DraftBatch:
        return DraftBatch([self.draft(turn) for turn in turns])

    def draft(self, turn: DraftContext) -> list[int]:
        seen = self.seen.setdefault(turn.request, defaultdict(Counter))
        new = turn.tokens(max(self.known.get(turn.request, 0) - 1, 0), turn.length)
        self.known[turn.request] = turn.length
        for token, follower in pairwise(new):
            seen[token][follower] += 1
        draft: list[int] = []
        while len(draft) < turn.num_draft_tokens:  # 0 inside a prompt, and where drafts do not pay
            best = seen[draft[-1] if draft else new[-1]].most_common(1)
            if not best or best[0][1] < self.options.least:
                break
            draft.append(best[0][0])
        return draft

    def accept(self, requests: Sequence[Request], kept: Sequence[int]) -> None:
        """Only text that stands was counted, so there is nothing to take back."""

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.known.pop(request, None)
            self.seen.pop(request, None)


def build(options: Options, target: Target) -> Followers:
    return Followers(options, target)


def main() -> None:
    # The engine drops drafts that do not pay; `adaptive=no` checks them all, so that we see what they are worth.
    llm = LLM("smollm2-135m", speculate="examples.own_method:width=4,adaptive=no")
    prompt = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. Once more: Monday, Tuesday,"
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=64))
    assert output.stats is not None
    sys.stdout.write(f"{output.completions[0].text}\n\n{output.stats.speculation.mean_length:.2f} tokens a step\n")


if __name__ == "__main__":
    main()
