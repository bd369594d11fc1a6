"""Prompts to requests: tokenization, seeds, speculation method, and checks of the parameters."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, NotRequired, TypedDict

from .adapters import Adapter
from .config import ResolvedConfig
from .errors import ContextLengthError, PromptError, UserError
from .request import Request
from .speculation.manager import SpeculationManager
from .structured_output.compiler import Compiler
from .structured_output.matcher import GrammarMatcher
from .tokenizer import Tokenizer
from .types import SamplingParams
from .weights import Checkpoint


class TextPrompt(TypedDict):
    """A prompt as text, in the form of vLLM."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids, in the form of vLLM. `prompt`, if given, is returned with the output."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


# Characters of a predicted output that are tokenized, for each token of the context. Texts have 3 to 5 for a token.
# What is cut off is not drafted; the output is the same.
PREDICTION_CHARACTERS = 8
Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
FORMS = "a text, a list of token ids, or a mapping with `prompt` or `prompt_token_ids`"


@dataclass(frozen=True)
class PromptInput:
    """A prompt whose type was checked: a text, or tokens, which then count."""

    text: str | None = None
    tokens: list[int] | None = None


def read_prompt(prompt: Prompt | PromptInput, name: str = "prompt", forms: str = FORMS) -> PromptInput:
    """Check the type of a prompt. `name` is what errors call it, and `forms` what it may be."""
    if isinstance(prompt, PromptInput):
        return prompt
    if isinstance(prompt, str):
        return PromptInput(text=prompt)
    if isinstance(prompt, Mapping) and prompt:
        return _read_mapping(prompt, name)
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        return PromptInput(tokens=_read_tokens(prompt, name))
    raise UserError(f"`{name}` is {reprlib.repr(prompt)}: expected {forms}")


def _read_mapping(prompt: Mapping[str, Any], name: str) -> PromptInput:
    if "role" in prompt:
        raise UserError(f"`{name}` is a message: pass messages to `chat`")
    for key in prompt:
        if key not in ("prompt", "prompt_token_ids"):
            raise UserError(f"`{name}` has the key {key!r}: expected `prompt` or `prompt_token_ids`")
    text, tokens = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if not isinstance(text, str) and (text is not None or tokens is None):
        raise UserError(f"`{name}['prompt']` is {reprlib.repr(text)}: expected a text")
    if tokens is None:
        return PromptInput(text=text)
    ids = f"{name}['prompt_token_ids']"
    if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes | bytearray):
        raise UserError(f"`{ids}` is {reprlib.repr(tokens)}: expected a list of token ids")
    return PromptInput(text, _read_tokens(tokens, ids))


def _read_tokens(tokens: Sequence[Any], name: str) -> list[int]:
    for index, token in enumerate(tokens):
        if type(token) is not int and (not isinstance(token, Integral) or isinstance(token, bool)):
            raise UserError(f"`{name}[{index}]` is {reprlib.repr(token)}: expected a token id")
    return [int(token) for token in tokens]


class InputProcessor:
    """Turns a prompt and its sampling parameters into requests."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        tokenizer: Tokenizer,
        spec_manager: SpeculationManager,
        vocabulary: int,
        trained_context: int,
        end_tokens: frozenset[int],
    ) -> None:
        self.resolved, self.tokenizer, self.spec_manager = resolved, tokenizer, spec_manager
        self.vocabulary, self.trained_context, self.end_tokens = vocabulary, trained_context, end_tokens

    @cached_property
    def compiler(self) -> Compiler:
        """Return the grammar compiler. It is thread-safe: `requests` finds what another thread has compiled."""
        return Compiler(self.tokenizer, self.vocabulary, self.end_tokens)

    def requests(
        self,
        parent_id: str,
        number: int,
        prompt: PromptInput,
        params: SamplingParams,
        adapter: Adapter | None = None,
    ) -> list[Request]:
        """Make the `n` samples of a prompt. `number` counts the calls and seeds those without a seed."""
        tokens = prompt.tokens if prompt.tokens is not None else self.tokenizer.encode(prompt.text or "")
        self._check_ids(params)
        self.check_prompt(tokens)
        seed = params.seed if params.seed is not None else mix(self.resolved.seed, number)
        bad_words, prediction = self._bad_words(params), self._prediction(params)
        return [
            self._request(parent_id, index, tokens, params, seed, bad_words, prediction, adapter)
            for index in range(params.n)
        ]

    def _request(
        self,
        parent_id: str,
        index: int,
        tokens: list[int],
        params: SamplingParams,
        seed: int,
        bad_words: tuple[tuple[int, ...], ...],
        prediction: list[int],
        adapter: Adapter | None,
    ) -> Request:
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
            bad_words=bad_words,
            prediction=prediction,
            adapter=adapter,
            grammar=GrammarMatcher(self.compiler.compile(params.structured)) if params.structured is not None else None,
            **asdict(assigned),
        )
        request.multi_step = self.spec_manager.can_multi_step(request.method)
        return request

    def _prediction(self, params: SamplingParams) -> list[int]:
        """Tokenize the predicted output. It continues the prompt, so no special token is added."""
        limit = self.resolved.max_context
        if isinstance(params.prediction, str):
            text = params.prediction[: limit * PREDICTION_CHARACTERS]
            return self.tokenizer.encode(text, add_special=False)[:limit]
        return [int(token) for token in (params.prediction or ())[:limit]]

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Tokenize the banned words, each with and without a leading space."""
        spellings = [spelling for word in params.bad_words for spelling in (word, " " + word.lstrip())]
        encoded = [self.tokenizer.encode(s, add_special=False, parse_special=False) for s in spellings]
        return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))

    def _check_ids(self, params: SamplingParams) -> None:
        by_name = {
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

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Raise PromptError if a prompt cannot be served."""
        if not tokens:
            raise PromptError("is empty: give at least one token")
        for token in tokens:
            if not 0 <= token < self.vocabulary:
                raise PromptError(f"holds token {token}: the vocabulary ends at {self.vocabulary - 1}", tokens=tokens)
        if len(tokens) >= self.resolved.max_context:
            can_grow = self.resolved.max_context < self.trained_context
            raise ContextLengthError(
                f"has {len(tokens)} tokens and the context holds {self.resolved.max_context}, one of them "
                f"for the answer: shorten the prompt{', or raise `max_context` or `cache_tokens`' if can_grow else ''}",
                tokens=tokens,
            )


def end_tokens(checkpoint: Checkpoint, tokenizer: Tokenizer, vocabulary: int) -> frozenset[int]:
    """Return the end-of-text tokens that the model can write. Refuse one that its configuration puts beyond the end."""
    for token in checkpoint.end_ids:
        if token >= vocabulary:
            raise UserError(
                f"`{checkpoint.path}` has the `eos_token_id` {token}, and its vocabulary ends at {vocabulary - 1}: "
                "correct its configuration"
            )
    return frozenset(checkpoint.end_ids) | {token for token in tokenizer.end_ids if token < vocabulary}


def mix(seed: int, index: int) -> int:
    """Derive the seed of a request or sample: SplitMix64 of a seed and an index."""
    mask = 2**64 - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
