"""Write a drafting method of your own in one file: draft the token that followed the last token most often so far.

Any module with `Options` and `build` is a method, named by its import path: `LLM(model, speculate="package.module")`.
Drafts never change the text: the model verifies them, and accepted tokens save time. Run it from the repository root:

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
    least: int = 1  # how often a successor must have been seen to be drafted


class Successors:
    def __init__(self, options: Options, target: Target) -> None:
        self.needs = Needs(width=options.width)  # at most this many tokens; no hidden states, no KV cache
        self.options = options
        self.counted: dict[Request, int] = {}  # tokens of each text that are counted
        self.seen: dict[Request, defaultdict[int, Counter[int]]] = {}

    def propose(self, contexts: Sequence[DraftContext], last: Tensor, hidden: Tensor | None) -> DraftBatch:
        return DraftBatch([self.draft(context) for context in contexts])

    def draft(self, context: DraftContext) -> list[int]:
        seen = self.seen.setdefault(context.request, defaultdict(Counter))
        new = context.tokens(max(self.counted.get(context.request, 0) - 1, 0), context.length)
        self.counted[context.request] = context.length
        for token, successor in pairwise(new):
            seen[token][successor] += 1
        draft: list[int] = []
        while len(draft) < context.num_draft_tokens:  # 0 during prefill, and if drafts do not pay
            best = seen[draft[-1] if draft else new[-1]].most_common(1)
            if not best or best[0][1] < self.options.least:
                break
            draft.append(best[0][0])
        return draft

    def accept(self, requests: Sequence[Request], kept: Sequence[int]) -> None:
        """Do nothing: only accepted text was counted."""

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.counted.pop(request, None)
            self.seen.pop(request, None)


def build(options: Options, target: Target) -> Successors:
    return Successors(options, target)


def main() -> None:
    # By default the engine stops drafting when it does not pay; `adaptive=no` verifies every draft.
    llm = LLM("smollm2-135m", speculate="examples.own_method:width=4,adaptive=no")
    prompt = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. Once more: Monday, Tuesday,"
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=64))
    assert output.stats is not None
    rate = output.stats.speculation.tokens_per_step
    sys.stdout.write(f"{output.completions[0].text}\n\n{rate:.2f} tokens per step\n")


if __name__ == "__main__":
    main()
