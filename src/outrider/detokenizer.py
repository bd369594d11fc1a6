"""Tokens to outputs: incremental text, stop strings, statistics."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace

from .request import Request
from .stop_strings import StopStrings
from .tokenizer import Stream, Tokenizer
from .types import Completion, DecodeStep, FinishReason, Output, SpecStats, Stats

log = logging.getLogger(__name__)


class Detokenizer:
    """The growing text of one request. Text that may turn out to begin a stop string is held back."""

    def __init__(self, request: Request, stream: Stream, stops: StopStrings) -> None:
        self.request, self.stream, self.stops = request, stream, stops
        self.text = ""
        self.num_read = 0  # tokens of request.output that are in `text`
        self.closed = False
        self.state = 0  # of the automaton of the stop strings, after `text`
        self._latest: tuple[tuple[object, ...], Completion] | None = None  # with the state that it was made from

    @property
    def can_wait(self) -> bool:
        """Return True if detokenizing can be deferred: no stop string depends on it."""
        return not self.request.params.stop and self.request.finish_reason is None

    def advance(self) -> tuple[FinishReason, str] | None:
        """Detokenize the new tokens. Return why the text ends here: a stop string, or an error; else None."""
        try:
            stop = self._advance()
        except Exception as error:  # must not fail the other requests of the step
            log.exception("the output of request `%s` cannot be detokenized", self.request.id)
            self.closed = True
            failed = self.request.finish_reason is FinishReason.ERROR  # report the first error
            return None if failed else (FinishReason.ERROR, error_text(error))
        return None if stop is None else (FinishReason.STOP, stop)

    def _advance(self) -> str | None:
        """Read the new tokens; at a complete stop string, cut the output and return the string."""
        output, is_finished = self.request.output, self.request.finish_reason is not None
        if is_finished and not self.num_read and not self.request.params.stop:  # all of it was deferred
            self.text, self.num_read, self.closed = self.stream.whole(output), len(output), True
            return None
        while self.num_read < len(output):
            self.num_read += 1
            stop = self._append(self.stream.push(output[self.num_read - 1]))
            if stop is not None:
                del output[self.num_read :]
                del self.request.logprobs[self.num_read :]
                return stop
        if is_finished and not self.closed:
            self.closed = True
            # The flushed replacement character of an incomplete one may complete a stop string.
            return self._append(self.stream.flush())
        return None

    def _append(self, piece: str) -> str | None:
        if not piece:
            return None
        # Look for matches that end in the new piece. Earlier ones came before `min_tokens` and have been shown.
        matches: list[tuple[int, str]] = []
        if self.request.params.stop:
            for end, character in enumerate(piece, len(self.text) + 1):
                self.state = self.stops.advance(self.state, character)
                matches += [(end - len(stop), stop) for stop in self.stops.complete(self.state)]
        self.text += piece
        if not matches or self.num_read < self.request.params.min_tokens:
            return None
        start, stop = min(matches)
        self.text = self.text[: start + len(stop) * self.request.params.include_stop_str_in_output]
        self.closed = True
        return stop

    def visible(self) -> str:
        """Return the text without a tail that a stop string may begin with."""
        if self.request.finish_reason is not None:
            return self.text
        return self.text[: len(self.text) - self.stops.held(self.state)]

    def completion(self) -> Completion:
        """Return the output so far: the same object while nothing changes, as for most of many samples in a step."""
        request = self.request
        state = len(request.output), len(self.text), self.state, request.finish_reason, request.stop_reason
        if self._latest is None or self._latest[0] != state:
            self._latest = state, self._make()
        return self._latest[1]

    def _make(self) -> Completion:
        request = self.request
        return Completion(
            index=request.index,
            text=self.visible(),
            token_ids=list(request.output),
            finish_reason=None if request.finish_reason is None else request.finish_reason.value,
            stop_reason=request.stop_reason,
            logprobs=list(request.logprobs) if request.params.logprobs is not None else None,
            steps=first_tokens(request.trace, len(request.output)) if request.params.trace else None,
        )


@dataclass
class ParentRequest:
    """One call of `add`: a prompt and its `n` samples."""

    id: str
    prompt: str | None
    prompt_ids: list[int]
    detokenizers: list[Detokenizer]  # one per sample
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None  # seconds after `started`

    @classmethod
    def open(cls, parent_id: str, prompt: str | None, requests: list[Request], tokenizer: Tokenizer) -> ParentRequest:
        skip = requests[0].params.skip_special_tokens
        stops = StopStrings(requests[0].params.stop)
        detokenizers = [Detokenizer(request, Stream(tokenizer, skip_special=skip), stops) for request in requests]
        return cls(parent_id, prompt, requests[0].prompt, detokenizers)

    @property
    def requests(self) -> list[Request]:
        return [detokenizer.request for detokenizer in self.detokenizers]

    @property
    def finished(self) -> bool:
        return all(detokenizer.request.finish_reason is not None for detokenizer in self.detokenizers)

    def output(self) -> Output:
        requests = self.requests
        wants_prompt = requests[0].params.prompt_logprobs is not None
        return Output(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            completions=[detokenizer.completion() for detokenizer in self.detokenizers],
            finished=self.finished,
            prompt_logprobs=[None, *requests[0].prompt_logprobs] if wants_prompt else None,
            stats=self._stats(requests) if self.finished else None,
        )

    def _stats(self, requests: list[Request]) -> Stats:
        seconds = time.perf_counter() - self.started
        first = self.first_token if self.first_token is not None else seconds
        tokens = sum(len(request.output) for request in requests)
        # The first step also runs the prompt, so the speed counts the tokens after it.
        decoding = seconds - first
        later = tokens - len(requests)
        admitted = [request.admitted for request in requests if request.admitted is not None]
        spec_stats = SpecStats.total(request.spec_stats for request in requests)
        return Stats(
            steps=spec_stats.steps,
            seconds=seconds,
            first_token_seconds=first,
            tokens_per_second=later / decoding if decoding > 0 and later > 0 else 0.0,
            cached_tokens=requests[0].cached_tokens,
            preemptions=sum(request.preemptions for request in requests),
            speculation=spec_stats,
            method=requests[0].method,
            queue_seconds=min(admitted) - self.started if admitted else seconds,
            time_per_output_token=decoding * len(requests) / later if later > 0 else 0.0,
        )


def error_text(error: BaseException) -> str:
    """Return the message of an error, or its type where it has none, as MemoryError."""
    return str(error) or type(error).__name__


def first_tokens(steps: list[DecodeStep], count: int) -> list[DecodeStep]:
    """Return the steps that gave the first `count` tokens. A stop string may have cut off later ones."""
    kept = []
    for step in steps:
        if count <= 0:
            break
        kept.append(step if len(step.tokens) <= count else replace(step, tokens=step.tokens[:count]))
        count -= len(step.tokens)
    return kept
