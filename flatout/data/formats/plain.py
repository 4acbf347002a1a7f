"""Rows without turns: plain text and rows already tokenised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from flatout.data.conversation import Origin, PlainText, TokenRow
from flatout.data.formats.fields import FieldError, Reading, flag_at, kind, list_at, text_at

T = TypeVar("T")
_IGNORED_LABEL = -100
MASK_COLUMNS = ("trained", "loss_mask", "assistant_masks")


def parse_text(row: Mapping[str, Any], origin: Origin, reading: Reading) -> PlainText:
    """text: one document, trained on whole."""
    column = reading.name("text")
    text = text_at(row.get(column), column)
    if not text:
        raise FieldError(f"{column} is empty; there is nothing to learn")
    return PlainText(text, origin)


def parse_tokens(row: Mapping[str, Any], origin: Origin, reading: Reading) -> TokenRow:
    """input_ids, with labels (-100: no loss) or a mask column of 0 and 1; with neither, every token carries loss.

    Labels are not shifted: labels[i] is input_ids[i] or -100. Raises FieldError for columns of unequal length, NaN,
    negative or fractional values, and for padding (a 0 in attention_mask).
    """
    column = reading.name("input_ids")
    token_ids = _ints(row.get(column), column, check_token_id)
    if not token_ids:
        raise FieldError(f"{column} is empty; there is nothing to learn")
    num_tokens = len(token_ids)
    attention = reading.name("attention_mask")
    if row.get(attention) is not None:
        seen = _column(row, attention, column, num_tokens, flag_at)
        if not all(seen):
            raise FieldError(f"{attention}[{seen.index(False)}] is 0: the row is padded; cut the padding off")
    masks = [reading.name(name) for name in MASK_COLUMNS if row.get(reading.name(name)) is not None]
    labels = reading.name("labels")
    if row.get(labels) is not None:
        masks.append(labels)
    if len(masks) > 1:
        raise FieldError(f"{' and '.join(masks)} both say which tokens carry loss; keep one")
    if not masks:
        return TokenRow(token_ids, (True,) * num_tokens, origin)
    if masks == [labels]:
        wanted = _column(row, labels, column, num_tokens, _check_label)
        return TokenRow(token_ids, _trained_of(wanted, token_ids, labels, column), origin)
    return TokenRow(token_ids, tuple(_column(row, masks[0], column, num_tokens, flag_at)), origin)


def check_token_id(value: object, place: str) -> int:
    """A token id. Raises FieldError for all but integers from 0 (whether the vocabulary has it is seen later)."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise FieldError(f"{place} is {kind(value)}, not an integer")
    if value < 0:
        raise FieldError(f"{place} is {value}; token ids start at 0")
    return value


def _check_label(value: object, place: str) -> int:
    return _IGNORED_LABEL if value == _IGNORED_LABEL else check_token_id(value, place)


def _ints(value: object, place: str, check: Callable[[object, str], int]) -> tuple[int, ...]:
    return tuple(check(item, f"{place}[{index}]") for index, item in enumerate(list_at(value, place)))


def _column(
    row: Mapping[str, Any], name: str, ids_name: str, num_tokens: int, check: Callable[[object, str], T]
) -> list[T]:
    values = list_at(row[name], name)
    if len(values) != num_tokens:
        raise FieldError(f"{name} has {len(values)} values, {ids_name} has {num_tokens}; they must be equally long")
    return [check(value, f"{name}[{index}]") for index, value in enumerate(values)]


def _trained_of(labels: Sequence[int], token_ids: Sequence[int], name: str, ids_name: str) -> tuple[bool, ...]:
    for index, (label, token_id) in enumerate(zip(labels, token_ids, strict=True)):
        if label not in (_IGNORED_LABEL, token_id):
            raise FieldError(
                f"{name}[{index}] is {label}, {ids_name}[{index}] is {token_id}; "
                f"a label is -100 or the token at the same place (not shifted)"
            )
    return tuple(label != _IGNORED_LABEL for label in labels)
