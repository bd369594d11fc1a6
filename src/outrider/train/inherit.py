"""A student that begins with what one before it learnt. It may be deeper, and know other words."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .lesson import Student
from .loop import trained

BY_WORD = ("lm_head.weight", "embed_tokens.weight", "markov_head.markov_w2.weight")  # a row for each that is drafted
ADDS = ("o_proj.weight", "down_proj.weight")  # what a layer adds to the states goes through these
WORDS = "ids"


@torch.no_grad()
def inherit(student: Student, left: Mapping[str, Tensor], words: Tensor | None) -> list[str]:
    """Take over what is left of an earlier student that drafted `words` [U]; None: all tokens.

    Layers that it did not have add nothing at first, and words that it did not know begin as without it. Says which
    parameters do not fit.
    """
    own = {name: value for name, value in trained(student).items() if name != WORDS}
    unfit = [name for name in own if name in left and not _fits(name, own[name], left[name])]
    if unfit:
        return unfit
    for name, value in own.items():
        if name not in left:
            if name.endswith(ADDS):
                value.zero_()
        elif name in BY_WORD:
            known, found = _pairs(_words(student.drafted, value), _words(words, left[name]))
            value[known] = left[name].to(value)[found]
        else:
            value.copy_(left[name])
    return []


def _fits(name: str, own: Tensor, left: Tensor) -> bool:
    return own.shape[1:] == left.shape[1:] if name in BY_WORD else own.shape == left.shape


def _words(drafted: Tensor | None, table: Tensor) -> Tensor:
    """The tokens that the rows of a table stand for."""
    return torch.arange(len(table)) if drafted is None else drafted.cpu()


def _pairs(now: Tensor, then: Tensor) -> tuple[Tensor, Tensor]:
    """Of the words that both know, their rows in the new and in the old table."""
    rows = torch.full((int(max(now.max(), then.max())) + 1,), -1)
    rows[then] = torch.arange(len(then))
    known = (rows[now] >= 0).nonzero().flatten()
    return known, rows[now[known]]
