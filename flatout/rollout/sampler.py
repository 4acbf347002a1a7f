"""What a sampler is asked, and what it returns: token ids in, token ids with log-probabilities out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, Literal

from flatout.errors import ResourceError, UsageError

MAX_NEW_TOKENS = 1 << 20
# logits are divided by the temperature; below this, they overflow the range of fp16, then of fp32
MIN_TEMPERATURE = 1e-3

Ending = Literal["stop", "length", "positions"]
"""Why an answer ended: at a stop token, after `max_new_tokens`, or where the model has no further positions."""

OnToken = Callable[[int, int, int], None]
"""Gets each token in the order of sampling: the prompt's index, the completion's, and the token id."""

OnAnswer = Callable[[int, int, "Completion"], None]
"""Gets each answer once it has ended, as OnToken its tokens."""

MAX_WHOLE = (1 << 63) - 1


def _is_whole(least: int, most: int, value: Any) -> bool:
    return isinstance(value, Integral) and least <= int(value) <= most


# which values may be drawn by, also if a model's generation_config.json has them
BOUNDS: dict[str, Callable[[Any], bool]] = {
    "temperature": lambda value: 0 <= value < math.inf,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": partial(_is_whole, 0, MAX_WHOLE),
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: value > 0,
}


def check_options(max_new_tokens: Any, temperature: Any, top_p: Any, top_k: Any, seed: Any, n: Any = 1) -> None:
    """Raise UsageError for a value that nobody can mean; None: the model's own."""
    checked: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
        "max_new_tokens": (max_new_tokens, partial(_is_whole, 1, MAX_NEW_TOKENS), f"1 to {MAX_NEW_TOKENS:,}"),
        "temperature": (
            temperature,
            lambda value: BOUNDS["temperature"](value) and not 0 < value < MIN_TEMPERATURE,
            f"0 (greedy), or at least {MIN_TEMPERATURE:g}",
        ),
        "top_p": (top_p, BOUNDS["top_p"], "more than 0, at most 1"),
        "top_k": (top_k, BOUNDS["top_k"], "at least 1, or 0 for all tokens"),
        "seed": (seed, partial(_is_whole, 0, MAX_WHOLE), "0 to 2**63 - 1"),
        "n": (n, partial(_is_whole, 1, MAX_WHOLE), "at least 1"),
    }
    for name, (value, is_right, expected) in checked.items():
        try:
            if (value is None and name in ("temperature", "top_p", "top_k")) or is_right(value):
                continue
        except TypeError:  # no number
            pass
        shown = f"{value:g}" if isinstance(value, float) else repr(value)
        raise UsageError(f"{name} is {shown}; expected {expected}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn: from softmax(logits / temperature), cut by top_k, top_p and min_p in this order."""

    max_new_tokens: int
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int | None = None
    """Keep so many of the likeliest tokens; None: all, here and below."""
    top_p: float | None = None
    """Keep the fewest tokens that have this probability together."""
    min_p: float | None = None
    """Keep those with at least this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Before that, logits of tokens that the prompt or the answer has are divided by it where they are positive, else
    multiplied (CTRL, arXiv:1909.05858)."""
    seed: int = 0
    """The draws of a completion depend on it, its prompt's number and its own, and on nothing else."""
    stop_ids: frozenset[int] = frozenset()
    """An answer ends after one of these."""
    never_ids: frozenset[int] = frozenset()
    """Tokens that are not drawn."""
    max_positions: int | None = None
    """An answer ends where it has so many tokens with its prompt."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer: its token ids, a stop token included, and how likely each was.

    `logprobs` are natural logarithms of softmax(logits / temperature), computed in fp32 (fp64 in fp64): of the
    distribution that tokens are drawn from, before cuts and penalty. Of greedy answers they are the model's own, at
    temperature 1.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ending: Ending
    text: str = ""
    """The tokens without special ones as text; empty from a sampler, which has no tokenizer."""

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """The token ids without the stop token."""
        return self.token_ids[:-1] if self.ending == "stop" else self.token_ids


class PicturePrompt(tuple[int, ...]):
    """The token ids of a prompt, and the files of the pictures that its picture tokens stand for."""

    pictures: tuple[bytes, ...]

    def __new__(cls, token_ids: Iterable[int], pictures: Iterable[bytes]) -> PicturePrompt:
        made = super().__new__(cls, token_ids)
        made.pictures = tuple(pictures)
        return made


def pictures_of(prompt: Sequence[int]) -> tuple[bytes, ...]:
    """Return the files of a prompt's pictures; empty for one without any."""
    return prompt.pictures if isinstance(prompt, PicturePrompt) else ()


def followed(prompt: Sequence[int], token_ids: Sequence[int]) -> Sequence[int]:
    """Return a prompt and the tokens after it, with its pictures."""
    both = (*prompt, *token_ids)
    return PicturePrompt(both, prompt.pictures) if isinstance(prompt, PicturePrompt) else both


class NoRoomError(ResourceError):
    """Memory has no room for the keys and values of a single answer."""
