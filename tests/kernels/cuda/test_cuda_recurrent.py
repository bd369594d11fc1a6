"""Recurrent layers on CUDA: every case, independence of rows, padding rows of a CUDA graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from carried import Carried
from outrider.kernels import Batch, Kernels, cuda, reference
from outrider.kernels.cases import Case, difference, inputs
from outrider.kernels.cases.recurrent import RECURRENT_CASES, Sizes, copy_states, random_states, recurrent, weights
from outrider.kernels.cuda.device import DEVICE

# The interpreter takes as long for a head of any size, so there are few heads and rows. Mamba-2 norms
# the heads of each key head.
SMALL = Sizes(heads=1, key_heads=1, head_dim=32, state_dim=12)
FEW = ((0, 0, 5), (31, 34, 0), (3, 5, 1))
CASES = [
    recurrent("delta rule", True, "q8_0", SMALL, lengths=FEW),
    recurrent("delta rule, trees", True, sizes=SMALL, trees=True, lengths=FEW),
    recurrent("Mamba-2", False, "bf16", replace(SMALL, heads=4, key_heads=2), lengths=FEW[1:]),
    *[case for case in RECURRENT_CASES if case.op == "copy_inputs"],
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}: {case.name}")
def test_recurrent_layers_agree_with_the_reference(case: Case, ops: Kernels, poisoned_memory: None) -> None:
    for found, meant in zip(case.build(ops, 1)(None), case.build(reference, 1)(None), strict=True):
        assert difference(found, meant) <= case.loose


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
def test_a_row_has_the_same_bits_in_any_batch(trees: bool) -> None:
    from outrider.kernels.cuda import batch_invariant

    run = recurrent("of a batch", True, "bf16", SMALL, trees, lengths=FEW).build(Carried(batch_invariant, DEVICE), 2)
    together = run(None)
    for items in ([1], [0, 2]):
        assert all(torch.equal(found, meant[items]) for found, meant in zip(run(items), together, strict=True))


def test_rows_that_pad_change_no_state(ops: Kernels) -> None:
    random = inputs.generator(4)
    of = weights(random, "f32", SMALL, True)
    layer, states = ops.recurrent_layer(of), random_states(random, of, 3)
    before = copy_states(states)
    ids = [torch.tensor(each, dtype=torch.int32) for each in ([0] * 4, [0] * 4, [-1] * 4, [0, 2, 2, 2], [[0]] * 3)]
    rows = torch.tensor([[1, 1, 1], [0, 0, 0], [0, 0, 0]], dtype=torch.int32)
    ops.recurrent(inputs.normal(random, 4, of.output.shape[0]), layer, Batch(*ids, states=rows), states)
    for name in ("states", "inputs", "lengths"):
        left, right = getattr(before, name), getattr(states, name)
        assert torch.equal(left[[0, 2]], right[[0, 2]])
        assert not torch.equal(left[1], right[1])


def test_a_batch_without_states_is_refused() -> None:
    of = weights(inputs.generator(4), "f32", SMALL, True)
    layer = cuda.recurrent_layer(of)
    states = random_states(inputs.generator(4), of, 3)
    with pytest.raises(ValueError, match="has no `states`"):
        cuda.recurrent(
            torch.zeros(0, of.output.shape[0]), layer, inputs.random_batch(inputs.generator(1), [(0, 1)]), states
        )
