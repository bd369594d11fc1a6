"""Logits processors, masks, sampling, log-probabilities and verification (exact, synthetic, by rejection), natively.

Lengths are checked here, since a wrong one would cause an out-of-bounds read; values are checked by the native code.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
from torch import Tensor

from ..structures import ChildTokens, LogitsProcessors, SamplingMetadata, TopLogprobs, VerifyInputs, VerifyOutput
from . import _native
from .runtime import FLAG, FLOAT, INTEGER, LONG, address, floats, integers


def process_logits(logits: Tensor, processors: LogitsProcessors) -> None:
    (rows, vocabulary), entries = logits.shape, processors.tokens.shape[0]
    _native.process_logits(
        floats(logits),
        rows,
        vocabulary,
        entries,
        integers(processors.starts, rows + 1),
        integers(processors.tokens, entries),
        floats(processors.scale, entries),
        floats(processors.bias, entries),
        address(processors.only, FLAG, rows),
    )


def mask_logits(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    count, vocabulary = rows.shape[0], logits.shape[1]
    words = integers(masks, count, -(-vocabulary // 32))
    _native.mask_logits(floats(logits), logits.shape[0], vocabulary, words, integers(rows, count), count)


def sample(logits: Tensor, sampling: SamplingMetadata, out: Tensor | None = None) -> Tensor:
    rows, vocabulary = logits.shape
    if out is None:
        out = torch.empty(rows, dtype=INTEGER)  # [R]
    _native.sample(floats(logits), rows, vocabulary, native_sampling(sampling, rows), integers(out, rows))
    return out


def sample_children(logits: Tensor, sampling: SamplingMetadata, count: int) -> ChildTokens:
    rows, vocabulary = logits.shape
    out = ChildTokens(torch.empty(rows, count, dtype=INTEGER), torch.empty(rows, count, dtype=FLOAT))  # [R, count] each
    where = out.tokens.data_ptr(), out.logprobs.data_ptr()
    _native.sample_children(floats(logits), rows, vocabulary, native_sampling(sampling, rows), count, *where)
    return out


def top_logprobs(logits: Tensor, tokens: Tensor, count: int) -> TopLogprobs:
    rows, vocabulary = logits.shape
    count = min(count, vocabulary)
    out = TopLogprobs(
        chosen=torch.empty(rows, dtype=FLOAT),
        rank=torch.empty(rows, dtype=INTEGER),
        values=torch.empty(rows, count, dtype=FLOAT),
        tokens=torch.empty(rows, count, dtype=INTEGER),
    )
    _native.top_logprobs(
        floats(logits),
        rows,
        vocabulary,
        integers(tokens, rows),
        count,
        out.chosen.data_ptr(),
        out.rank.data_ptr(),
        out.values.data_ptr(),
        out.tokens.data_ptr(),
    )
    return out


class _LatestSampling(threading.local):
    """The native view of the last sampling metadata of this thread: decoding reuses one for many steps."""

    sampling: SamplingMetadata | None = None
    rows: int = 0
    native: _native.SamplingMetadata | None = None


_latest = _LatestSampling()


def native_sampling(sampling: SamplingMetadata, rows: int) -> _native.SamplingMetadata:
    if _latest.sampling is not sampling or _latest.rows != rows or _latest.native is None:
        _latest.native = _addresses(sampling, rows)
        _latest.sampling, _latest.rows = sampling, rows
    return _latest.native


def _addresses(sampling: SamplingMetadata, rows: int) -> _native.SamplingMetadata:
    return _native.SamplingMetadata(
        temperature=floats(sampling.temperature, rows),
        top_k=integers(sampling.top_k, rows),
        top_p=floats(sampling.top_p, rows),
        min_p=floats(sampling.min_p, rows),
        seeds=address(sampling.seeds, LONG, rows),
        positions=integers(sampling.positions, rows),
        epochs=0 if sampling.epochs is None else integers(sampling.epochs, rows),
        stream=sampling.stream,
    )


def expand_sampling(sampling: SamplingMetadata, drafts: VerifyInputs) -> SamplingMetadata:
    rows = drafts.tokens.shape[0]
    out = SamplingMetadata(
        temperature=torch.empty(rows, dtype=FLOAT),
        top_k=torch.empty(rows, dtype=INTEGER),
        top_p=torch.empty(rows, dtype=FLOAT),
        min_p=torch.empty(rows, dtype=FLOAT),
        seeds=torch.empty(rows, dtype=LONG),
        positions=torch.empty(rows, dtype=INTEGER),
        stream=sampling.stream,
        epochs=None if sampling.epochs is None else torch.empty(rows, dtype=INTEGER),
    )
    _native.expand_sampling(
        native_sampling(sampling, drafts.starts.shape[0] - 1),
        native_drafts(drafts),
        out.temperature.data_ptr(),
        out.top_k.data_ptr(),
        out.top_p.data_ptr(),
        out.min_p.data_ptr(),
        out.seeds.data_ptr(),
        out.positions.data_ptr(),
        0 if out.epochs is None else out.epochs.data_ptr(),
    )
    return out


def verify_exact(sampled: Tensor, drafts: VerifyInputs) -> VerifyOutput:
    output = _empty_output(drafts)
    _native.verify_exact(integers(sampled, drafts.tokens.shape[0]), native_drafts(drafts), *_output_addresses(output))
    return output


def verify_synthetic(sampled: Tensor, drafts: VerifyInputs, rates: Tensor, sampling: SamplingMetadata) -> VerifyOutput:
    if rates.shape[0] < drafts.width:
        raise ValueError(f"{rates.shape[0]} rates cannot serve drafts of {drafts.width} tokens")
    output, rows = _empty_output(drafts), drafts.tokens.shape[0]
    _native.verify_synthetic(
        integers(sampled, rows),
        native_drafts(drafts),
        floats(rates, rates.shape[0]),
        native_sampling(sampling, rows),
        *_output_addresses(output),
    )
    return output


def verify_rejection(
    logits: Tensor, drafts: VerifyInputs, sampling: SamplingMetadata, block: bool, with_replacement: bool = False
) -> VerifyOutput:
    rows, vocabulary = drafts.tokens.shape[0], logits.shape[1]
    output, nonfinite = _empty_output(drafts), torch.empty(drafts.starts.shape[0] - 1, dtype=INTEGER)  # [B]
    _native.verify_rejection(
        floats(logits, rows, vocabulary),
        vocabulary,
        native_drafts(drafts, vocabulary),
        native_sampling(sampling, rows),
        block,
        with_replacement,
        *_output_addresses(output),
        nonfinite.data_ptr(),
    )
    return replace(output, nonfinite=nonfinite)


def native_drafts(drafts: VerifyInputs, vocabulary: int = 0) -> _native.VerifyInputs:
    """Return the native view of drafts; with the logits they were sampled from if `vocabulary` is given."""
    rows, logits, drawn = drafts.tokens.shape[0], drafts.logits, drafts.drawn
    with_probs = vocabulary > 0 and logits is not None and drawn is not None
    if drafts.width < 0:
        raise ValueError(f"drafts have {drafts.width} tokens: the width must be 0 or more")
    return _native.VerifyInputs(
        starts=integers(drafts.starts, drafts.starts.shape[0]),
        tokens=integers(drafts.tokens, rows),
        parents=integers(drafts.parents, rows),
        requests=drafts.starts.shape[0] - 1,
        rows=rows,
        width=drafts.width,
        logits=floats(logits, rows, vocabulary) if with_probs and logits is not None else 0,
        drawn=address(drawn, FLAG, rows) if with_probs and drawn is not None else 0,
    )


def _empty_output(drafts: VerifyInputs) -> VerifyOutput:
    requests = drafts.starts.shape[0] - 1
    tokens, rows = torch.empty(2, requests, drafts.width + 1, dtype=INTEGER).unbind()  # [B, width + 1] each
    return VerifyOutput(tokens, rows, torch.empty(requests, dtype=INTEGER))


def _output_addresses(output: VerifyOutput) -> tuple[int, int, int]:
    return output.tokens.data_ptr(), output.rows.data_ptr(), output.counts.data_ptr()
