"""Rows of every format, as a person or a machine may spoil them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuzz_hostile import VALUES, Mutation, damages, mutations
from fuzz_judge import Case
from fuzz_world import CASES, World, both

_BUILD = ("--tokenizer", "model", "--name", "new", "--num-procs", "1")
_ROWS: dict[str, Any] = CASES["rows"]
_NO_MEDIA = (
    "null", "zero", "false", "empty-text", "space", "empty-list", "list-of-null", "deep-list", "empty-map",
    "map-of-null",
)  # fmt: skip
_WITH_TOOLS = ("tools", "anthropic")
_TEXT_PLACES = {"instruction", "output", "value", "content", "prompt", "completion", "text"}


def cases(world: World) -> Iterator[Case]:
    """Every value at every place of a row of each format; of the file, its bytes, names and kinds."""
    for name, row in _ROWS.items():
        template = ("--template", "qwen3") if name in _WITH_TOOLS else ()
        yield _case(world, f"{name} as it is", _lines([row, row]), "accept", about=(), options=template)
        for mutation in mutations(row):
            must = "refuse" if _is_no_row(mutation) else "either"
            # a whole row first, so that the format is known by it
            lines, alone = _lines([row, mutation.tree]), json.dumps([mutation.tree]).encode()
            yield _case(world, f"{name} {mutation.name}", lines, must, options=template, drawn=True)
            if len(mutation.name) % 3 == 0:
                named = f"{name} {mutation.name} alone"
                yield _case(world, named, alone, "either", file="rows.json", options=template, drawn=True)
    yield from _keys(world)
    yield from _files(world)


def _keys(world: World) -> Iterator[Case]:
    """Every value under names that may decide about loss, in turns and as columns: obeyed, named, or refused."""
    question, answer = _ROWS["messages"]["messages"]
    for called, value in VALUES.items():
        if isinstance(value, float) and not math.isfinite(value):
            continue  # no JSON
        is_flag = isinstance(value, bool | int | float) and value in (0, 1)
        for key in ("train", "loss", "weight", "learn", "masked", "lang"):
            documented = key in ("train", "loss", "weight")
            must = "accept" if value is None or documented == is_flag else "refuse"
            turns = [question, answer, question, answer | {key: value}]
            says = None if documented or value is None or must == "refuse" else f"not read: {key} "
            lines = _lines([{"messages": turns}] * 2)
            yield _case(world, f"turn key {key} {called}", lines, must, drawn=True, says=says)
        for column in ("image", "images", "video", "audios"):
            must, row = "accept" if called in _NO_MEDIA else "refuse", _ROWS["messages"] | {column: value}
            yield _case(world, f"column {column} {called}", _lines([row]), must, drawn=True)
        for column in ("label", "train"):
            must, row = "refuse" if is_flag and not value else "accept", _ROWS["alpaca"] | {column: value}
            yield _case(world, f"column {column} {called}", _lines([row]), must, drawn=True)


def _case(
    world: World,
    name: str,
    content: bytes,
    must: Any,
    *,
    file: str = "rows.jsonl",
    about: tuple[str, ...] | None = None,
    options: tuple[str, ...] = (),
    spoil: Callable[[Path], object] = lambda file: None,
    drawn: bool = False,
    says: str | None = None,
) -> Case:
    def make(here: Path) -> None:
        (here / file).write_bytes(content)
        spoil(here / file)

    def done(here: Path, out: str) -> str | None:
        report = here / "data/built_dataset/new/report.json"
        if says is not None and says not in report.read_text():
            return f"does not say {says!r}"
        return None if (here / "data/built_dataset/new/manifest.json").is_file() else "built nothing"

    return Case(
        name, ("data", "build", file, *_BUILD, *options), both(world.put("model"), make), must,
        (file,) if about is None else about, keeps=("model",), done=done, drawn=drawn,
    )  # fmt: skip


def _is_no_row(mutation: Mutation) -> bool:
    """Whether the row has no text where each has to have one."""
    if not mutation.path:
        return mutation.how == "set" and not isinstance(mutation.value, dict)
    if mutation.how == "set" and mutation.path[-1] in _TEXT_PLACES and len(mutation.path) in (1, 3):
        return isinstance(mutation.value, bool | int | float | dict)
    return (
        mutation.how == "set"
        and mutation.path[0] in ("messages", "conversations", "input_ids")
        and (len(mutation.path) == 1 and not isinstance(mutation.value, list | str))
    )


def _lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _table(separator: str, rows: list[list[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, delimiter=separator).writerows(rows)
    return text.getvalue().encode()


def _files(world: World) -> Iterator[Case]:
    plain = _lines([_ROWS["alpaca"]] * 4)
    for file in ("rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.txt"):
        content = _whole(file)
        yield _case(world, f"{file} as it is", content, "accept", file=file, about=())
        for damage in damages(text=not file.endswith("parquet")):
            must: Any = "accept" if damage.harmless else "refuse"
            # text is text, and a table cut at a line's end is a table; JSON lines twice are more lines
            if file.endswith(("txt", "csv", "jsonl")) and damage.name not in ("missing", "empty", "directory", "zeros"):
                must = "accept" if damage.harmless else "either"
            # the reader of parquet starts at the end
            if (file, damage.name) == ("rows.parquet", "first-byte"):
                must = "accept"
            yield _case(world, f"{file} {damage.name}", content, must, file=file, spoil=damage.spoil)
    quoted = plain.decode().replace('"', "'").encode()
    header = ["instruction", "input", "output"]
    for name, (file, content, must) in {
        "single quotes": ("rows.jsonl", quoted, "refuse"),
        "trailing commas": ("rows.jsonl", plain.replace(b"}", b",}"), "refuse"),
        "comma after a row": ("rows.jsonl", plain.replace(b"}\n", b"},\n"), "refuse"),
        "JSON lines named json": ("rows.json", plain, "either"),
        "JSON named lines": ("rows.jsonl", _whole("rows.json"), "either"),
        "blank lines": ("rows.jsonl", plain.replace(b"\n", b"\n\n"), "accept"),
        "byte order mark": ("rows.jsonl", b"\xef\xbb\xbf" + plain, "accept"),
        "carriage returns only": ("rows.jsonl", plain.replace(b"\n", b"\r"), "either"),
        "key twice": ("rows.jsonl", plain.replace(b'"input"', b'"instruction"'), "refuse"),
        "NaN": ("rows.jsonl", plain + b'{"instruction": NaN, "output": "a"}\n', "refuse"),
        "number of 5000 digits": ("rows.jsonl", plain + b'{"instruction": ' + b"9" * 5000 + b"}\n", "refuse"),
        "torn last row": ("rows.jsonl", plain + plain[:30], "refuse"),
        "bad utf-8": ("rows.jsonl", plain + b'{"instruction": "\xff\xfe", "output": "a"}\n', "refuse"),
        "lone surrogate": ("rows.jsonl", plain + b'{"instruction": "\\ud800", "output": "a"}\n', "either"),
        "10 MB of one row": ("rows.jsonl", plain + json.dumps({"text": "long " * 2_000_000}).encode(), "either"),
        "gzip named jsonl": ("rows.jsonl", gzip.compress(plain), "refuse"),
        "gzip torn": ("rows.jsonl.gz", gzip.compress(plain)[:-9], "refuse"),
        "gzip of nothing": ("rows.jsonl.gz", gzip.compress(b""), "refuse"),
        "text named gz": ("rows.jsonl.gz", plain, "refuse"),
        "xz torn": ("rows.jsonl.xz", lzma.compress(plain)[:-9], "refuse"),
        "zip named jsonl": ("rows.jsonl", b"PK\x03\x04" + bytes(200), "refuse"),
        "semicolons": ("rows.csv", _table(";", [header, ["a", "", "b"]]), "refuse"),
        "tabs named csv": ("rows.csv", _table("\t", [header, ["a", "", "b"]]), "refuse"),
        "no header": ("rows.csv", _table(",", [["a", "", "b"], ["c", "", "d"]]), "refuse"),
        "only a header": ("rows.csv", _table(",", [header]), "refuse"),
        "a field too many": ("rows.csv", _table(",", [header, ["a", "", "b", "c"]]), "refuse"),
        "a field too few": ("rows.csv", _table(",", [header, ["a", "", "b"], ["a"]]), "refuse"),
        "open quote": ("rows.csv", b'instruction,input,output\n"a,b,c\n', "refuse"),
        "nul in a table": ("rows.csv", b"instruction,input,output\na\0,b,c\n", "either"),
        "field of 2 MB": ("rows.csv", _table(",", [header, ["a" * 2_000_000, "", "b"]]), "either"),
        "column twice": ("rows.csv", _table(",", [["instruction", "output", "output"], ["a", "b", "c"]]), "refuse"),
        "white space": ("rows.txt", b" \n \n\n", "refuse"),
        "parquet of the wrong name": ("rows.jsonl", _whole("rows.parquet"), "refuse"),
        "text named parquet": ("rows.parquet", plain, "refuse"),
        "text named arrow": ("rows.arrow", plain, "refuse"),
        "unknown ending": ("rows.zebra", plain, "refuse"),
        "no rows in parquet": ("rows.parquet", _parquet([], ["instruction", "output"]), "refuse"),
        "nulls in parquet": ("rows.parquet", _parquet([{"instruction": None, "output": None}]), "refuse"),
        "numbers in parquet": ("rows.parquet", _parquet([{"instruction": 1, "output": 2.5}]), "refuse"),
        "bytes in parquet": ("rows.parquet", _parquet([{"instruction": b"\xff", "output": b"\xfe"}]), "refuse"),
    }.items():
        yield _case(world, name, content, must, file=file)
    for option, values in CASES["options"].items():
        for value, must in values.items():
            about = (option.lstrip("-"), option, value)
            yield _case(world, f"{option} {value}", plain, must, about=about, options=(option, value))


def _whole(file: str) -> bytes:
    row = _ROWS["alpaca"]
    if file.endswith("parquet"):
        return _parquet([row] * 4)
    if file.endswith("csv"):
        return _table(",", [list(row), *([list(row.values())] * 4)])
    if file.endswith("txt"):
        return b"Once there was a fox.\nIt ran away.\n"
    return json.dumps([row] * 4, indent=1).encode() if file.endswith("json") else _lines([row] * 4)


def _parquet(rows: list[dict[str, Any]], names: list[str] | None = None) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(rows) if rows else pa.table({name: pa.array([], pa.string()) for name in names or ()})
    written = io.BytesIO()
    pq.write_table(table, written)
    return written.getvalue()
