"""Choose the method of `speculate="auto"`: by its figure the fastest one on this backend that the model has.

The figures below decide, not the order of the lines. A method whose figure is not above plain decoding is never
chosen. If a kernel or a drafter changes, measure again (`outrider bench speculation`) and change the figures;
docs/choose.md repeats them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import catalog
from ..catalog import shipped
from ..errors import UserError

AUTO, PLAIN = "auto", "none"


@dataclass(frozen=True)
class Candidate:
    """A method and its speed. It needs nothing, a shipped head, MTP modules, or a pulled draft model."""

    method: str
    speed: float  # of plain decoding; batch 1, greedy, adaptive width, mean of the prompt sets
    ships: bool = False  # it needs a shipped head
    inside: bool = False  # it needs MTP modules in the checkpoint of the model
    target: str = ""  # catalog name of the model that `draft_model` was measured with
    draft_model: str = ""  # catalog name

    def specification(self, model: str, modules: bool) -> str | None:
        """Return the method as `speculate` names it; None if `model` does not have what it needs."""
        if self.inside:
            return self.method if modules else None
        if self.draft_model:
            usable = _is_catalog_model(model, self.target) and catalog.is_pulled(self.draft_model)
            return f"{self.method}:model={self.draft_model}" if usable else None
        return None if self.ships and shipped.find(model, self.method) is None else self.method


# By backend; on the CPU by instruction-set level, where one has a line of its own. amx, avx512: two threads of a Xeon,
# the latter with VNNI; `draft_model` with AMX: 16 threads, HumanEval alone. cpu: two cores of Neoverse-N1. cuda: an
# H200. `suffix` is no candidate, although it is as fast as `ngram`: it drafts from the answers of other requests, and a
# client that asks for a trace sees all drafts. `mtp`: the figures of other engines (CPU: OpenVINO; GPU: SGLang,
# DeepSeek-R1), because no checkpoint with trained modules was at hand.
CANDIDATES: Mapping[str, tuple[Candidate, ...]] = {
    "amx": (
        Candidate("dspark", 1.51, ships=True),
        Candidate("ngram", 1.29),
        Candidate("mtp", 1.28, inside=True),
        Candidate("eagle3", 1.27, ships=True),
        Candidate("draft_model", 1.21, target="qwen2.5-coder-1.5b", draft_model="qwen2.5-coder-0.5b"),
    ),
    "avx512": (
        Candidate("dspark", 1.33, ships=True),
        Candidate("mtp", 1.28, inside=True),
        Candidate("ngram", 1.15),
        Candidate("eagle3", 1.12, ships=True),
        Candidate("draft_model", 0.978, target="qwen2.5-coder-1.5b", draft_model="qwen2.5-coder-0.5b"),
    ),
    "cpu": (
        Candidate("mtp", 1.28, inside=True),
        Candidate("ngram", 1.04),
        Candidate("dspark", 1.00, ships=True),
        Candidate("eagle3", 0.99, ships=True),
        Candidate("draft_model", 0.978, target="qwen2.5-coder-1.5b", draft_model="qwen2.5-coder-0.5b"),
    ),
    "cuda": (
        Candidate("mtp", 1.76, inside=True),
        Candidate("dspark", 1.64, ships=True),
        Candidate("ngram", 1.35),
        Candidate("eagle3", 1.26, ships=True),
    ),
}


def is_auto(speculate: str) -> bool:
    """Return whether `speculate` leaves the method to `choose`; refuse options beside it."""
    method, colon, _ = speculate.strip().partition(":") if isinstance(speculate, str) else ("", "", "")
    if method == AUTO and colon:
        raise UserError(f"`speculate` is `{speculate}`: `auto` chooses the options too, so name a method to set them")
    return method == AUTO


def choose(model: str, backend: str, modules: bool = False, always_draft: bool = False) -> str:
    """Return the fastest method that `model` has on `backend`, as `speculate` names it; `none` if none is faster.

    modules: the checkpoint of the model contains MTP modules.
    always_draft: take it even if it is slower than plain decoding.
    """
    usable = [candidate for candidate in _measured(backend) if always_draft or candidate.speed > 1]
    for candidate in sorted(usable, key=lambda candidate: -candidate.speed):
        if (found := candidate.specification(model, modules)) is not None:
            return found
    return PLAIN


def _measured(backend: str) -> tuple[Candidate, ...]:
    """Return the candidates of `backend`; on the CPU those of its instruction-set level, if that was measured."""
    if backend == "cpu":
        from ..kernels import cpu  # here, since a GPU needs no native library

        return CANDIDATES.get(cpu.facts()["level"], CANDIDATES["cpu"])
    return CANDIDATES.get(backend, ())


def _is_catalog_model(model: str, name: str) -> bool:
    """Return whether `model` is the catalog's model of this name, or its file in the cache."""
    return model == name or Path(model).expanduser() == catalog.path(name)
