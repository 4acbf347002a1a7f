"""Reads prompts from a file: texts or conversations, with the answers that count as right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatout.data.conversation import PICTURE, ROLES, Origin
from flatout.data.pictures.read import read_picture
from flatout.data.rows.formats.conversations import TurnReader
from flatout.data.rows.formats.fields import FieldError, Row, SourceOptions
from flatout.data.rows.formats.pictures import MARK, holds_something, is_picture_column, with_pictures
from flatout.data.rows.read import RawRow, read_rows
from flatout.errors import DataError, reason_of

FILE_TYPES = (".txt", ".json", ".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that ends where the assistant answers."""

    messages: tuple[dict[str, Any], ...]
    accepted: tuple[str, ...] = ()
    """The answers that count as right, if any are known."""
    origin: str = ""
    """Its file and row, empty for a prompt of no file."""
    pictures: tuple[bytes, ...] = ()
    """The files of those that the PICTURE characters of contents stand for, in their order."""

    @property
    def text(self) -> str:
        """The prompt for people: a single turn's content, or all turns with their roles; <image> for a picture."""
        if len(self.messages) == 1:
            return str(self.messages[0]["content"]).replace(PICTURE, MARK)
        turns = "\n".join(f"{message['role']}: {message['content']}" for message in self.messages)
        return turns.replace(PICTURE, MARK)


def user_prompt(text: str) -> Prompt:
    """Return a prompt of one user turn."""
    return Prompt(({"role": "user", "content": text},))


def read_prompts(path: Path, *, max_bytes: int) -> list[Prompt]:
    """Read JSON or JSONL rows with `prompt` or `messages` and optional `answer` (text or list), or .txt lines.

    A `prompt` is a text, its parts, or turns, as `messages` are. Pictures are given as in rows of data: as parts, or in
    a column `images`, with paths below the file's folder.

    Raises DataError with file and row for a missing, empty, too large or unreadable file, and for a row without prompt.
    """
    if path.suffix.lower() not in FILE_TYPES:
        raise DataError(f"{path}: expected a file of prompts: {', '.join(FILE_TYPES)}")
    try:
        num_bytes = path.stat().st_size
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {reason_of(error)}; name a file of prompts") from error
    if num_bytes > max_bytes:
        raise DataError(f"{path}: {num_bytes:,} bytes of prompts exceed the limit of {max_bytes:,}; use fewer")
    prompts = [_prompt_of(row) for row in _rows(path)]
    if not prompts:
        raise DataError(f"{path}: no prompts; write one a line, or rows with `prompt` or `messages`")
    return prompts


def _rows(path: Path) -> Iterator[RawRow]:
    for row in read_rows(path):
        if path.suffix.lower() != ".txt":
            yield row
            continue
        # to the reader of rows, a text file is one document
        for number, line in enumerate(row.columns["text"].split("\n"), start=1):
            if line.strip():
                yield RawRow(Origin(str(path), number), {"prompt": line.strip()})


def _prompt_of(row: RawRow) -> Prompt:
    columns, where = row.columns, row.origin
    answer = columns.get("answer", [])
    accepted = [answer] if isinstance(answer, str) else answer
    if not isinstance(accepted, list) or not all(isinstance(text, str) for text in accepted):
        raise DataError(f"{where}: answer must be a text or a list of texts")
    if ("prompt" in columns) == ("messages" in columns):
        raise DataError(f"{where}: expected one of the columns prompt and messages; found {', '.join(columns)}")
    asked = columns.get("prompt", columns.get("messages"))
    is_turns = isinstance(asked, list) and any(isinstance(turn, dict) and "role" in turn for turn in asked)
    messages = [{"role": "user", "content": asked}] if "prompt" in columns and not is_turns else asked
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: messages must be a list of turns with role and content")
    turns = [turn if isinstance(turn, dict) else {} for turn in messages]
    shown = shown_prompt([{key: turn.get(key) for key in ("role", "content")} for turn in turns], columns, where)
    for place, turn in enumerate(shown.messages, start=1):
        said = turn["content"]
        if turn["role"] not in ROLES or not (isinstance(said, str) and said.strip()):
            needs = f"a role ({', '.join(ROLES)}) and a text, or parts, as its content"
            raise DataError(f"{where}: turn {place} needs {needs}")
    if shown.messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: the last turn is the assistant's; leave it out, and give it as `answer`")
    return replace(shown, accepted=tuple(accepted), origin=str(where))


def shown_prompt(
    messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], origin: Origin, root: Path | None = None
) -> Prompt:
    """Return the prompt of turns and of the pictures in them, or in a column `images` of the row; see `read_picture`.

    Parts of text are joined, as in rows of data; other turns without pictures are kept. Raises DataError.
    """
    has_parts = any(isinstance(message.get("content"), list) for message in messages)
    if not has_parts and not any(is_picture_column(name) and holds_something(value) for name, value in row.items()):
        return Prompt(tuple(dict(message) for message in messages))
    turns = TurnReader(SourceOptions())
    try:
        turns.read(list(messages), "messages" if "messages" in row else "prompt")
        placed = with_pictures(turns.messages, Row(row))
    except FieldError as error:
        raise DataError(f"{origin}: {error.text}") from None
    if any(message.tool_calls or message.reasoning for message in placed):
        raise DataError(f"{origin}: has tool calls or reasoning, which are not read beside pictures or lists of parts")
    sources = [picture for message in placed for picture in message.pictures]
    files = tuple(read_picture(source, origin, root).content for source in sources)
    return Prompt(tuple({"role": message.role, "content": message.content} for message in placed), pictures=files)
