"""Run the native kernels in random shapes: zero rows, one token, one column, contexts of thousands.

    python tools/fuzz_kernels.py --cases 1000                        the library as it is, against the reference
    python tools/fuzz_kernels.py --cases 1000 --sanitize build/san   the same with AddressSanitizer and UBSan in it

A case is determined by (seed, number): `--first N --cases 1` repeats it. Cases cycle through the instruction-set levels
of this machine, with one to three threads.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

import fuzz_library
from fuzz_memory import GuardedMemory
from outrider.errors import UserError
from outrider.kernels import reference
from outrider.kernels.cases import attention, drafter_inputs, layers
from outrider.kernels.cases import logits as logit_cases
from outrider.kernels.cases import verification as verify_cases
from outrider.kernels.cases.case import Case, difference
from outrider.kernels.cases.inputs import Shape
from outrider.kernels.quantization import FORMATS

ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65)
WIDTHS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 63, 65, 100, 130)
VOCABULARIES = (1, 1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 1000, 1023, 8193)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FAR = 4095  # positions of a long context
FEW = 1e-3  # least tolerance: with one column, a single rounded product is the result
OPTIONS = ("norm", "post_norm", "output_bias", "query_bias", "key_bias", "value_bias", "query_norm", "key_norm")


def kind_and_width(random: Random, widths: tuple[int, ...] = WIDTHS) -> tuple[str, int]:
    kind = random.choice(sorted(FORMATS))
    block = FORMATS[kind].elements
    return kind, random.choice(widths) if block == 1 else block * random.choice((1, 1, 2, 3))


def draw_shape(random: Random) -> tuple[str, Shape]:
    """Draw a format and the shape of a layer, whose widths are multiples of the block size."""
    kind = random.choice(("f32", "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_1"))
    kv_heads, group = random.choice((1, 1, 2, 3)), random.choice((1, 2, 3, 5))
    head_dim = random.choice((2, 4, 6, 8, 16, 24, 32, 40, 64, 80, 96, 128, 256))
    block = FORMATS[kind].elements
    width, inner = (random.choice((2, 6, 16, 33, 64, 100)) for _ in range(2))
    if block > 1:
        head_dim, width, inner = 32 * random.choice((1, 2, 3)), block * 2, block * 3
    return kind, Shape(width, kv_heads * group, kv_heads, head_dim, inner)


def draw_rows(random: Random) -> list[tuple[int, int]]:
    """Draw rows of (tokens in the cache, tokens in this step)."""
    contexts = (0, 0, 1, 15, 16, 17, 63, 64, 65, 300, FAR if random.random() < 0.1 else 255)
    return [(random.choice(contexts), random.choice((1, 1, 2, 5, 17))) for _ in range(random.choice((1, 1, 2, 6)))]


def draw_tree(random: Random, most: int) -> list[int]:
    return [-1, *(random.randrange(-1 if most > 20 else 0, node) for node in range(1, random.randrange(1, most)))]


def linear(random: Random) -> Case:
    kind, width = kind_and_width(random)
    return layers.linear(kind, random.choice(ROWS), random.choice(WIDTHS), width)


def norms(random: Random) -> Case:
    kind, width = kind_and_width(random)
    if random.random() < 0.5:
        return layers.rms_norm(random.choice(ROWS), random.choice(WIDTHS))
    return layers.norm_linear(kind, random.choice(ROWS), random.choice(WIDTHS), width)


def attend(random: Random) -> Case:
    kind, shape = draw_shape(random)
    options = random.sample(OPTIONS[1:3], random.randrange(3))
    window = random.choice((0, 0, 1, 2, 16, 17, 100))
    dtype, rows = random.choice(DTYPES), draw_rows(random)
    if random.random() < 0.3:
        causal = random.random() < 0.3
        return attention.attend_blocks(
            "", kind, dtype, rows, shape, options, window, cut=random.randrange(3), causal=causal
        )
    return layers.attend("", kind, dtype, rows, shape, options, window)


def attend_trees(random: Random) -> Case:
    kind, shape = draw_shape(random)
    rows = [(context, draw_tree(random, 40)) for context, _ in draw_rows(random)]
    return attention.attend_trees("", kind, random.choice(DTYPES), rows, shape, skip=random.choice((0, 0, 1, 3)))


def project(random: Random) -> Case:
    kind, shape = draw_shape(random)
    options = ["rotary"] * random.randrange(2) + random.sample(OPTIONS, random.randrange(len(OPTIONS)))
    return layers.project_qkv("", options, kind, random.choice(DTYPES), shape)


def mlp(random: Random) -> Case:
    kind, shape = draw_shape(random)
    options = random.sample(("norm", "post_norm", "gate_bias", "up_bias", "down_bias"), random.randrange(6))
    return layers.mlp(kind, random.choice(("silu", "gelu_tanh")), options, random.choice(ROWS), shape)


def logits(random: Random) -> Case:
    vocabulary, rows = random.choice(VOCABULARIES), random.choice((1, 2, 7))
    kind = random.choice(("plain", "ties"))
    if random.random() < 0.3:
        return logit_cases.mask_logits("", rows, vocabulary)
    count = random.choice((0, 1, vocabulary, max(vocabulary // 2, 1), min(vocabulary, 20)))
    if random.random() < 0.5:
        return logit_cases.top_logprobs(kind, count, rows, vocabulary)
    return logit_cases.sample_children(kind, max(count, 1), rows, vocabulary)


def sample(random: Random) -> Case:
    settings = [
        dict(random.choice(random.choice(list(logit_cases.SETTINGS.values())))) for _ in range(random.choice((1, 9)))
    ]
    return logit_cases.sample(random.choice(("", "ties", "banned")), settings, random.choice(VOCABULARIES))


def reject(random: Random) -> Case:
    vocabulary = random.choice(VOCABULARIES)
    kind = random.choice(("drawn", "certain", "mixed", "placeholders"))
    count = random.choice((1, 3, 9))
    if random.random() < 0.5:
        chains = [[*range(-1, random.randrange(20))] for _ in range(count)]
        return verify_cases.verify_rejection(kind, random.random() < 0.5, vocabulary, chains)
    trees = [draw_tree(random, 20) for _ in range(count)]
    return verify_cases.reject_tree(kind, random.random() < 0.5, vocabulary, trees)


def prepare(random: Random) -> Case:
    size = random.choice((1, 2, 16))
    return random.choice(
        (
            drafter_inputs.next_slots("", random.choice((1, 17, 100, 1000)), size, random.choice((0, 1, 2, 9))),
            drafter_inputs.draft_inputs("", random.choice((1, 2, 9)), random.random() < 0.5),
            drafter_inputs.next_tokens("", random.choice((-1, 2**31 - 1, -(2**31)))),
            drafter_inputs.block_inputs("", random.choice((0, 1, 15, 40)), random.choice((1, 50, 1000)), size),
            verify_cases.verify_exact(random.choice((1, 2, 50))),
        )
    )


DRAWS: tuple[Callable[[Random], Case], ...] = (
    linear, norms, attend, attend, attend_trees, project, mlp, logits, logits, sample, reject, prepare,
)  # fmt: skip


def attempt(number: int, seed: int) -> tuple[str, str]:
    """Run one case; return the operation and the error, empty if there is none."""
    from outrider.kernels import cpu
    from outrider.kernels.cpu import _native

    random = Random(f"{seed}/{number}")
    levels = _native.available_levels()
    _native.choose_level(levels[number % len(levels)])
    _native.set_thread_count(random.choice((1, 2, 3)))
    case = random.choice(DRAWS)(random)
    said = f"{case.op} {case.name} at {levels[number % len(levels)]}"
    try:
        expected = case.build(reference, number)(None)
        with GuardedMemory():
            run = case.build(cpu, number)
            found = run(None)
    except UserError as error:  # a size that the kernels refuse
        return "refused", "" if str(error) else said
    worst = max((difference(*pair) for pair in zip(found, expected, strict=True)), default=0.0)
    if worst > (max(case.at(levels[number % len(levels)]), FEW) if case.tolerance else 0.0):
        return case.op, f"{said}: differs by {worst:.2g}"
    if case.op not in ("draft_inputs", "block_inputs"):  # their inputs cannot be empty
        with GuardedMemory():
            run([])
    with GuardedMemory():
        again = run(None)
    if not all(torch.equal(*pair) for pair in zip(again, found, strict=True) if not pair[0].isnan().any()):
        return case.op, f"{said}: differs from run to run"
    return case.op, ""


def work(seed: int, numbers: range) -> int:
    started, done, wrong = time.perf_counter(), Counter[str](), []
    for number in numbers:
        try:
            operation, complaint = attempt(number, seed)
        except Exception:
            operation, complaint = "raised", traceback.format_exc()[-1500:]
        done[operation] += 1
        if complaint:
            wrong.append({"number": number, "said": complaint})
    seconds = round(time.perf_counter() - started, 1)
    whole = {"cases": len(numbers), "seconds": seconds, "operations": dict(sorted(done.items())), "failures": wrong}
    sys.stdout.write(json.dumps(whole, indent=2) + "\n")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the native kernels in odd shapes")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sanitize", type=Path, metavar="FOLDER", help="build with sanitizers there, and run that")
    parser.add_argument("--library", type=Path, help="the native library to load instead of the usual one")
    chosen = parser.parse_args()
    if chosen.sanitize:
        library = fuzz_library.build(chosen.sanitize)
        command = [sys.executable, __file__, "--library", str(library), "--seed", str(chosen.seed)]
        command += ["--first", str(chosen.first), "--cases", str(chosen.cases)]
        return subprocess.run(command, env=fuzz_library.environment()).returncode
    if chosen.library:
        fuzz_library.use(chosen.library)
    return work(chosen.seed, range(chosen.first, chosen.first + chosen.cases))


if __name__ == "__main__":
    sys.exit(main())
