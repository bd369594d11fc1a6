"""From what the user asks to requests: tokens, seeds, who drafts, and what no request may ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property

from .config import ResolvedConfig
from .errors import UserError
from .request import Request
from .sampler import is_multi_step
from .speculation.manager import SpeculationManager
from .structured_output import Compiler, GrammarMatcher
from .tokenizer import Tokenizer
from .types import SamplingParams

Prompt = str | Sequence[int]


class InputProcessor:
    """Makes requests of prompts. All that a request is told of the engine comes from here."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        tokenizer: Tokenizer,
        spec_manager: SpeculationManager,
        vocabulary: int,
        end_tokens: frozenset[int],
    ) -> None:
        self.resolved, self.tokenizer, self.spec_manager, self.vocabulary = (
            resolved,
            tokenizer,
            spec_manager,
            vocabulary,
        )
        self.end_tokens = end_tokens

    @cached_property
    def compiler(self) -> Compiler:
        """Of the shapes that answers must have. Any thread may ask it: what it compiled is at hand for `requests`."""
        return Compiler(self.tokenizer, self.vocabulary, self.end_tokens)

    def requests(self, parent_id: str, number: int, prompt: Prompt, params: SamplingParams) -> list[Request]:
        """The `n` samples of a prompt. number: of the call, from which a seed is made where none is given."""
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        self._check(tokens, params)
        base = params.seed if params.seed is not None else mix(self.resolved.seed, number)
        return [self._request(parent_id, index, tokens, params, base) for index in range(params.n)]

    def _request(self, parent_id: str, index: int, tokens: list[int], params: SamplingParams, base: int) -> Request:
        assigned = self.spec_manager.assign(params)
        request = Request(
            id=f"{parent_id}-{index}",
            prompt=tokens,
            params=params,
            seed=base if index == 0 else mix(base, index),
            end_tokens=frozenset() if params.ignore_eos else self.end_tokens,
            max_length=min(self.resolved.max_context, len(tokens) + params.max_tokens),
            index=index,
            parent_id=parent_id,
            bad_words=self._bad_words(params),
            prediction=self._prediction(params),
            grammar=GrammarMatcher(self.compiler.compile(params.structured)) if params.structured is not None else None,
            **asdict(assigned),
        )
        request.multi_step = is_multi_step(request) and self.spec_manager.can_multi_step(request.method)
        return request

    def _prediction(self, params: SamplingParams) -> list[int]:
        """The expected answer as tokens. It begins where the prompt ends, so no special token opens it."""
        if isinstance(params.prediction, str):
            return self.tokenizer.encode(params.prediction, add_special=False)
        return [int(token) for token in params.prediction or ()]

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """A word stands at the start of a line or after a space: both spellings are banned."""
        spellings = [spelling for word in params.bad_words for spelling in (word, " " + word.lstrip())]
        encoded = [self.tokenizer.encode(s, add_special=False, parse_special=False) for s in spellings]
        return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))  # what has no tokens never comes

    def _check(self, tokens: list[int], params: SamplingParams) -> None:
        if not tokens:
            raise UserError("the prompt is empty: give at least one token")
        named = {
            "the prompt": tokens,
            "`logit_bias`": params.logit_bias,
            "`allowed_token_ids`": params.allowed_token_ids,
            "`banned_token_ids`": params.banned_token_ids,
            "`stop_token_ids`": params.stop_token_ids,
            "`prediction`": params.prediction if not isinstance(params.prediction, str) else (),
        }
        for name, ids in named.items():
            for token in ids or ():
                if not 0 <= token < self.vocabulary:
                    raise UserError(f"{name} holds token {token}: the vocabulary ends at {self.vocabulary - 1}")
        if len(tokens) >= self.resolved.max_context:
            raise UserError(
                f"the prompt has {len(tokens)} tokens and the context holds {self.resolved.max_context}, one of them "
                "for the answer: shorten the prompt, or raise `max_context` or `cache_tokens`"
            )


def mix(seed: int, index: int) -> int:
    """A seed of its own for each request and sample: SplitMix64 of the two."""
    mask = 2**64 - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
