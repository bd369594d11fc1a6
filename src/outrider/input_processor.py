"""Prompts to requests: tokenization, seeds, speculation method, and checks of the parameters."""

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
    """Turns a prompt and its sampling parameters into requests."""

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
        """Return the grammar compiler. It is thread-safe: `requests` finds what another thread has compiled."""
        return Compiler(self.tokenizer, self.vocabulary, self.end_tokens)

    def requests(self, parent_id: str, number: int, prompt: Prompt, params: SamplingParams) -> list[Request]:
        """Make the `n` samples of a prompt. `number` counts the calls and seeds those without a seed."""
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        self._check(tokens, params)
        seed = params.seed if params.seed is not None else mix(self.resolved.seed, number)
        return [self._request(parent_id, index, tokens, params, seed) for index in range(params.n)]

    def _request(self, parent_id: str, index: int, tokens: list[int], params: SamplingParams, seed: int) -> Request:
        assigned = self.spec_manager.assign(params)
        request = Request(
            id=f"{parent_id}-{index}",
            prompt=tokens,
            params=params,
            seed=seed if index == 0 else mix(seed, index),
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
        """Tokenize the predicted output. It continues the prompt, so no special token is added."""
        if isinstance(params.prediction, str):
            return self.tokenizer.encode(params.prediction, add_special=False)
        return [int(token) for token in params.prediction or ()]

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Tokenize the banned words, each with and without a leading space."""
        spellings = [spelling for word in params.bad_words for spelling in (word, " " + word.lstrip())]
        encoded = [self.tokenizer.encode(s, add_special=False, parse_special=False) for s in spellings]
        return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))

    def _check(self, tokens: list[int], params: SamplingParams) -> None:
        if not tokens:
            raise UserError("the prompt is empty: give at least one token")
        by_name = {
            "the prompt": tokens,
            "`logit_bias`": params.logit_bias,
            "`allowed_token_ids`": params.allowed_token_ids,
            "`banned_token_ids`": params.banned_token_ids,
            "`stop_token_ids`": params.stop_token_ids,
            "`prediction`": params.prediction if not isinstance(params.prediction, str) else (),
        }
        for name, ids in by_name.items():
            for token in ids or ():
                if not 0 <= token < self.vocabulary:
                    raise UserError(f"{name} holds token {token}: the vocabulary ends at {self.vocabulary - 1}")
        if len(tokens) >= self.resolved.max_context:
            raise UserError(
                f"the prompt has {len(tokens)} tokens and the context holds {self.resolved.max_context}, one of them "
                "for the answer: shorten the prompt, or raise `max_context` or `cache_tokens`"
            )


def mix(seed: int, index: int) -> int:
    """Derive the seed of a request or sample: SplitMix64 of a seed and an index."""
    mask = 2**64 - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
