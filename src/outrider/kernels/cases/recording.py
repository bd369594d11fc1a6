"""Cases of record. Items are rows. See case.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..protocol import Kernels
from . import inputs as make
from .case import TOLERANCE, Case, Run, listed

ROWS, WIDTH, TOKENS = 3, 64, 48


class NoRecorder:
    def end_depth(self, estimate: Tensor, is_logprob: bool = True) -> None:
        """Do nothing: a backend without recordings runs all depths."""


def record(name: str, kind: str) -> Case:
    """Record a norm, a matmul and copies over one input, and replay them over another."""

    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        matrix = ops.matrix(make.random_weight(random, kind, TOKENS, WIDTH))
        norm = ops.vector(make.normal(random, WIDTH))
        first, second = ops.vector(make.normal(random, ROWS, WIDTH)), ops.vector(make.normal(random, ROWS, WIDTH))

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            rows = listed(items, ROWS)
            x = first[rows]
            out = torch.zeros(len(rows), 2 * TOKENS, device=x.device)

            def compute(recorder: NoRecorder) -> None:
                scores = ops.linear(ops.rms_norm(x, norm, 1e-5), matrix)  # [rows, TOKENS]
                out.copy_(torch.cat([scores, scores + scores], 1))
                recorder.end_depth(x[0, :1])

            replay = ops.record(compute)
            x.copy_(second[rows])
            if replay is None:
                compute(NoRecorder())
            else:
                replay()
            return (out,)

        return run

    return Case("record", name, ROWS, TOLERANCE[kind], build)


RECORD_CASES = [record("f32 over another input", "f32"), record("q8_0 over another input", "q8_0")]
