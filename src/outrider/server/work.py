"""Jobs at the engine: all prompts of a request at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from ..errors import UserError
from ..scheduler import BROKEN_OFF
from ..types import FinishReason, Output
from .context import Context
from .errors import ApiError
from .translate import Job, renamed


async def outputs(context: Context, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Output], None]:
    """What comes of the jobs, as it grows: which of them, and its whole output so far."""
    if len(jobs) == 1:
        async with aclosing(one(context, jobs[0])) as stream:
            async for output in stream:
                yield 0, output
        return
    # Room for one each: a client that is slow to read holds up no more than that.
    arrived: asyncio.Queue[tuple[int, Output | BaseException | None]] = asyncio.Queue(len(jobs))
    tasks = [asyncio.create_task(pump(context, job, index, arrived)) for index, job in enumerate(jobs)]
    left = len(tasks)
    try:
        while left:
            index, item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def pump(
    context: Context, job: Job, index: int, arrived: asyncio.Queue[tuple[int, Output | BaseException | None]]
) -> None:
    try:
        async with aclosing(one(context, job)) as stream:
            async for output in stream:
                await arrived.put((index, output))
        await arrived.put((index, None))
    except Exception as error:
        await arrived.put((index, error))


def check_endings(output: Output) -> None:
    """Of a request that broke: the client hears whether that was its own doing."""
    broken = [each.stop_reason for each in output.completions if each.finish_reason == FinishReason.ERROR]
    if BROKEN_OFF in broken:
        raise UserError(f"`structured` is too hard to follow, or it and other fields exclude each other: {BROKEN_OFF}")
    if broken:
        raise ApiError(500, "the engine failed on this request: its log says how", kind="server_error")


async def one(context: Context, job: Job) -> AsyncGenerator[Output, None]:
    """One job, counted. A request that fails inside the engine fails here too."""
    watch = context.metrics.request()
    known, last, reason = 0, None, None
    try:
        async with aclosing(context.llm.generate(job.tokens, job.params)) as stream:  # type: ignore[type-var]
            async for output in stream:
                count = sum(len(each.token_ids) for each in output.completions)
                watch.tokens(count - known)
                known = count
                check_endings(output)
                if output.finished:
                    last = output
                yield output
    except UserError as error:
        reason = "refused"
        raise renamed(error, job.names) from None
    except Exception:
        reason = FinishReason.ERROR.value
        raise
    finally:
        watch.done(last, reason)
