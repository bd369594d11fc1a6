"""One step on one device: gather, run the model, choose tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .cache.pages import Pages
from .device import Device
from .kernels import Batch, Kernels
from .models import Model
from .sampling import Sampler
from .types import Row, RowResult, Step, TokenLogprobs


class Runner:
    def __init__(self, model: Model, ops: Kernels, device: Device, pages: Pages, page_size: int) -> None:
        self.model, self.device, self.pages, self.page_size = model, device, pages, page_size
        self.sampler = Sampler(ops, device)

    def step(self, step: Step) -> list[RowResult]:
        batch = self.gather(step.rows)
        hidden, _ = self.model.forward(batch, self.pages.layers)  # [T, E]
        ends = last_tokens(step.rows)
        tokens = self._pick(hidden, step.rows, ends)
        prompts = [self._prompt_logprobs(hidden, row, end) for row, end in zip(step.rows, ends, strict=True)]
        return [
            RowResult([], [], prompt) if picked is None else RowResult(*picked, prompt)
            for picked, prompt in zip(tokens, prompts, strict=True)
        ]

    def gather(self, rows: list[Row]) -> Batch:
        """The tokens of all rows side by side, and where their keys and values lie."""
        width = max(len(row.request.pages) for row in rows)
        tables = np.zeros((len(rows), width), np.int32)  # [B, P]
        tokens: list[int] = []
        positions: list[int] = []
        starts = [0]
        for index, row in enumerate(rows):
            tables[index, : len(row.request.pages)] = row.request.pages
            tokens += row.tokens
            positions += range(row.start, row.start + len(row.tokens))
            starts.append(len(tokens))
        upload = self.device.upload
        return Batch(
            tokens=upload(tokens, torch.int32),
            positions=upload(positions, torch.int32),
            slots=upload(self._slots(tables, positions, starts), torch.int32),
            query_starts=upload(starts, torch.int32),
            page_tables=upload(tables, torch.int32),
        )

    def _slots(self, tables: np.ndarray, positions: list[int], starts: list[int]) -> np.ndarray:
        size = self.page_size
        where = np.asarray(positions, np.int32)  # [T]
        rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))  # [T]
        return tables[rows, where // size] * size + where % size

    def _pick(
        self, hidden: Tensor, rows: list[Row], ends: list[int]
    ) -> list[tuple[list[int], list[TokenLogprobs]] | None]:
        """The next token of every row that asks for one."""
        asking = [index for index, row in enumerate(rows) if row.sample]
        results: list[tuple[list[int], list[TokenLogprobs]] | None] = [None] * len(rows)
        if not asking:
            return results
        last = [ends[index] for index in asking]
        # Plain decoding asks at every token: no copy then.
        states = hidden if len(last) == len(hidden) else hidden[last]  # [R, E]
        logits = self.model.logits(states)  # [R, V]
        picked = self.sampler.pick(logits, [rows[index].request for index in asking])
        for index, pick in zip(asking, picked, strict=True):
            results[index] = ([pick.token], [] if pick.logprobs is None else [pick.logprobs])
        return results

    def _prompt_logprobs(self, hidden: Tensor, row: Row, end: int) -> list[TokenLogprobs]:
        """How likely the prompt's own next tokens were after the tokens that this row ran."""
        request = row.request
        count = request.params.prompt_logprobs
        begin = len(request.prompt_logprobs)  # so many are known from earlier chunks
        if count is None or begin < row.start:
            return []
        following = request.prompt[begin + 1 : row.start + len(row.tokens) + 1]
        if not following:
            return []
        first = end - (row.start + len(row.tokens) - 1) + begin
        logits = self.model.logits(hidden[first : first + len(following)])
        return self.sampler.logprobs(logits, following, [count] * len(following))


def last_tokens(rows: list[Row]) -> list[int]:
    """Where each row's last token stands among the tokens of the step."""
    total = 0
    ends = []
    for row in rows:
        total += len(row.tokens)
        ends.append(total - 1)
    return ends
