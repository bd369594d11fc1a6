"""What students refuse of the options that several of them have."""

from __future__ import annotations

from ..errors import UserError


def check_at_least(least: float, **options: float) -> None:
    for name, value in options.items():
        if value < least:
            raise UserError(f"`{name}` is {value}: pass {least} or more")


def check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise UserError(f"`share` is {share}: it is a share of the places of a lesson, pass a number up to 1")


def check_decay(decay: float) -> None:
    if not 0 < decay <= 1:
        raise UserError(f"`decay` is {decay}: pass a number above 0, at most 1")
