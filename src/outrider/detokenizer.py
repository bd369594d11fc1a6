"""From chosen tokens to what the user sees: incremental text, stop strings, statistics."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace

from .request import Request
from .tokenizer import Stream, Tokenizer
from .types import Completion, DecodeStep, FinishReason, Output, SpecStats, Stats

log = logging.getLogger(__name__)


class Detokenizer:
    """The text of one request as it grows. Nothing is shown that a stop string may still take back."""

    def __init__(self, request: Request, stream: Stream) -> None:
        self.request, self.stream = request, stream
        self.text = ""
        self.read = 0  # tokens of request.output that are in `text`
        self.closed = False
        stops = request.params.stop
        assert isinstance(stops, tuple)
        self.stops: tuple[str, ...] = stops
        self.longest = max((len(stop) for stop in stops), default=0)

    @property
    def can_wait(self) -> bool:
        """Whether nothing but the end of the request depends on reading its tokens now."""
        return not self.stops and self.request.finish_reason is None

    def advance(self) -> tuple[FinishReason, str] | None:
        """Read the new tokens; why the text ends, if it does: a stop string, or a token that cannot be read."""
        try:
            stop = self._advance()
        except Exception as error:  # the other requests of the step have no part in it
            log.exception("the text of request `%s` cannot be read", self.request.id)
            self.closed = True
            broken = self.request.finish_reason is FinishReason.ERROR  # the first cause is the one to tell
            return None if broken else (FinishReason.ERROR, cause(error))
        return None if stop is None else (FinishReason.STOP, stop)

    def _advance(self) -> str | None:
        """If a stop string is complete, cut there and return it."""
        output = self.request.output
        if not self.stops and not self.read and self.request.finish_reason is not None:  # nobody watched
            self.text, self.read, self.closed = self.stream.whole(output), len(output), True
            return None
        while self.read < len(output):
            self.read += 1
            stop = self._append(self.stream.push(output[self.read - 1]))
            if stop is not None:
                del output[self.read :]
                del self.request.logprobs[self.read :]
                return stop
        if self.request.finish_reason is not None and not self.closed:
            self.closed = True
            # A stop string that only the last, incomplete character completes is still a stop string.
            return self._append(self.stream.flush())
        return None

    def _append(self, piece: str) -> str | None:
        if not piece:
            return None
        # A new match ends in the new piece: older ones came before `min_tokens`, and have been shown.
        known = len(self.text)
        self.text += piece
        found = [(self.text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in self.stops]
        matches = [(at, stop) for at, stop in found if at >= 0]
        if not matches or self.read < self.request.params.min_tokens:
            return None
        at, stop = min(matches)
        self.text = self.text[: at + len(stop) * self.request.params.include_stop_str_in_output]
        self.closed = True
        return stop

    def visible(self) -> str:
        if self.request.finish_reason is not None:
            return self.text
        held = next((n for n in range(self.longest - 1, 0, -1) if self._may_grow(self.text[-n:])), 0)
        return self.text[: len(self.text) - held]

    def _may_grow(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self.stops)


@dataclass
class ParentRequest:
    """One call of the user: a prompt and its `n` samples."""

    id: str
    prompt: str | None
    prompt_ids: list[int]
    transcripts: list[Detokenizer]
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None

    @property
    def finished(self) -> bool:
        return all(t.request.finish_reason is not None for t in self.transcripts)

    def output(self) -> Output:
        requests = [t.request for t in self.transcripts]
        asked = requests[0].params.prompt_logprobs is not None
        return Output(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            completions=[completion(t) for t in self.transcripts],
            finished=self.finished,
            prompt_logprobs=requests[0].prompt_logprobs if asked else None,
            stats=self._stats(requests) if self.finished else None,
        )

    def _stats(self, requests: list[Request]) -> Stats:
        seconds = time.perf_counter() - self.started
        first = self.first_token if self.first_token is not None else seconds
        tokens = sum(len(request.output) for request in requests)
        # The first step also runs the prompt: speed is that of the tokens after it.
        decoding = seconds - first
        later = tokens - len(requests)
        spec_stats = SpecStats()
        for request in requests:
            spec_stats.add(request.spec_stats)
        return Stats(
            steps=spec_stats.steps,
            seconds=seconds,
            first_token_seconds=first,
            tokens_per_second=later / decoding if decoding > 0 and later > 0 else 0.0,
            cached_tokens=requests[0].cached_tokens,
            preemptions=sum(request.preemptions for request in requests),
            speculation=spec_stats,
            method=requests[0].method,
        )


def cause(error: BaseException) -> str:
    """What went wrong, in words: an exception may come without any, as Python's MemoryError does."""
    return str(error) or type(error).__name__


def open_family(family_id: str, prompt: str | None, requests: list[Request], tokenizer: Tokenizer) -> ParentRequest:
    params = requests[0].params
    streams = [Stream(tokenizer, skip_special=params.skip_special_tokens) for _ in requests]
    transcripts = [Detokenizer(request, stream) for request, stream in zip(requests, streams, strict=True)]
    return ParentRequest(family_id, prompt, requests[0].prompt, transcripts)


def completion(transcript: Detokenizer) -> Completion:
    request = transcript.request
    reason: FinishReason | None = request.finish_reason
    return Completion(
        index=request.index,
        text=transcript.visible(),
        token_ids=list(request.output),
        finish_reason=None if reason is None else reason.value,
        stop_reason=request.stop_reason,
        logprobs=list(request.logprobs) if request.params.logprobs is not None else None,
        steps=within(request.trace, len(request.output)) if request.params.trace else None,
    )


def within(steps: list[DecodeStep], count: int) -> list[DecodeStep]:
    """The steps that gave the first `count` tokens: a stop string may have cut off what came later."""
    kept = []
    for step in steps:
        if count <= 0:
            break
        kept.append(step if len(step.tokens) <= count else replace(step, tokens=step.tokens[:count]))
        count -= len(step.tokens)
    return kept
