"""Scores a model on own questions: an answer is right if it equals one of the accepted answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flatout.data.prompt_file import Prompt
from flatout.errors import DataError, UsageError
from flatout.rollout.chat import Sampling, answer_all
from flatout.rollout.prompts import prompt_ids


def score_answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    ignore_case: bool,
    max_new_tokens: int,
    on_token: Callable[[int, bool, float], None] = lambda prompt, is_last, silent_s: None,
) -> list[dict[str, Any]]:
    """Return for each prompt: prompt, answer (greedy), accepted answers, and whether it is right.

    Space around answers never counts. `on_token` is that of `answer_all`. Raises UsageError for a tokenizer without
    chat template, DataError for a picture that its processor refuses.
    """

    def compared(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    ids = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            ids.append(prompt_ids(model, tokenizer, prompt.messages, prompt.pictures))
        except (DataError, UsageError) as error:
            raise error.at(prompt.origin or f"prompt {number}") from error
    greedy = Sampling(temperature=0.0)
    texts = answer_all(model, tokenizer, ids, max_new_tokens=max_new_tokens, sampling=greedy, on_token=on_token)
    return [
        {
            "prompt": prompt.text,
            "answer": text,
            "accepted": list(prompt.accepted),
            "right": compared(text) in map(compared, prompt.accepted),
        }
        for prompt, text in zip(prompts, texts, strict=True)
    ]
