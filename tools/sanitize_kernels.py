"""Run every kernel of speculative decoding once on the GPU, in odd shapes and with padding, for a memory checker:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 python tools/sanitize_kernels.py

Without torch's caching allocator each tensor is its own allocation, so that out-of-bounds accesses are detected.
Results are compared with the reference.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.bench.kernels import Recorder
from outrider.kernels import Kernels, LayerPages, SamplingMetadata, VerifyInputs, cuda, reference
from outrider.kernels.cases import CASES, inputs
from outrider.kernels.cases.case import Case, difference
from outrider.kernels.cuda.device import DEVICE

DRAWING = ("sample", "sample_children", "expand_sampling", "verify_exact", "verify_synthetic", "verify_rejection")
PREPARING = ("next_tokens", "draft_inputs", "block_inputs", "next_slots", "copy_kv")
SLOW = "of 151936"  # cases that take too long under the checker
SEED, VOCABULARY, PAGE_SIZE, LIMIT = 3, 103, 4, 90
GARBAGE = 0x7FFFFF00  # the value of padding tokens


def main() -> int:
    started = time.perf_counter()
    wrong = []
    for op in (*DRAWING, *PREPARING):
        cases = [case for case in CASES if case.op == op and not case.timed and not case.name.endswith(SLOW)]
        wrong += [f"{op}: {case.name}" for case in cases if not agrees(case)]
        say(f"{op}: {len(cases)} cases, {time.perf_counter() - started:.1f} s")
    run_padded(cuda)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    say(f"padding, {time.perf_counter() - started:.1f} s")
    for name in wrong:
        say(f"differs from the reference: {name}")
    return 1 if wrong else 0


def agrees(case: Case) -> bool:
    pairs = zip(case.build(Recorder(cuda, DEVICE), SEED)(None), case.build(reference, SEED)(None), strict=True)
    return all(difference(found, meant) <= case.loose for found, meant in pairs)


def run_padded(ops: Kernels) -> None:
    """Five rows: of three tokens, of one, and three padding rows of a CUDA graph; two tokens belong to no row."""
    starts = integers([0, 3, 4, 4, 4, 4])  # [B + 1]
    tables = integers([[1, 0, 2], [3, -1, -1], [-1, -1, -1], [-1, -1, -1], [-1, -1, -1]])  # [B, P]
    tokens = integers([5, 6, 7, 8, GARBAGE, GARBAGE])  # [T]
    positions = integers([7, 8, 9, 0, GARBAGE, GARBAGE])
    following = ops.next_tokens(
        integers([[9, -1, -1], [4, -1, -1], [0, 0, 0], [GARBAGE, 0, 0], [-1, -1, -1]]),  # [B, width + 1]
        integers([2, 0, 2, 2, 2]),
        starts,
        integers([1, 2, 0, 0, GARBAGE]),
        torch.zeros(5, dtype=torch.uint8, device=DEVICE),
        VOCABULARY,
    )
    for extra, shift in ((1, True), (4, True), (1, False), (4, False)):
        ops.draft_inputs(tokens, positions, starts, following.ends, following.tokens, extra, shift, 1)
    for width in (0, 5, 15):
        ops.block_inputs(positions, starts, following.ends, following.tokens, tables, PAGE_SIZE, width, 1, LIMIT)
    for count in (1, 7):
        ops.next_slots(integers([9, 0, -1, GARBAGE, LIMIT]), tables, PAGE_SIZE, LIMIT, count)
    verify_padded(ops, starts)
    pages = [LayerPages(*torch.zeros(2, 4, 1, PAGE_SIZE, 3, device=DEVICE)) for _ in range(2)]  # [pages, G, S, D]
    ops.copy_kv(pages, integers([15, 0, 7]), integers([0, 15, 14]))


def verify_padded(ops: Kernels, starts: Tensor) -> None:
    random = inputs.generator(SEED)
    logits = torch.cat([inputs.normal(random, 4, VOCABULARY), torch.full((2, VOCABULARY), torch.nan)]).to(
        DEVICE
    )  # [R, V]
    drafts = VerifyInputs(
        starts,
        tokens=integers([-1, 6, 7, -1, GARBAGE, GARBAGE]),
        parents=integers([-1, 0, 1, -1, GARBAGE, GARBAGE]),
        width=2,
        logits=logits.clone(),
        drawn=torch.ones(6, dtype=torch.uint8, device=DEVICE),
    )
    choice = there(inputs.make_sampling([{"temperature": 0.7, "top_p": 0.9, "top_k": 9, "min_p": 0.01}] * 5, SEED))
    wide = ops.expand_sampling(replace(choice, epochs=choice.positions), drafts)
    sampled = ops.sample(logits, wide)
    ops.sample_children(logits, wide, 3)
    ops.verify_exact(sampled, drafts)
    ops.verify_synthetic(sampled, drafts, torch.tensor([0.5, 0.5], device=DEVICE), wide)
    for block in (False, True):
        ops.verify_rejection(logits, drafts, wide, block)


def there(choice: SamplingMetadata) -> SamplingMetadata:
    moved: dict[str, Any] = {
        name: value.to(DEVICE) for name, value in vars(choice).items() if isinstance(value, Tensor)
    }
    return replace(choice, **moved)


def integers(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
