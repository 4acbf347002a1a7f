"""Scores a model on own questions: an answer is right if it equals one of the accepted answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flatout.data.prompts import Prompt
from flatout.errors import UsageError
from flatout.models.generate import Sampling, answer


def score_answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    ignore_case: bool,
    max_new_tokens: int,
    on_token: Callable[[int, float], None] = lambda number, silent_s: None,
) -> Iterator[dict[str, Any]]:
    """Yield for each prompt: prompt, answer (greedy), accepted answers, and whether it is right.

    Space around answers never counts. Raises UsageError for a tokenizer without chat template.
    """

    def compared(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    greedy = Sampling(temperature=0.0)
    for number, prompt in enumerate(prompts, start=1):
        try:
            text = answer(
                model, tokenizer, prompt.messages, max_new_tokens=max_new_tokens, sampling=greedy, on_token=on_token
            )
        except UsageError as error:
            raise UsageError(f"{prompt.origin or f'prompt {number}'}: {error}") from error
        is_right = compared(text) in map(compared, prompt.accepted)
        yield {"prompt": prompt.text, "answer": text, "accepted": list(prompt.accepted), "right": is_right}
