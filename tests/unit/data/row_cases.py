"""Rows as people have them, in cases/*.jsonl, and the sample that a source makes of one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flatout.config.schema import SourceConfig
from flatout.data.conversation import Conversation, Message, Origin, Sample, ToolCall
from flatout.data.rows.formats.parser import make_parser
from flatout.data.rows.read import RawRow

Row = dict[str, Any]
ORIGIN = Origin("train.jsonl", 8)


def cases(name: str) -> list[Row]:
    """The lines of a file of cases, one each."""
    return [
        json.loads(line) for line in (Path(__file__).parent / "cases" / name).read_text("utf-8").split("\n") if line
    ]


def write_rows(path: Path | str, rows: Iterable[Row]) -> Path:
    """Write rows as JSON Lines."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return Path(path)


def messages(turns: Sequence[Row]) -> tuple[Message, ...]:
    """Turns as a file of cases has them: the fields of a message, those of its calls among them."""
    calls = [{"tool_calls": tuple(ToolCall(**call) for call in turn.get("tool_calls", ()))} for turn in turns]
    return tuple(Message(**turn | own) for turn, own in zip(turns, calls, strict=True))


def parsed(row: Row, **settings: Any) -> Sample:
    """The sample of a row, read as the first of its source."""
    raw = RawRow(ORIGIN, row)
    return make_parser(SourceConfig(**{"path": "train.jsonl"} | settings), raw).parse(raw)


def conversation(row: Row, **settings: Any) -> Conversation:
    """The same, of a row with turns."""
    sample = parsed(row, **settings)
    assert isinstance(sample, Conversation)
    assert sample.origin == ORIGIN
    return sample
