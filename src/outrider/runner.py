"""One step on one device: gather, run the model, choose tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from .cache.pages import Pages
from .device import Buffer, Device
from .kernels import Batch, Kernels
from .models import Model
from .sampling import Picked, Sampler
from .types import Row, RowResult, Step, TokenLogprobs


class Runner:
    def __init__(self, model: Model, ops: Kernels, device: Device, pages: Pages, page_size: int) -> None:
        self.model, self.device, self.pages, self.page_size = model, device, pages, page_size
        self.sampler = Sampler(ops, device, model.config.vocabulary)
        # Decoding asks for the same shape step after step: the same tensors serve, filled anew.
        self._shape = (1, 1, 1)
        self._inputs, self._batch = make_batch(device, *self._shape)

    def step(self, step: Step) -> list[RowResult]:
        rows = step.rows
        asking = [index for index, row in enumerate(rows) if row.sample]
        batch, pending = self.gather(rows), self.sampler.prepare([rows[index].request for index in asking])
        hidden, _ = self.model.forward(batch, self.pages.layers)  # [T, E]
        ends = last_tokens(rows)
        prompts = {i: self._prompt_logprobs(hidden, row, ends[i]) for i, row in enumerate(rows) if owes_prompt(row)}
        picked: dict[int, Picked] = {}
        if asking:
            last = [ends[index] for index in asking]
            # Plain decoding asks at every token: no copy then.
            states = hidden if len(last) == ends[-1] + 1 else hidden[last]  # [R, E]
            self.model.logits(states, pending.logits)
            picked = dict(zip(asking, self.sampler.pick(pending), strict=True))
        return [result(picked.get(index), prompts.get(index, [])) for index in range(len(rows))]

    def gather(self, rows: list[Row]) -> Batch:
        """The tokens of all rows side by side, and where their keys and values lie. Valid until the next call."""
        size = self.page_size
        width = max(len(row.request.pages) for row in rows)
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        tables: list[int] = []
        for row in rows:
            pages = row.request.pages
            where = range(row.start, row.start + len(row.tokens))
            tokens += row.tokens
            positions += where
            slots += [pages[position // size] * size + position % size for position in where]
            starts.append(len(tokens))
            tables += pages
            tables += [0] * (width - len(pages))
        shape = (len(tokens), len(rows), width)
        if self._shape != shape:
            self._shape = shape
            self._inputs, self._batch = make_batch(self.device, *shape)
        self._inputs.fill(tokens + positions + slots + starts + tables)
        return self._batch

    def _prompt_logprobs(self, hidden: Tensor, row: Row, end: int) -> list[TokenLogprobs]:
        """How likely the prompt's own next tokens were after the tokens that this row ran."""
        request = row.request
        count = request.params.prompt_logprobs or 0
        begin = len(request.prompt_logprobs)  # so many are known from earlier chunks
        following = request.prompt[begin + 1 : row.start + len(row.tokens) + 1]
        first = end - (row.start + len(row.tokens) - 1) + begin
        logits = self.model.logits(hidden[first : first + len(following)])
        return self.sampler.logprobs(logits, following, [count] * len(following))


def make_batch(device: Device, tokens: int, rows: int, width: int) -> tuple[Buffer, Batch]:
    """A batch of that shape whose parts lie side by side in one buffer: one upload fills it."""
    sizes = [tokens, tokens, tokens, rows + 1, rows * width]
    inputs = device.buffer(sum(sizes), torch.int32)
    ids, positions, slots, starts, tables = torch.split(inputs.tensor, sizes)
    return inputs, Batch(ids, positions, slots, starts, tables.view(rows, width))


def owes_prompt(row: Row) -> bool:
    """Whether this row runs prompt tokens whose successors' log-probabilities are asked for and not yet known."""
    request = row.request
    if request.params.prompt_logprobs is None:
        return False
    known, end = len(request.prompt_logprobs), row.start + len(row.tokens)
    return row.start <= known < min(end, len(request.prompt) - 1)


def result(picked: Picked | None, prompt: list[TokenLogprobs]) -> RowResult:
    if picked is None:
        return RowResult([], [], prompt)
    return RowResult([picked.token], [] if picked.logprobs is None else [picked.logprobs], prompt)


def last_tokens(rows: list[Row]) -> list[int]:
    """Where each row's last token stands among the tokens of the step."""
    total = 0
    ends = []
    for row in rows:
        total += len(row.tokens)
        ends.append(total - 1)
    return ends
