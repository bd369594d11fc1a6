"""The one place where logits become tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .device import Device
from .kernels import Kernels, LogitsProcessors, SamplingMetadata, VerifyInputs
from .request import Request, Row
from .types import Draft, SamplingParams, TokenLogprobs

BAN = float("-inf")
NOTHING = Draft([])
Reports = dict[int, list[TokenLogprobs]]  # by row of the step


@dataclass
class SamplerInput:
    """All that is known of a choice before the logits are. Valid for one step.

    Row b of the step has one row of logits, or, with a draft, one more for each drafted token.
    """

    rows: list[Row]
    sampling: SamplingMetadata  # [B]
    verify_inputs: VerifyInputs | None  # None: no row has a draft, so R is B
    processors: LogitsProcessors | None
    logprob_rows: list[int]  # rows of the step that report log-probabilities
    logits: Tensor  # [R, V] f32, for the model to fill
    tokens: Tensor  # [R] int32
    masks: tuple[Tensor, Tensor] | None = None  # [M, ceil(V / 32)] int32, and the rows of logits that they are for


class Sampler:
    def __init__(self, ops: Kernels, device: Device, vocabulary: int) -> None:
        self.ops, self.device, self.vocabulary = ops, device, vocabulary
        self._logits = torch.empty(0, vocabulary, device=device.torch_device)  # grows with the widest step so far
        self._requests: list[Request] = []
        self._settle([])

    def prepare(self, rows: list[Row]) -> SamplerInput:
        """The host's part, done before the model runs: beside a device it overlaps, on a CPU its data is still warm."""
        requests = [row.request for row in rows]
        if self._requests != requests:
            self._settle(requests)
        self._positions.fill([request.length for request in requests])
        inputs = self._plain
        inputs.rows = rows
        if any(row.draft is not None for row in rows):
            inputs = replace(inputs, verify_inputs=self._verify_inputs(rows))
            inputs.logits, inputs.tokens = self._room(sum(1 + row.size - len(row.tokens) for row in rows))
        lifted: set[int] = set()
        if self._shaped:
            masks, places, lifted = build_masks(rows, self.vocabulary)
            inputs.masks = self.device.upload(masks, torch.int32), self.device.upload(places, torch.int32)
        if self._edited:
            inputs.processors = build_edits(rows, self.device, lifted)
        return inputs

    def process_logits(self, inputs: SamplerInput) -> Tensor | None:
        """Penalties, biases, bans and masks, in place. Returns the logits as they were, if anyone reports them.

        Log-probabilities are the model's own: those before the edits.
        """
        raw = inputs.logits if inputs.logprob_rows else None
        if raw is not None and (inputs.processors is not None or inputs.masks is not None):
            raw = raw.clone()
        if inputs.processors is not None:
            self.ops.process_logits(inputs.logits, inputs.processors)
        if inputs.masks is not None:
            self.ops.mask_logits(inputs.logits, *inputs.masks)
        return raw

    def row_logprobs(
        self, inputs: SamplerInput, raw: Tensor, tokens: list[list[int]], chosen: list[list[int]]
    ) -> Reports:
        """For each wanted row the log-probabilities of its tokens, which were chosen from these of its rows of raw."""
        starts = range(len(tokens)) if inputs.verify_inputs is None else inputs.verify_inputs.starts.tolist()
        at = [starts[row] + place for row in inputs.logprob_rows for place in chosen[row]]
        counts = [inputs.rows[row].request.params.logprobs or 0 for row in inputs.logprob_rows for _ in chosen[row]]
        found = iter(self.logprobs(raw[at], [token for row in inputs.logprob_rows for token in tokens[row]], counts))
        return {row: [next(found) for _ in tokens[row]] for row in inputs.logprob_rows}

    def logprobs(self, logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
        """How likely each of `tokens` was under its row of `logits` [R, V], with the counts[r] likeliest."""
        at = self.device.upload(tokens, torch.int32)
        top = self.ops.top_logprobs(logits, at, min(max(counts), logits.shape[1]))
        rows = zip(top.tokens.tolist(), top.values.tolist(), strict=True)
        pairs = [tuple(zip(ids, values, strict=True)) for ids, values in rows]
        return [
            TokenLogprobs(token, logprob, rank, likeliest[:count])
            for token, logprob, rank, likeliest, count in zip(
                tokens, top.chosen.tolist(), top.rank.tolist(), pairs, counts, strict=True
            )
        ]

    def _settle(self, requests: list[Request]) -> None:
        """Make what serves for as long as the same requests go on."""
        params = [request.params for request in requests]
        upload = self.device.upload
        self._positions = self.device.buffer(len(requests), torch.int32)
        self._sampling = SamplingMetadata(
            temperature=upload([p.temperature for p in params], torch.float32),
            top_k=upload([p.top_k for p in params], torch.int32),
            top_p=upload([p.top_p for p in params], torch.float32),
            min_p=upload([p.min_p for p in params], torch.float32),
            seeds=upload([request.seed for request in requests], torch.int64),
            positions=self._positions.tensor,
        )
        self._shaped = any(request.grammar is not None for request in requests)
        self._edited = any(needs_edits(request) for request in requests)
        logits, tokens = self._room(len(requests))
        wanted = [row for row, p in enumerate(params) if p.logprobs is not None]
        self._plain = SamplerInput([], self._sampling, None, None, wanted, logits, tokens)  # of steps without a draft
        self._requests = requests

    def _room(self, count: int) -> tuple[Tensor, Tensor]:
        """Logits [R, V] and tokens [R] for `count` choices."""
        if self._logits.shape[0] < count:
            self._logits = torch.empty(count, self.vocabulary, device=self.device.torch_device)
        return self._logits[:count], torch.empty(count, dtype=torch.int32, device=self.device.torch_device)

    def _verify_inputs(self, rows: list[Row]) -> VerifyInputs:
        starts, tokens, parents = [0], [], []
        for row in rows:
            draft = row.draft or NOTHING
            tokens += [-1, *draft.tokens]
            parents += [-1, *(parent + 1 for parent in draft.before())]
            starts.append(len(tokens))
        upload = self.device.upload
        logits, drawn = self._distributions(rows, len(tokens))
        return VerifyInputs(
            starts=upload(starts, torch.int32),
            tokens=upload(tokens, torch.int32),
            parents=upload(parents, torch.int32),
            width=max(end - begin - 1 for begin, end in pairwise(starts)),
            logits=logits,
            drawn=drawn,
        )

    def _distributions(self, rows: list[Row], count: int) -> tuple[Tensor | None, Tensor | None]:
        """What the drafted tokens were drawn from, [R, V], and which rows that speaks of, [R]; None: nobody drew."""
        if all(row.draft is None or row.draft.logits is None for row in rows):
            return None, None
        logits = torch.empty(count, self.vocabulary, device=self.device.torch_device)
        drawn = torch.zeros(count, dtype=torch.uint8, device=self.device.torch_device)
        begin = 0
        for row in rows:
            draft = row.draft or NOTHING
            end = begin + 1 + len(draft.tokens)
            if draft.logits is not None:
                logits[begin + 1 : end] = draft.logits
                drawn[begin + 1 : end] = 1
            begin = end
        return logits, drawn


@dataclass(frozen=True)
class Ahead:
    """A request as it would be after some drafted tokens: what the edits of the logits there depend on."""

    request: Request
    drafted: list[int]

    @property
    def output(self) -> list[int]:
        return self.request.output + self.drafted

    def ends_with(self, tokens: Sequence[int]) -> bool:
        count, known = len(tokens), self.request.length
        start = known + len(self.drafted) - count
        text = self.request.tokens(start, known) + self.drafted[max(start - known, 0) :]
        return text == list(tokens)


def paths(row: Row) -> list[list[int]]:
    """The drafted tokens that stand before each choice of a row: none before the first."""
    draft = row.draft or NOTHING
    found: list[list[int]] = [[]]
    for token, before in zip(draft.tokens, draft.before(), strict=True):
        found.append([*found[before + 1], token])
    return found


def build_masks(rows: Sequence[Row], vocabulary: int) -> tuple[np.ndarray[Any, Any], list[int], set[int]]:
    """Masks [M, ceil(V / 32)] of what grammars allow, the rows of logits that these are for, and of these rows those
    that are not edited: bans would leave nothing that the grammar allows, so the end goes through.
    """
    count = sum(1 + row.size - len(row.tokens) for row in rows if row.request.grammar is not None)
    masks: np.ndarray[Any, Any] = np.empty((count, -(-vocabulary // 32)), np.int32)
    found: list[int] = []
    lifted: set[int] = set()
    first = 0  # row of logits
    for row in rows:
        request, draft = row.request, row.draft or NOTHING
        if request.grammar is not None:
            own = masks[len(found) :]
            places = request.grammar.masks(request.output, draft, own)
            before = paths(row) if needs_edits(request) else []
            for mask, place in zip(own, places if before else [], strict=False):
                if not leaves_any(mask, Ahead(request, before[place])):
                    mask[:] = request.grammar.end_mask
                    lifted.add(first + place)
            found += [first + place for place in places]
        first += 1 + len(draft.tokens)
    return masks[: len(found)], found, lifted


def leaves_any(mask: np.ndarray[Any, Any], place: Ahead) -> bool:
    """Whether some token that the mask allows is not banned."""
    edits = row_edits(place)
    banned = [token for token, (_, bias) in edits.items() if bias == BAN]
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    if place.request.params.allowed_token_ids is not None:
        return bool(bits[[token for token in edits if token not in set(banned)]].any())
    bits[banned] = 0
    return bool(bits.any())


def build_edits(rows: Sequence[Row], device: Device, lifted: Collection[int] = ()) -> LogitsProcessors | None:
    """Penalties, biases and bans of all rows of logits but the lifted ones, or None when no row has any."""
    places = [Ahead(row.request, path) for row in rows for path in paths(row)]
    free = [place in lifted or not needs_edits(at.request) for place, at in enumerate(places)]
    listed = [{} if skip else row_edits(place) for place, skip in zip(places, free, strict=True)]
    only = [
        place.request.params.allowed_token_ids is not None and not skip
        for place, skip in zip(places, free, strict=True)
    ]
    if not any(listed) and not any(only):
        return None
    starts = [0]
    for row in listed:
        starts.append(starts[-1] + len(row))
    entries = [(token, scale, bias) for row in listed for token, (scale, bias) in row.items()]
    return LogitsProcessors(
        starts=device.upload(starts, torch.int32),
        tokens=device.upload([token for token, _, _ in entries], torch.int32),
        scale=device.upload([scale for _, scale, _ in entries], torch.float32),
        bias=device.upload([bias for _, _, bias in entries], torch.float32),
        only=device.upload([int(flag) for flag in only], torch.uint8),
    )


def needs_edits(request: Request) -> bool:
    """Whether any step of this request may change logits."""
    params = request.params
    return bool(
        params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.banned_token_ids
        or request.bad_words
        or params.min_tokens
    )


def is_multi_step(request: Request) -> bool:
    """Whether its logits become tokens without the host."""
    params = request.params
    unread = params.logprobs is None and params.prompt_logprobs is None
    return unread and params.structured is None and not needs_edits(request)


def row_edits(place: Ahead) -> dict[int, tuple[float, float]]:
    """For each token that is touched: the scale and the bias of kernels.Edits."""
    params, output = place.request.params, place.output
    bias = penalties(params, output)
    for token, value in params.logit_bias.items():
        bias[token] = bias.get(token, 0.0) + value
    for token in banned(place):
        bias[token] = BAN
    repeated: set[int] = set()
    if params.repetition_penalty != 1:
        repeated = set(place.request.prompt) | set(output)
    touched = bias.keys() | repeated
    if params.allowed_token_ids is not None:
        touched = set(params.allowed_token_ids)
    return {t: (params.repetition_penalty if t in repeated else 1.0, bias.get(t, 0.0)) for t in sorted(touched)}


def penalties(params: SamplingParams, output: Sequence[int]) -> dict[int, float]:
    if not params.presence_penalty and not params.frequency_penalty:
        return {}
    counts = Counter(output)
    return {token: -params.presence_penalty - params.frequency_penalty * count for token, count in counts.items()}


def banned(place: Ahead) -> set[int]:
    """Tokens that may not come next: banned ids, ends that come too early, last tokens of banned words."""
    request = place.request
    tokens = set(request.params.banned_token_ids)
    if len(request.output) + len(place.drafted) < request.params.min_tokens:
        tokens |= request.end_tokens | set(request.params.stop_token_ids)
    return tokens | {word[-1] for word in request.bad_words if place.ends_with(word[:-1])}
