"""Our own engine among the peers: with which method it speculates, and what it must not remember."""

from __future__ import annotations

import json
from pathlib import Path

from ...speculation import available
from ...speculation.configure import read
from ...weights import shipped
from ..drafters import with_settings
from .roster import OURS, WORKERS, Peer

FALLBACK = "suffix"  # needs nothing


def ours(speculate: str) -> Peer:
    """speculate: as the user writes it; `none`: plain decoding alone."""
    return Peer(OURS, WORKERS / "with_outrider.py", "given", speculation="" if speculate == "none" else speculate)


def default_method(model: str) -> str:
    """What ships for the model, of several the one whose training promised most; else what every model can have."""
    found = {method: path for method in available() if (path := shipped.find(model, method)) is not None}
    return max(found, key=lambda method: promised(found[method]), default=FALLBACK)


def promised(head: Path) -> float:
    """Tokens a step over held-out text, by the card beside the weights; 0 where it does not tell."""
    card = (head if head.is_dir() else head.parent) / shipped.CARD
    try:
        return float(json.loads(card.read_text(encoding="utf-8"))["head"]["held_out"]["length"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def forgetful(speculate: str) -> str:
    """Prompts come again, plainly, in batches and in each round: earlier answers to them may be no help."""
    looks_back = "suffix" in read(speculate)[0].split("+")
    return with_settings(speculate, cached_requests="0") if looks_back else speculate
