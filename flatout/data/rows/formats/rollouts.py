"""Answers that a model has sampled, as token ids: how likely each token was, and how good each answer is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flatout.config.objective import ADVANTAGE, REWARD, SAMPLER_LOGPROB
from flatout.data.columns import PREFIX_TOKENS
from flatout.data.conversation import PreferenceRow, TokenRow
from flatout.data.rows.formats.fields import FieldError, Row, Uses, list_at, number_at, object_at
from flatout.data.rows.formats.plain import MASK_COLUMNS, check_token_id, parse_tokens

GROUP, PROMPT = "answers", "prompt_ids"
_IDS, _LOGPROBS = ("token_ids", "input_ids"), "logprobs"
# natural logarithms: in fp32, that of a 1 may be above 0; vLLM writes -9999 for one that is not known
_LEAST, _MOST = -1000.0, 1e-3


def parse_rollouts(row: Row) -> PreferenceRow:
    """Parse a group: `prompt_ids`, and `answers` with `token_ids`, `logprobs`, and `reward`, `advantage` or both.

    An answer's tokens follow the prompt's, and all were sampled unless labels (-100) or a mask say which. `logprobs`
    has a value for each token of the answer, as has `advantage` if it is a list; others' than sampled are not read.
    """
    column, place = row.name(GROUP), row.name(PROMPT)
    given = [] if row.get(PROMPT) is None else list_at(row.get(PROMPT), place)
    prompt = [check_token_id(value, f"{place}[{index}]") for index, value in enumerate(given)]
    answers, columns = list[TokenRow](), dict[str, list[float]]()
    for index, value in enumerate(list_at(row.get(GROUP), column)):
        place = f"{column}[{index}]"
        try:
            answer, own = _answer(Row(object_at(value, place), origin=row.origin), prompt)
        except FieldError as bad:
            raise bad.at(place) from None
        if answers and own.keys() != columns.keys():
            differ = " and ".join(sorted(own.keys() ^ columns.keys()))
            raise FieldError(f"only one of {column}[0] and {place} has {differ}; give it to all answers, or to none")
        answers.append(answer)
        for name, values in own.items():
            columns.setdefault(name, []).extend(values)
    if not answers:
        raise FieldError(f"{column} is empty; a group has at least one answer")
    filled = {name: tuple(values) for name, values in columns.items()}
    return PreferenceRow(tuple(answers), (tuple(range(len(answers))),), row.origin, filled)


def _answer(row: Row, prompt: Sequence[int]) -> tuple[TokenRow, dict[str, list[float]]]:
    """Return one answer behind its prompt, and its values by column. Raises FieldError, from the field on."""
    if row.get(_LOGPROBS) is None:
        raise FieldError("has no logprobs; write the sampler's: one a token, of the distribution it was drawn from")
    if not prompt and all(row.get(name) is None for name in ("labels", *MASK_COLUMNS)):
        raise FieldError(f"has no labels, and the row no {PROMPT}, so nothing says which tokens were sampled; add one")
    renamed = replace(row.options, columns={"input_ids": row.named(_IDS)})
    answer, before = parse_tokens(replace(row, options=renamed)), [0.0] * len(prompt)
    sampled = (*[False] * len(prompt), *answer.loss_mask) if prompt else (False, *answer.loss_mask[1:])
    columns = {SAMPLER_LOGPROB: before + _per_token(row, _LOGPROBS, sampled[len(prompt) :])}
    for index, value in enumerate(columns[SAMPLER_LOGPROB][len(prompt) :]):
        if not _LEAST <= value <= _MOST:
            raise FieldError(f"logprobs[{index}] is {value:g}; expected the natural logarithm of a probability")
    if row.get(REWARD) is not None:
        columns[REWARD] = [number_at(row.get(REWARD), REWARD)]
    if row.get(ADVANTAGE) is not None:
        columns[ADVANTAGE] = before + _per_token(row, ADVANTAGE, sampled[len(prompt) :])
    if len(columns) == 1:
        raise FieldError("has neither reward nor advantage; give one of them")
    return TokenRow((*prompt, *answer.token_ids), sampled, row.origin), columns


def _per_token(row: Row, name: str, sampled: Sequence[bool]) -> list[float]:
    """Return a value for each token of an answer, 0 where none was sampled, of a list or of an advantage for all."""
    value = row.get(name)
    is_one = name == ADVANTAGE and isinstance(value, int | float)
    values = [value] * len(sampled) if is_one else list_at(value, name)
    if len(values) != len(sampled):
        raise FieldError(f"{name} has {len(values)} values, but the answer {len(sampled)} tokens; give one for each")
    pairs = enumerate(zip(values, sampled, strict=True))
    return [number_at(one, f"{name}[{index}]") if is_sampled else 0.0 for index, (one, is_sampled) in pairs]


def is_rollout(row: Row) -> bool:
    """Whether a row has answers as token ids."""
    return not _first(row).keys().isdisjoint(_IDS)


def uses_of_rollouts(row: Row) -> Uses:
    """Return what groups fill: all rows have rewards, advantages or both, as the first answer has."""
    worth = [name for name in (ADVANTAGE, REWARD) if _first(row).get(name) is not None]
    return Uses((*worth, SAMPLER_LOGPROB, PREFIX_TOKENS))


def _first(row: Row) -> dict[str, Any]:
    given = row.get(GROUP)
    return given[0] if isinstance(given, list) and given and isinstance(given[0], dict) else {}
