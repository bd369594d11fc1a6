"""What a user is told who asked for something impossible."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider import UserError


def refusal(run: Callable[[], object]) -> str:
    """The one sentence that it was refused with."""
    with pytest.raises(UserError) as caught:
        run()
    message = str(caught.value)
    assert "\n" not in message and not message.endswith(".")
    return message
