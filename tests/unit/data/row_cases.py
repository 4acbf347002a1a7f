"""Rows as people have them, in cases/*.jsonl, and the sample that a source makes of one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from transformers import PreTrainedTokenizerBase

from flatout.config.schema import DataConfig, SourceConfig
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


_READ = """
import json, sys
from flatout.config.schema import SourceConfig
from flatout.data.rows.sources import open_source
from flatout.errors import FlatoutError
for given in map(json.loads, sys.argv[1:]):
    try:
        source = open_source(SourceConfig(**given))
        rows = list(source.rows())
        ends = [rows[0].columns, str(rows[-1].origin)]
        print(json.dumps([len(rows), *ends, source.num_rows, source.address, *source.files]))
    except FlatoutError as error:
        print(json.dumps([error.exit_code, error.text]))
"""


def read_in_a_process(env: Mapping[str, str], *sources: Row) -> list[list[Any]]:
    """What each source gives in a process of its own: clients look at the environment once, or hold Python's lock.

    Its number of rows, the first row, the place of the last, `num_rows`, its address and files; or code and error.
    """
    command = [sys.executable, "-c", _READ, *map(json.dumps, sources)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def bracketed(tokenizer: PreTrainedTokenizerBase, token_ids: ArrayLike, loss_mask: ArrayLike) -> str:
    """The text of a sample, with what carries loss in brackets."""
    ids, mask = np.asarray(token_ids), np.asarray(loss_mask)
    pieces = np.split(ids, np.flatnonzero(np.diff(mask.astype(int))) + 1)
    shown = [tokenizer.decode(piece.tolist()) for piece in pieces]
    return "".join(f"⟦{one}⟧" if (place % 2) != bool(mask[0]) else one for place, one in enumerate(shown))


def data_config(root: Path, *rows: Path, **settings: Any) -> DataConfig:
    """The data set d of these files in ChatML, built by one process."""
    base = {"name": "d", "root": root, "template": "chatml", "num_procs": 1, "max_tokens": None}
    return DataConfig.model_validate(base | {"sources": [{"path": str(path)} for path in rows]} | settings)
