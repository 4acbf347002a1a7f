# ruff: noqa: E501  (a damaged file is a line)

import csv
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
import xxhash
from pyarrow import ipc, parquet

from flatout.config.schema import SourceConfig
from flatout.data.rows.sources import RowSource, open_source
from flatout.errors import DataError

ROWS = [{"text": "alpha\r\nbeta"}, {"text": "snow ☃ \u2028 line"}, {"text": "  kept  "}]


def opened(path: Path | str, **settings: Any) -> RowSource:
    return open_source(SourceConfig(path=str(path), **settings))


def values(source: RowSource) -> list[dict[str, Any]]:
    return [raw.columns for raw in source.rows()]


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write_zst(path: Path) -> None:
    with pa.output_stream(str(path), compression="zstd") as out:
        out.write(jsonl(ROWS))


def write_csv(path: Path, delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, ["text"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)


def write_arrow(path: Path, make: Any) -> None:
    table = pa.Table.from_pylist(ROWS)
    with path.open("wb") as out, make(out, table.schema) as writer:
        writer.write_table(table)


WRITERS = {
    "json": lambda path: path.write_text(json.dumps(ROWS)),
    "data.json": lambda path: path.write_text(json.dumps({"version": 1, "data": ROWS})),
    "lines.json": lambda path: path.write_bytes(jsonl(ROWS)),
    "jsonl": lambda path: path.write_bytes(jsonl(ROWS)),
    "ndjson": lambda path: path.write_bytes(jsonl(ROWS)),
    "JSONL": lambda path: path.write_bytes(jsonl(ROWS)),
    "jsonl.gz": lambda path: path.write_bytes(gzip.compress(jsonl(ROWS), mtime=0)),
    "jsonl.xz": lambda path: path.write_bytes(lzma.compress(jsonl(ROWS))),
    "jsonl.zst": write_zst,
    "csv": write_csv,
    "tsv": lambda path: write_csv(path, "\t"),
    "parquet": lambda path: parquet.write_table(pa.Table.from_pylist(ROWS), path),
    "file.arrow": lambda path: write_arrow(path, ipc.new_file),
    "stream.arrow": lambda path: write_arrow(path, ipc.new_stream),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_file_type_gives_the_same_rows_with_their_places(tmp_path, kind):
    path = tmp_path / f"rows.{kind}"
    WRITERS[kind](path)
    source = opened(path)
    assert [(str(raw.origin), raw.columns) for raw in source.rows()] == [
        (f"{path}:{number}", row) for number, row in enumerate(ROWS, start=1)
    ]
    assert values(source) == ROWS, "a second pass starts from the first row again"
    assert source.num_rows == (3 if kind == "parquet" else None)
    assert source.files == {str(path): xxhash.xxh3_128_hexdigest(path.read_bytes())}


def test_packed_parquet_and_csv_are_read_too(tmp_path):
    for kind in ("parquet", "csv", "stream.arrow"):
        plain, packed = tmp_path / f"x.{kind}", tmp_path / f"y.{kind}.gz"
        WRITERS[kind](plain)
        packed.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
        assert values(opened(packed)) == ROWS


def test_a_text_file_is_one_document_byte_for_byte(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes("\ufeffone\r\n\r\ntwo\n\n\n".encode())
    assert values(opened(path)) == [{"text": "one\r\n\r\ntwo\n\n\n"}]


def test_bom_crlf_blank_lines_and_a_missing_last_newline_are_accepted(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "1"}\r\n\r\n  \n{"a": "2\\r"}')
    assert [(raw.origin.row_number, raw.columns) for raw in opened(path).rows()] == [(1, {"a": "1"}), (4, {"a": "2\r"})]
    (tmp_path / "x.csv").write_bytes(b'\xef\xbb\xbfa,b\r\n"1 ""x"", y","l1\nl2"\r\n')
    assert values(opened(tmp_path / "x.csv")) == [{"a": '1 "x", y', "b": "l1\nl2"}]


def test_a_line_of_ten_megabytes_is_read(tmp_path):
    rows = [{"text": "ü" * 5_000_000}, {"text": "end"}]
    (tmp_path / "x.jsonl").write_bytes(jsonl(rows))
    assert values(opened(tmp_path / "x.jsonl")) == rows
    csv.field_size_limit(131_072)  # the module's own default
    (tmp_path / "x.csv").write_text("text\n" + "ü" * 5_000_000 + "\nend\n", encoding="utf-8")
    assert values(opened(tmp_path / "x.csv")) == rows
    assert csv.field_size_limit() == 131_072, "reading leaves the module's limit as it was"


def test_folders_are_recursive_and_sorted_and_globs_match(tmp_path):
    for name in ("b/2.jsonl", "a/1.jsonl", "c.json", ".cache/x.jsonl", "b/.hidden.jsonl", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"file": name}) + "\n" if "json" in name and name != "c.json" else "[]")
    (tmp_path / "dataset_info.json").write_text('{"description": "what `datasets` writes beside rows"}')
    folder = opened(tmp_path)
    assert [row["file"] for row in values(folder)] == ["a/1.jsonl", "b/2.jsonl"]
    assert [Path(file).name for file in folder.files] == ["1.jsonl", "2.jsonl", "c.json"]
    assert [row["file"] for row in values(opened(f"{tmp_path}/*/*.jsonl"))] == ["a/1.jsonl", "b/2.jsonl"]


def test_the_order_of_files_is_the_order_of_their_names(tmp_path):
    numbers = [7, 2, 11, 5, 0, 9, 3, 10, 1, 8, 4, 6]
    for number in numbers:
        (tmp_path / f"part-{number:02}.jsonl").write_text(json.dumps({"n": number}) + "\n")
    for path in (tmp_path, tmp_path / "*.jsonl"):
        assert [row["n"] for row in values(opened(path))] == sorted(numbers)


def test_a_folder_saved_by_datasets_is_read(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    assert values(opened(tmp_path / "one")) == ROWS
    splits = {"train": datasets.Dataset.from_list(ROWS), "extra": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    assert values(opened(tmp_path / "splits")) == ROWS
    assert values(opened(tmp_path / "splits", split="extra")) == ROWS[:1]


FILES = ["README.json", "data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test.jsonl",
         "dev/rows.jsonl"]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "split", "taken"),
    [
        (FILES, None, ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]),
        (FILES, "test", ["data/test.jsonl"]),
        (FILES, "validation", ["dev/rows.jsonl"]),
        (["a.jsonl", "b.jsonl"], None, ["a.jsonl", "b.jsonl"]),
        (["a.jsonl", "contest.jsonl"], "train", ["a.jsonl", "contest.jsonl"]),
        (["en-validation.jsonl"], None, ["en-validation.jsonl"]),
        (["train_sft-00000-of-00001.jsonl", "train_gen-00000-of-00001.jsonl"], "train_sft",
         ["train_sft-00000-of-00001.jsonl"]),
    ],
)  # fmt: skip
def test_a_folder_gives_the_split_that_is_asked_for(tmp_path, files, split, taken):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n')
    found = opened(tmp_path, split=split)
    assert [str(Path(file).relative_to(tmp_path)) for file in found.files] == taken
    assert (f", {len(taken)} of {len(files)} files]" in found.name) == (len(taken) < len(files))
    assert bool(found.held_out) == (len(taken) < len(files) or "validation" in files[0])


@pytest.mark.parametrize(
    ("path", "split", "message"),
    [
        ("", None, r"no files of split 'train': the file names contain test, train_sft"),
        ("", "dev", r"no files of split 'dev': the file names contain test, train_sft"),
        ("test.jsonl", "train", r"no files of split 'train': the file names contain test"),
        ("other/rows.jsonl", "test", r"no files of split 'test': no file name contains a split"),
    ],
)
def test_a_split_that_is_not_there_is_named(tmp_path, path, split, message):
    (tmp_path / "other").mkdir()
    for name in ("test.jsonl", "train_sft-00000-of-00001.jsonl", "other/rows.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=message) as caught:
        opened(tmp_path / path, split=split)
    for fix in caught.value.fixes:
        assert open_source(SourceConfig(**fix.settings["data.sources"][0])).files
    assert bool(caught.value.fixes) == (path != "other/rows.jsonl")
    assert len(opened(tmp_path / "test.jsonl").files) == 1  # a file that is named is what it is named for


# file content -> the whole message after the file's name
UNREADABLE = [
    ("x.jsonl", b'{"a": 1}\n' * 56 + b'{"instruction": "x", "output": "some answer" "input": 1}\n',
     ":57:46: expected ',' or '}'"),
    ("x.jsonl", b'{"a": 1}\n' * 4 + b'{"a": "caf\xe9"}\n',
     ":5: invalid UTF-8 at byte 46 of the file (hex e9: 'é' in Latin-1); convert the file to UTF-8: iconv -f latin1 -t utf-8 OLD > NEW"),
    ("x.jsonl", b'\xef\xbb\xbf{"a": "\xff"}\n',
     ":1: invalid UTF-8 at byte 10 of the file (hex ff: 'ÿ' in Latin-1); convert the file to UTF-8: iconv -f latin1 -t utf-8 OLD > NEW"),
    ("x.jsonl", '{"a": 1}'.encode("utf-16"), ":1: the file is UTF-16; convert it to UTF-8"),
    ("x.jsonl", b'{"a": 1\r\n{"a": 1}\n', ":1:8: the JSON ends while parsing an object"),
    ("x.jsonl", b'{"a": 1}\n[1]\n', ":2: the row is a list, not an object of columns; a file with one list of rows has the ending .json"),
    ("x.jsonl", b"null\n", ":1: the row is null, not an object of columns"),
    ("x.jsonl", b'{"a": NaN}\n', ":1:7: NaN is not valid JSON; write null or a number"),
    ("x.json", b'[{"a": 1},\n {"a": 2\n]', ":3:1: expected ',' or '}'"),
    ("x.json", b'[{"a": 1}, 5]', ":2: the row is int, not an object of columns"),
    ("x.json", b'{"rows": []}', ': expected a list of rows or {"data": [rows]}, found an object with keys rows'),
    ("x.json", b'[{"a": "\n\xe9"}]',
     ":2: invalid UTF-8 at byte 9 of the file (hex e9: 'é' in Latin-1); convert the file to UTF-8: iconv -f latin1 -t utf-8 OLD > NEW"),
    ("x.csv", b"a,b\n1,2\n3\n", ":2 (line 3): 1 field, but the header has 2; write a comma for each empty field"),
    ("x.csv", b"a,b\n1,2\n3,4,5\n", ":2 (line 3): 3 fields, but the header has 2; quote text that has commas"),
    ("x.csv", b"a,a\n1,2\n", ":1: column 'a' appears twice in the header"),
    ("x.csv", b'a\n"open\n', ": line 2: not readable as csv: unexpected end of data"),
    ("x.csv", b"a\nx\n\xff\n",
     ":3: invalid UTF-8 at byte 4 of the file (hex ff: 'ÿ' in Latin-1); convert the file to UTF-8: iconv -f latin1 -t utf-8 OLD > NEW"),
    ("x.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 999, mtime=0)[:-9],
     ": the .gz file is damaged or truncated "
     "(Compressed file ended before the end-of-stream marker was reached); copy it again"),
    ("x.jsonl.xz", b"no xz at all",
     ": the .xz file is damaged or truncated (Input format not supported by decoder); copy it again"),
    ("x.jsonl", b"", ": no rows: the file is empty"),
    ("x.jsonl", b"\n \r\n", ": no rows: the file is empty"),
    ("x.json", b"[]", ": no rows: the file is empty"),
    ("x.csv", b"a,b\n", ": no rows: the file is empty"),
    ("x.jsonl", '{"a": 1}'.encode("utf-16-le"), ":1: the file is UTF-16; convert it to UTF-8"),
    ("x.jsonl", b"{'a': 1}\n", ":1:2: expected double quotes; single quotes are Python's, not JSON's"),
    ("x.jsonl", b'{"a": 1,}\n', ":1:9: trailing comma"),
    ("x.jsonl", gzip.compress(b'{"a": 1}\n', mtime=0), ": the content is .gz, unlike the name; rename it to *.gz"),
    ("x.csv", b"a;b\n1;2\n", ":1: the header separates columns with ';'; save it with ',' between columns"),
    ("x.csv.zst", b"no zst at all",
     ": the .zst file is damaged or truncated (ZSTD decompress failed: Unknown frame descriptor); copy it again"),
    ("x.jsonl.gz", gzip.compress(b"x" * (65 << 20), mtime=0), ":1: the line is over 64 MiB; split the row"),
    ("x.txt.gz", gzip.compress(b"x" * (65 << 20), mtime=0),
     ": over 64 MiB in one piece; write it as JSON Lines, one row per line"),
    ("x.csv", b'a\n"' + (b"x" * (1 << 20) + b"\n") * 65 + b'"\n',
     ": line 65: not readable as csv: field larger than field limit (67108864)"),
    ("x.txt", b"", ": no rows: the file is empty"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), UNREADABLE)
def test_unreadable_rows_are_named_with_their_place(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        values(opened(path))
    assert str(caught.value).partition("; write one row a line")[0] == f"{path}{message}"


@pytest.mark.parametrize(("name", "kind"), [("x.parquet", "parquet"), ("x.arrow", "arrow")])
def test_damaged_tables_are_named(tmp_path, name, kind):
    (tmp_path / name).write_bytes(b"ARROW1 or so, this is none")
    with pytest.raises(DataError, match=rf"{name}: not readable as {kind}: "):
        values(opened(tmp_path / name))


def test_a_source_of_bad_rows_only_says_so(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"[]\n[]\n")
    with pytest.raises(DataError, match=r"no rows: all 2 rows are bad; the first: .*x\.jsonl:1: the row is a list"):
        list(opened(tmp_path / "x.jsonl").rows(lambda error: None))


def test_reading_goes_on_after_each_bad_line_and_lists_it(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n{"a": "\xff"}\n[]\n"' + b"x" * (65 << 20) + b'"\n{"a": \n{"a": 7}\n')
    bad: list[str] = []
    assert [raw.origin.row_number for raw in opened(path).rows(lambda error: bad.append(str(error)))] == [1, 7]
    assert [message.removeprefix(f"{path}:").split(":")[0] for message in bad] == ["2", "3", "4", "5", "6"]


def test_a_dangling_link_is_named(tmp_path):
    (tmp_path / "rows.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(DataError, match=r"rows\.jsonl: a link to gone\.jsonl, which does not exist"):
        opened(tmp_path / "rows.jsonl")


def test_what_is_not_there_is_named_with_a_hint(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}")
    (tmp_path / "notes.md").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"trian\.jsonl: no such file or folder; did you mean .*/train\.jsonl\?"):
        opened(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=r"\*\.csv: no data file matches; files here include .*train.jsonl"):
        opened(tmp_path / "*.csv")
    with pytest.raises(DataError, match="no data files in this folder; known types: json, jsonl"):
        opened(tmp_path / "empty")
    with pytest.raises(DataError, match="not a known file type; known types: json, jsonl"):
        opened(tmp_path / "notes.md")
    with pytest.raises(DataError, match="org/set: no such file or folder"):
        opened("org/set", hub=False)


def test_something_local_goes_before_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/set").mkdir(parents=True)
    (tmp_path / "org/set/a.jsonl").write_bytes(jsonl(ROWS))
    assert values(opened("org/set")) == ROWS
