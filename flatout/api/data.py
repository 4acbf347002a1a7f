"""Rows, chat templates, tokenizers and tokenized data sets, as a run reads them.

TokenStore                      a tokenized data set: lengths, samples, meta
load_tokenizer(name, revision)  the tokenizer of a folder or hub id
REGISTRY, own_paths(root)       the file that lists the data sets of a folder, and all that is flatout's there
ROW_TYPES, row_type(path)       endings of files of rows, and the one of a file
CHAT_COLUMNS                    columns that hold the turns of a conversation
TEMPLATES                       the names that data.template takes, besides .jinja files
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout.config.schema import Config, SourceConfig
from flatout.data import registry
from flatout.data.conversation import Conversation, Origin, PreferenceRow, is_empty
from flatout.data.loss_mask.mask import Masker
from flatout.data.registry import FILE_NAME as REGISTRY
from flatout.data.registry import own_paths
from flatout.data.rows.formats.advice import ColumnsError
from flatout.data.rows.formats.conversations import CHAT_COLUMNS
from flatout.data.rows.formats.parser import make_parser
from flatout.data.rows.read import ROW_TYPES, RawRow, row_type
from flatout.data.templates import template as templates
from flatout.data.templates.template import OURS as TEMPLATES
from flatout.data.token_store import TokenStore
from flatout.data.tokenizer import load_tokenizer
from flatout.errors import DataError, UsageError
from flatout.io.json_file import read_json

__all__ = [
    "CHAT_COLUMNS", "REGISTRY", "ROW_TYPES", "TEMPLATES", "MessageReader", "TokenStore", "annotate_data_set",
    "data_set_entry", "data_sets", "end_of_turn", "load_processor", "load_tokenizer", "open_data_set",
    "open_or_build", "own_paths", "read_rows", "recognize_columns", "render", "row_type", "template_text",
]  # fmt: skip


def read_rows(path: str, **options: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the columns of each row of a file, folder or hub id; `options` are those of data.sources, such as subset.

    Raises DataError if nothing is there or a row cannot be read.
    """
    from flatout.data.rows.converter import converted
    from flatout.data.rows.sources import open_source  # lazy: it hashes files, and may ask the hub

    source = SourceConfig(path=path, **options)
    for row in converted(open_source(source), source).rows():
        yield row.columns


class MessageReader:
    """Reads rows of any format as turns of `role` and `content`; the format is that of the first row."""

    def __init__(self, first_row: Mapping[str, Any], name: str) -> None:
        """Recognize the format; errors call the rows `name`. Raises DataError for one that is unknown."""
        self._name = name
        self._parser = make_parser(SourceConfig(path=name), RawRow(Origin(name, 1), dict(first_row)))

    def messages(self, row: Mapping[str, Any], number: int) -> list[dict[str, str]]:
        """Return the turns of row `number`, which counts from 1.

        Raises DataError for a bad row, UsageError for one with more than roles and contents: pairs of answers, tool
        calls, reasoning, variables of the template or flags of loss.
        """
        sample = self._parser.parse(RawRow(Origin(self._name, number), dict(row)))
        has = ""
        if isinstance(sample, PreferenceRow):
            has = f"{self._parser.format} rows"
        elif isinstance(sample, Conversation):
            turns = sample.messages
            if any(turn.silent or (turn.train is not None and not is_empty(turn)) for turn in turns):
                has = "flags of what carries loss"
            elif sample.template_args or any(turn.tool_calls or turn.reasoning for turn in turns):
                has = "tool calls, reasoning or chat_template_kwargs"
        if has:
            raise UsageError(f"{self._name}:{number} has {has}; pass the data set to the trainer as it is")
        messages = sample.messages if isinstance(sample, Conversation) else ()
        return [{"role": turn.role, "content": turn.content} for turn in messages]


def _first_row(path: Path) -> RawRow | None:
    """Return the first row of a file, if it has any. Raises DataError for one that cannot be read."""
    from flatout.data.rows.archives import read_file

    return next(read_file(path), None)


def recognize_columns(path: Path, source: str) -> tuple[Mapping[str, Any], dict[str, str], str]:
    """Return the first row of a file, the columns that would make it readable, and why no format reads it.

    The reason is "" if a format reads it as it is; columns are empty where none would help. Errors call the file
    `source`. Raises DataError if it has no rows.
    """
    if (row := _first_row(path)) is None:
        raise DataError(f"{source} has no rows; choose another file")
    unknown = "no known format has these columns"
    try:
        make_parser(SourceConfig(path=source, hub=False), row)
    except ColumnsError as error:
        return row.columns, error.fixes[0].settings["data.sources"][0]["columns"], unknown
    except DataError as error:
        return row.columns, {}, unknown if unknown in str(error) else str(error)
    return row.columns, {}, ""


def load_processor(name: str, tokenizer: Any) -> Any:
    """Return the processor of a vision-language model, with this tokenizer. Raises DataError if there is none."""
    from flatout.data.pictures.processor import PictureProcessor  # lazy: it imports transformers

    return PictureProcessor(name, tokenizer).processor


def open_or_build(config: Config, log: Callable[[str], None], **options: Any) -> TokenStore:
    """Return the tokenized data set of a configuration, which is built if it is not there; `log` gets lines of text.

    `options`: `replaces` another of its name (the default), `reads_again` pictures, `progress` gets rows done and all.
    """
    from flatout.data import build  # lazy: it imports transformers

    return build.open_or_build(config.data, config.model.name, log=log, **options)


def open_data_set(name: str, root: Path, *, verify: bool = True) -> TokenStore:
    """Return a data set that was built, with its files verified. Raises DataError with the known names without one."""
    return TokenStore.open(registry.entry_dir(root, registry.find(root, name)), verify=verify)


def data_sets(root: Path) -> list[registry.Entry]:
    """Return what data_config.json says of all data sets that were built. Raises DataError if it is damaged."""
    return list(registry.load(root).values())


def data_set_entry(name: str, root: Path) -> dict[str, Any]:
    """Return what data_config.json says of a data set, also under keys that are not flatout's. Raises DataError."""
    entry, file = registry.find(root, name), root / registry.FILE_NAME
    raw = read_json(file, DataError) if file.exists() else []
    return {"name": name, "tokenizer": entry.tokenizer} | next((one for one in raw if one["name"] == name), {})


def annotate_data_set(name: str, root: Path, keys: Mapping[str, Any]) -> None:
    """Add keys of your own to what data_config.json says of a data set. Raises DataError if it is not there."""
    registry.upsert(root, registry.find(root, name), dict(keys))


def template_text(tokenizer: Any, template: str | None = None) -> str:
    """Return the Jinja of a template: a name, a .jinja file, or None for the tokenizer's own. Raises DataError."""
    return templates.template_text(tokenizer, template, tokenizer.name_or_path)[1]


def end_of_turn(tokenizer: Any, text: str, name: str) -> str:
    """Return what this Jinja writes behind an answer, such as <|im_end|>; "" if that is nothing.

    Raises DataError, which calls the template `name`, if it cannot render a turn.
    """
    return Masker(templates.ChatTemplate.checked(name, text, tokenizer)).end_of_turn()


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], template: str | None = None) -> str:
    """Return a conversation as the text that is tokenized. Raises DataError for one that the template cannot render."""
    chosen = templates.choose_template(tokenizer, template, tokenizer.name_or_path)
    return chosen.render([dict(one) for one in messages])
