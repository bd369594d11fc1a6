"""Choose the source of a drafter's weights: the user's, else the head that ships for the model."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from ...errors import UserError
from ...weights import catalog, shipped
from ..interface import Target

log = logging.getLogger(__name__)

TRAINED = ("eagle3", "dflash", "dspark", "medusa", "mtp", "draft_model")  # methods of `outrider train`


def choose_source(given: str, method: str, target: Target, lacking: str = "") -> str:
    """Return `given`, else the shipped head or draft model of the target for `method`.

    lacking: beginning of the error message if there is neither.
    """
    if given:
        warn_of_another_target(Path(given).expanduser(), target)
        return given
    found = shipped.find(target.source, method)
    if found is None:
        beginning = lacking or f"`{method}` needs a head: pass its folder as `model`"
        raise UserError(f"{beginning}{_or_train(method, target.source)}; {_none_ships(method, target.source)}")
    return str(found)


def _or_train(method: str, source: str) -> str:
    return f", or train one with `outrider train {method} --model {source or 'MODEL'}`" if method in TRAINED else ""


def _none_ships(method: str, source: str) -> str:
    known = ", ".join(f"`{entry.model}`" for entry in shipped.entries() if entry.method == method)
    none = f"none for `{source}` ships with outrider" if source else "none ships with outrider for this model"
    return f"{none}, only for {known}" if known else none


def warn_of_another_target(path: Path, target: Target) -> None:
    """Warn if the head was trained for another model: it may fit by shape, but few drafts would be accepted."""
    record = _target_on_card(path)
    name, known = str(record.get("model")), catalog.CATALOG.get(target.source)
    if known is not None:
        same = record.get("sha256") in (None, known.sha256)
    else:
        same = record.get("bytes") in (None, _weigh(Path(target.source).expanduser()))
    if not same:
        log.warning(
            "`%s` was trained for `%s`, and `%s` is another model: few of its draft tokens will be accepted",
            path,
            name,
            target.source,
        )


def _target_on_card(path: Path) -> dict[str, object]:
    """Return the target on the card beside the weights; empty if there is none."""
    try:
        card = json.loads((path.parent / shipped.CARD if path.is_file() else path / shipped.CARD).read_text())
        record = card.get("target")
    except (OSError, ValueError, AttributeError):
        return {}
    return record if isinstance(record, dict) else {}


def _weigh(path: Path) -> int | None:
    try:
        return shipped.file_bytes(path) if path.exists() else None
    except OSError:
        return None
