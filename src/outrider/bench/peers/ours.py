"""Our own engine among the peers: with which method it speculates, and what it must not remember."""

from __future__ import annotations

from ...weights import shipped
from .roster import OURS, WORKERS, Peer

LEARNED = ("eagle3", "dspark", "dflash", "medusa", "mtp", "draft_model")  # methods with heads, the likeliest best first
FALLBACK = "suffix"  # needs nothing


def ours(speculate: str) -> Peer:
    """speculate: as the user writes it; `none`: plain decoding alone."""
    return Peer(OURS, WORKERS / "with_outrider.py", "given", speculation="" if speculate == "none" else speculate)


def default_method(model: str) -> str:
    """What ships for the model, else what every model can have."""
    found = [method for method in LEARNED if shipped.find(model, method) is not None]
    return (found or [FALLBACK])[0]


def forgetful(speculate: str) -> str:
    """Prompts come again, plainly, in batches and in each round: earlier answers to them may be no help."""
    method, _, settings = speculate.partition(":")
    if "suffix" not in method.split("+") or "cached_requests=" in settings:
        return speculate
    return f"{method}:{','.join(filter(None, [settings, 'cached_requests=0']))}"
