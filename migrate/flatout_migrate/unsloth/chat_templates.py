"""Unsloth's `chat_templates`: templates by its names, ShareGPT turns as messages, loss on answers only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flatout import UsageError
from flatout.api.data import CHAT_COLUMNS, TEMPLATES, MessageReader, end_of_turn, template_text
from flatout_migrate.translation import read_table, rules_of, translate

if TYPE_CHECKING:
    from flatout_migrate.unsloth.trainer import SFTTrainer

_NAMES: Mapping[str, str] = read_table("unsloth")["templates"]
# a template that comes with its models: the start of its names, and text that the tokenizer's own must contain
_SHIPPED: Mapping[str, str] = read_table("unsloth")["templates of models"]
_PRELUDE: str = read_table("unsloth")["prelude of templates"]


def get_chat_template(
    tokenizer: Any,
    chat_template: str | tuple[str, str] = "chatml",
    mapping: Mapping[str, str] | None = None,
    map_eos_token: bool = True,
    system_message: str | None = None,
) -> Any:
    """Give a tokenizer, or the one of a processor, a template, by Unsloth's name or as (Jinja, end of turn); return it.

    `mapping` names other keys and roles of turns. With `map_eos_token`, the end of turn becomes the eos token. Raises
    UsageError for a template that flatout lacks, or an end of turn that is no token, and DataError for a broken one.
    """
    if (inner := getattr(tokenizer, "tokenizer", tokenizer)) is not tokenizer:
        tokenizer.chat_template = get_chat_template(
            inner, chat_template, mapping, map_eos_token, system_message
        ).chat_template
        return tokenizer
    source, end = (chat_template, None) if isinstance(chat_template, str) else chat_template
    if end is None:
        name, own = _NAMES.get(source.lower(), source.lower()), tokenizer.chat_template or ""
        mark = next((mark for start, mark in _SHIPPED.items() if name.startswith(start)), None)
        if name not in TEMPLATES and (mark is None or mark not in own):
            raise UsageError(
                f"chat_template: {source!r} is neither one of {', '.join(TEMPLATES)} nor what this tokenizer came "
                "with; name one of them, or pass (JINJA, END_OF_TURN)"
            )
        source = template_text(tokenizer, name) if name in TEMPLATES else own
    keys = {"role": "role", "content": "content", "user": "user", "assistant": "assistant", **(mapping or {})}
    if mapping or system_message:
        roles = {keys["user"]: "user", keys["assistant"]: "assistant"}
        settings = {"roles": roles, "role": keys["role"], "content": keys["content"], "system": system_message or ""}
        source = _PRELUDE % {name: json.dumps(value, ensure_ascii=False) for name, value in settings.items()} + source
    written = end_of_turn(tokenizer, source, str(chat_template))
    end = written if end is None else end
    if map_eos_token and end and end != tokenizer.eos_token:
        if end not in tokenizer.get_vocab():
            raise UsageError(
                f"chat_template: {chat_template!r} ends turns by {end!r}, which is no token of this tokenizer; pass "
                "map_eos_token=False to write it in several tokens, or take the model's own template"
            )
        tokenizer.eos_token = end
    tokenizer.chat_template = source
    return tokenizer


def standardize_sharegpt(dataset: Any, **options: Any) -> Any:
    """Return a data set whose turns have `role` and `content`.

    Raises DataError for a bad row, UsageError for one with tool calls, reasoning, variables or flags of loss, which do
    not fit into these two keys. Such sets go into a trainer as they are: flatout reads ShareGPT itself.
    """
    translate(options, rules_of("unsloth/of standardize_sharegpt")).checked("standardize_sharegpt")
    column = next((name for name in CHAT_COLUMNS if name in dataset.column_names), CHAT_COLUMNS[0])
    reader = MessageReader(dataset[0], "dataset")

    def standardize(row: dict[str, Any], index: int) -> dict[str, Any]:
        return {column: reader.messages(row, index + 1)}

    return dataset.map(standardize, with_indices=True, remove_columns=list({"system"} & {*dataset.column_names}))


standardize_data_formats = standardize_sharegpt


def train_on_responses_only(
    trainer: SFTTrainer, instruction_part: str | None = None, response_part: str | None = None, **options: Any
) -> SFTTrainer:
    """Give loss to answers only: exactly by turns where the data has them, else from each response part on.

    An answer ends at the next instruction part. Raises UsageError if texts without turns come without both parts.
    """
    translate(options, rules_of("unsloth/of train_on_responses_only")).checked("train_on_responses_only")
    trainer.answers_only(instruction_part, response_part)
    return trainer
