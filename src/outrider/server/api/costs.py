"""Refuse requests whose fields would take the engine's thread from all other requests at every step."""

from __future__ import annotations

from .errors import ApiError
from .requests import GenerationRequest

MAX_BIASES = 2**18  # entries of `logit_bias` and `allowed_token_ids`, times samples: 5 ms a step (Neoverse-N1)
MAX_STOP_CHARACTERS = 2**14  # of all stop strings: 20 ms when the request starts
MAX_WORD_CHARACTERS = 2**15  # of all banned words: 30 ms when the request starts
MAX_PROMPT_LOGPROBS = 2**20  # entries of a response, in all of its choices: 60 MB


def check_costs(request: GenerationRequest, prompts: int = 1) -> None:
    """Check the fields whose cost grows with their length. `prompts`: of this request, each with `n` samples."""
    samples = (getattr(request, "n", None) or 1) * prompts
    for name in ("logit_bias", "allowed_token_ids"):
        count = len(getattr(request, name) or ())
        if count * samples > MAX_BIASES and count > 1:
            reason = f"has {count} entries for {samples} samples: at most {MAX_BIASES} in all"
            raise ApiError(400, f"`{name}` {reason}", param=name)
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    _check_characters("stop", stops, MAX_STOP_CHARACTERS)
    _check_characters("bad_words", request.bad_words or [], MAX_WORD_CHARACTERS)


def check_prompt_logprobs(count: int | None, tokens: int, samples: int, name: str = "prompt_logprobs") -> None:
    """Check the size of a response that lists `count` log-probabilities for each token of the prompt.

    samples: lists in the response. name: the field that asks for them.
    """
    entries = (1 + (count or 0)) * tokens * samples
    if count is not None and entries > MAX_PROMPT_LOGPROBS:
        reason = f"takes {entries} entries, for {tokens} tokens in {samples} lists: at most {MAX_PROMPT_LOGPROBS}"
        raise ApiError(400, f"`{name}` {reason}", param=name)


def _check_characters(name: str, texts: list[str], limit: int) -> None:
    count = sum(map(len, texts))
    if count > limit:
        raise ApiError(400, f"`{name}` has {count} characters in all: send at most {limit}", param=name)
