"""Map the vocabulary of a draft model to the target's: shared tokens, and translation of ids and logits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..device import Device
from ..errors import UserError
from ..tokenizer import Tokenizer
from ..tokenizer.tokenizer import from_byte_level

TARGET_IDS, UNKNOWN = "target_ids", "unknown_token_id"  # keys of a draft model that knows some of its target's tokens
FEWEST = 100  # shared tokens below which a draft model is refused: its drafts would hardly be accepted
BYTE_LEVEL, PIECES = "\u0120", "\u2581"  # how the two families of tokenizers spell a space
NAMED_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class Pairs:
    """Tokens that both vocabularies have: target[i] is draft[i]."""

    target: list[int]
    draft: list[int]


def same_ids(target: Tokenizer, draft: Tokenizer | None, target_size: int, draft_size: int) -> Pairs:
    """Pair every id that both models have, if it spells the same token. Sizes may differ by padding."""
    shared = range(min(target_size, draft_size))
    if draft is not None:
        _refuse_other_words(target, draft, shared)
    elif target_size != draft_size:
        raise UserError(
            f"its vocabulary has {draft_size} tokens and the target's {target_size}, and it has no tokenizer "
            "to compare them by: put its `tokenizer.json` beside its weights"
        )
    return Pairs(list(shared), list(shared))


def _refuse_other_words(target: Tokenizer, draft: Tokenizer, shared: range) -> None:
    """Refuse a draft model in which an id spells another token than in the target."""
    for token in shared:
        theirs, own = target.spelling(token), draft.spelling(token)
        if theirs is not None and own is not None and theirs != own:
            raise UserError(
                f"token {token} is `{own}` in its vocabulary and `{theirs}` in the target's: "
                "pass `vocabulary=strings`, or pick a draft model of the target's family"
            )


def listed_ids(config: Mapping[str, Any], target_size: int, draft_size: int) -> Pairs:
    """The tokens that a draft model lists as its own: it was trained for this target, on some of its tokens."""
    ids = config[TARGET_IDS]
    whole = isinstance(ids, list) and all(type(token) is int for token in ids)
    if not whole or len(ids) != draft_size or any(later <= token for token, later in pairwise(ids)):
        raise UserError(f"its `{TARGET_IDS}` are no {draft_size} rising ids, one for each of its words: fetch it again")
    if ids[0] < 0 or ids[-1] >= target_size:
        raise UserError(
            f"its words are tokens of its target up to {ids[-1]}, but this target has {target_size}: "
            "pick a draft model that was made for it"
        )
    return Pairs(ids, list(range(draft_size)))


def same_strings(target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int) -> Pairs:
    """Pair every text that is one token in both vocabularies."""
    theirs, own = _texts(target, target_size), _texts(draft, draft_size)
    shared = [text for text in theirs if text in own]
    if len(shared) < FEWEST:
        raise UserError(
            f"its vocabulary shares {len(shared)} tokens with the target's, fewer than {FEWEST}: "
            "pick a draft model whose tokens are more like the target's"
        )
    return Pairs([theirs[text] for text in shared], [own[text] for text in shared])


class Translation:
    """Translate the target's ids to the draft model's, and the draft model's logits to the target's ids."""

    def __init__(
        self, pairs: Pairs, target_size: int, draft_size: int, fallback: int | None, mask: int | None, device: Device
    ) -> None:
        """Take `fallback`, the id for tokens that the draft model lacks, and `mask`, its mask token if any."""
        lacking = target_size - len(pairs.target)
        if lacking and fallback is None:
            raise UserError(
                f"it lacks {lacking} of the target's tokens and has neither an unknown nor an end token to read in "
                "their place: pick a draft model that names its end token"
            )
        # An id above the vocabulary: the mask id of the draft model may be an ordinary token of the target.
        self.mask = -1 if mask is None else target_size
        self.target_size = target_size
        self._identical = pairs.target == pairs.draft == list(range(target_size)) and target_size == draft_size
        read = [fallback or 0] * target_size
        for theirs, own in zip(pairs.target, pairs.draft, strict=True):
            read[theirs] = own
        plain = read == list(range(target_size)) and mask is None
        self.ids = None  # [shared]: set if the pairs cover the draft vocabulary in order
        if pairs.draft == list(range(draft_size)) and pairs.target == sorted(pairs.target) and not self._identical:
            self.ids = torch.tensor(pairs.target, device=device.torch_device)
        self._read = None if plain else torch.tensor([*read, mask or 0], dtype=torch.int32, device=device.torch_device)
        self._target = torch.tensor(pairs.target, device=device.torch_device)  # [shared]
        self._draft = torch.tensor(pairs.draft, device=device.torch_device)

    def read(self, tokens: Tensor) -> Tensor:
        """Translate ids of the target, or `mask`, [T] to ids of the draft model [T] int32."""
        return tokens if self._read is None else torch.index_select(self._read, 0, tokens)

    def say(self, logits: Tensor) -> Tensor:
        """Translate logits [R, draft vocabulary] to [R, V]; -inf for tokens that the draft model lacks."""
        if self._identical:
            return logits
        target_logits = logits.new_full((logits.shape[0], self.target_size), -torch.inf)
        target_logits[:, self._target] = logits if self.ids is not None else logits[:, self._draft]
        return target_logits


def _texts(tokenizer: Tokenizer, size: int) -> dict[tuple[bool, bytes], int]:
    """Map (is special, text) of each token to its id; the lowest id if two tokens have the same text."""
    first = tokenizer.encode(" a", add_special=False)[:1]
    probe = (tokenizer.spelling(first[0]) or "") if first else ""
    ids: dict[tuple[bool, bytes], int] = {}
    for token in range(size):
        spelling = tokenizer.spelling(token)
        if spelling is not None:
            ids.setdefault((token in tokenizer.special_ids, _text(spelling, probe[:1])), token)
    return ids


def _text(spelling: str, space: str) -> bytes:
    """Return the bytes of a token; `space` is how its tokenizer spells a space."""
    if space == BYTE_LEVEL:
        return from_byte_level(spelling)
    if named := NAMED_BYTE.fullmatch(spelling):
        return bytes([int(named[1], 16)])
    spelling = spelling.replace(PIECES, " ")
    return (spelling if space == PIECES else spelling.replace(BYTE_LEVEL, " ")).encode()
