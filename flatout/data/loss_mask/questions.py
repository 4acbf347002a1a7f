"""Conversations whose template writes earlier answers otherwise than inference shows them: a sample a question.

Most templates leave out reasoning there; some move the list of tools, or end earlier answers otherwise. At inference,
each answer follows the text that the template renders up to its question, when no later question is known. A sample
that ends before the next question is rendered in the same way.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from flatout.data.conversation import Conversation
from flatout.data.loss_mask.mask import MaskedText, Masker
from flatout.errors import DataError

Policy = Literal["split", "mask", "train"]


def masked_samples(masker: Masker, conversation: Conversation, policy: Policy) -> list[MaskedText]:
    """Render and mask a conversation: one text, or one for each question if earlier answers with loss lose reasoning.

    Raises DataError, see Masker.mask.
    """
    asks, lost_turns, roles = _asks(conversation), set[int](), [m.role for m in conversation.messages]
    if len(asks) > 1 and masker.rewrites_earlier(bool(conversation.tools)):
        lost_turns = {k for k in range(asks[-1]) if roles[k] == "assistant"}
    try:
        whole = masker.mask(_silent(conversation, lost_turns) if policy == "mask" else conversation)
    except DataError:
        if policy != "split" or roles.count("assistant") < 2:
            raise
        with suppress(DataError):  # each answer alone may be proved where the whole is not
            return list(_by_question(masker, conversation))
        raise
    lost_turns.update(whole.lost_reasoning)
    lost = sorted(turn for turn in lost_turns if conversation.messages[turn].train is not False)
    if not lost and policy == "split" and len(asks) > 1 and whole.num_unlike_prompt and "tool" in roles:
        with suppress(DataError):  # earlier calls may be written otherwise, too
            samples = list(_by_question(masker, conversation))
            if sum(sample.num_unlike_prompt for sample in samples) < whole.num_unlike_prompt:
                return samples
    if not lost:
        return [whole]
    if policy == "train":
        return [replace(whole, num_unlike_prompt=max(whole.num_unlike_prompt, len(lost)))]
    if policy == "mask":
        return [replace(masker.mask(_silent(conversation, lost_turns)), lost_reasoning=tuple(lost))]
    return list(_by_question(masker, conversation))


def _silent(conversation: Conversation, turns: Container[int]) -> Conversation:
    messages = (replace(m, train=False) if k in turns else m for k, m in enumerate(conversation.messages))
    return replace(conversation, messages=tuple(messages))


def _asks(conversation: Conversation) -> list[int]:
    """Return the turns that ask: of users, without those right after another."""
    messages = conversation.messages
    return [k for k, m in enumerate(messages) if m.role == "user" and (not k or messages[k - 1].role != "user")]


def _by_question(masker: Masker, conversation: Conversation) -> Iterator[MaskedText]:
    messages, asks = conversation.messages, _asks(conversation)
    starts = [0, *asks[1:]]  # what precedes the first question belongs to it
    for start, end in zip(starts, [*asks[1:], len(messages)], strict=True):
        answers = [k for k in range(start, end) if messages[k].role == "assistant" and messages[k].train is not False]
        if not answers and masker.loss_type == "response_only" and not any(m.train for m in messages[start:end]):
            continue
        try:
            masked = masker.mask(replace(conversation, messages=messages[:end]), since=start)
        except DataError:
            if len(answers) < 2:
                raise
        else:
            if set(masked.lost_reasoning).isdisjoint(answers):
                yield masked
                continue
        # the template keeps only the very last answer as it is
        for first, last in zip([start, *(k + 1 for k in answers)], answers, strict=False):
            yield masker.mask(replace(conversation, messages=messages[: last + 1]), since=first)
