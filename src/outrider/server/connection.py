"""Work for a client, no longer than it listens."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

Result = TypeVar("Result")


class HungUpError(Exception):
    """The client is gone: nobody is there to answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do it, unless the client hangs up before it is done: then it ends where it stands."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(hang_up(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HungUpError
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
