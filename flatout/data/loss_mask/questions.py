"""Conversations whose template leaves out the reasoning of earlier answers: one sample for each question.

At inference, each answer follows the text that the template renders up to its question; there, no later question has
made the template leave out reasoning yet. A sample that ends before the next question is rendered in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from flatout.data.conversation import Conversation
from flatout.data.loss_mask.mask import MaskedText, Masker

Policy = Literal["split", "mask", "train"]


def masked_samples(masker: Masker, conversation: Conversation, policy: Policy) -> list[MaskedText]:
    """Render and mask a conversation: one text, or one for each question if earlier answers with loss lose reasoning.

    Raises DataError, see Masker.mask.
    """
    whole = masker.mask(conversation)
    lost = [turn for turn in whole.lost_reasoning if conversation.messages[turn].train is not False]
    if not lost or policy == "train":
        return [whole]
    if policy == "mask":
        messages = [replace(m, train=False) if k in lost else m for k, m in enumerate(conversation.messages)]
        masked = masker.mask(replace(conversation, messages=tuple(messages)))
        return [replace(masked, lost_reasoning=tuple(lost))]
    return list(_by_question(masker, conversation))


def _by_question(masker: Masker, conversation: Conversation) -> Iterator[MaskedText]:
    messages = conversation.messages
    asks = [k for k, m in enumerate(messages) if m.role == "user" and (not k or messages[k - 1].role != "user")]
    starts = [0, *asks[1:]]  # what precedes the first question belongs to it
    for start, end in zip(starts, [*asks[1:], len(messages)], strict=True):
        answers = [k for k in range(start, end) if messages[k].role == "assistant" and messages[k].train is not False]
        if not answers and masker.loss_type == "response_only" and not any(m.train for m in messages[start:end]):
            continue
        masked = masker.mask(replace(conversation, messages=messages[:end]), since=start)
        if set(masked.lost_reasoning).isdisjoint(answers):
            yield masked
            continue
        # the template keeps only the reasoning of the very last answer
        for first, last in zip([start, *(k + 1 for k in answers)], answers, strict=False):
            yield masker.mask(replace(conversation, messages=messages[: last + 1]), since=first)
