"""Files of rows inside of archives, webdataset's shards, and files of unknown types beside rows."""

import bz2
import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from flatout.cli.main import main
from flatout.config.schema import SourceConfig
from flatout.data.rows.sources import open_source
from flatout.errors import DataError

ROWS = [{"text": "alpha"}, {"text": "snow ☃"}, {"text": "end"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def rows_of(path: Path | str, **settings: Any) -> list[dict[str, Any]]:
    return [row.columns for row in open_source(SourceConfig(path=str(path), **settings)).rows()]


def parquet_bytes() -> bytes:
    out = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(ROWS), out)
    return out.getvalue()


def write_zip(path: Path, files: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def write_tar(path: Path, files: Mapping[str, bytes], mode: Any = "w") -> None:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def sample(number: int) -> dict[str, bytes]:
    """The files of one webdataset sample."""
    return {f"s/{number:04}.json": json.dumps({"id": number}).encode(), f"s/{number:04}.txt": b"words"}


WRITERS = {
    "rows.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(LINES)),
    "rows.feather": lambda path: feather.write_feather(pa.Table.from_pylist(ROWS), path),
    "lz4.feather": lambda path: feather.write_feather(pa.Table.from_pylist(ROWS), path, compression="lz4"),
    "rows.zip": lambda path: write_zip(path, {"b.jsonl": LINES[18:], "a/1.json": json.dumps(ROWS[:1]).encode()}),
    "packed.zip": lambda path: write_zip(path, {"x.jsonl.gz": gzip.compress(LINES), "__MACOSX/._x.jsonl": b"?"}),
    "table.zip": lambda path: write_zip(path, {"x/rows.parquet": parquet_bytes(), "README.md": b"hello"}),
    "rows.tar": lambda path: write_tar(path, {"./a/b.jsonl": LINES}),
    "rows.tar.gz": lambda path: write_tar(path, {"a.json": json.dumps(ROWS).encode()}, "w:gz"),
    "rows.tgz": lambda path: write_tar(path, {"a.jsonl": LINES, "LICENSE": b"free"}, "w:gz"),
    "rows.tar.bz2": lambda path: write_tar(path, {"lines.json": LINES}, "w:bz2"),
    "rows.tar.xz": lambda path: write_tar(path, {"rows.parquet": parquet_bytes()}, "w:xz"),
    "web.tar": lambda path: write_tar(path, {f"{i}.json": json.dumps(row).encode() for i, row in enumerate(ROWS)}),
    "words.tar": lambda path: write_tar(path, {f"{i}.txt": row["text"].encode() for i, row in enumerate(ROWS)}),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_packed_type_gives_the_same_rows(tmp_path, kind):
    path = tmp_path / kind
    WRITERS[kind](path)
    assert rows_of(path) == ROWS
    assert rows_of(tmp_path) == ROWS, "also from the folder that holds it"


def test_files_of_one_webdataset_sample_are_one_row_with_its_number(tmp_path):
    write_tar(tmp_path / "shard.tar", {**sample(1), **sample(2), "s/0003.json": b'{"id": 3}'})
    source = open_source(SourceConfig(path=str(tmp_path / "shard.tar")))
    assert [(str(row.origin), row.columns) for row in source.rows()] == [
        (f"{tmp_path}/shard.tar:1", {"id": 1, "text": "words"}),
        (f"{tmp_path}/shard.tar:2", {"id": 2, "text": "words"}),
        (f"{tmp_path}/shard.tar:3", {"id": 3}),
    ]


def test_rows_of_an_archive_are_named_by_archive_and_file(tmp_path):
    write_zip(tmp_path / "x.zip", {"a/b.jsonl": b'{"text": "a"}\n{"text": \n{"text": "c"}\n'})
    bad: list[str] = []
    source = open_source(SourceConfig(path=str(tmp_path / "x.zip")))
    kept = [str(row.origin) for row in source.rows(lambda error: bad.append(str(error)))]
    assert kept == [f"{tmp_path}/x.zip/a/b.jsonl:1", f"{tmp_path}/x.zip/a/b.jsonl:3"]
    assert [message.partition(": ")[0] for message in bad] == [f"{tmp_path}/x.zip/a/b.jsonl:2:10"]


def test_a_bad_sample_is_one_bad_row_and_the_next_is_read(tmp_path):
    bad_text = {"2.json": b'{"id": 2}', "2.txt": b"caf\xe9"}
    twice = {"3.json": b'{"text": "a"}', "3.txt": b"b"}
    write_tar(tmp_path / "x.tar", {"1.json": b'{"id": }', "1.txt": b"one", **bad_text, **twice, "4.txt": b"four"})
    bad: list[str] = []
    source = open_source(SourceConfig(path=str(tmp_path / "x.tar")))
    assert [(row.origin.row_number, row.columns) for row in source.rows(lambda error: bad.append(str(error)))] == [
        (4, {"text": "four"})
    ]
    assert [message.removeprefix(f"{tmp_path}/x.tar") for message in bad] == [
        "/1.json:1:8: expected value",
        "/2.txt: invalid UTF-8 at byte 3; convert the file to UTF-8",
        ":3: two files of sample 3 give column 'text'",
    ]


def encrypted() -> bytes:
    """A .zip with one file whose header says that it needs a password."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.jsonl", LINES)
    raw = bytearray(out.getvalue())
    raw[6] |= 1
    raw[raw.index(b"PK\1\2") + 8] |= 1
    return bytes(raw)


def cut(write: Any, tmp_path: Path, name: str, files: Mapping[str, bytes]) -> bytes:
    write(tmp_path / name, files)
    return (tmp_path / name).read_bytes()[:-200]


def test_damaged_archives_are_named(tmp_path):
    damaged = ": the {} file is damaged or truncated"
    wrong = {
        "a.zip": (cut(write_zip, tmp_path, "a.zip", {"a.jsonl": LINES * 9}), damaged.format(".zip")),
        "b.tar": (cut(write_tar, tmp_path, "b.tar", {"a.jsonl": LINES * 999})[:9000], "damaged or truncated"),
        "c.zip": (encrypted(), ": cannot be unpacked"),
        "d.zip": (b"no archive", damaged.format(".zip")),
        "e.tar": (b"no archive" * 99, damaged.format(".tar")),
        "f.jsonl.bz2": (bz2.compress(LINES * 99)[:-9], damaged.format(".bz2")),
        "g.jsonl": (bz2.compress(LINES), ": the content is .bz2, unlike the name; rename it to *.bz2"),
        "h.jsonl": (encrypted(), ": the content is .zip, unlike the name; rename it to *.zip"),
        "i.feather": (b"FEA1 of old" * 9, ": not readable as feather"),
    }
    for name, (content, said) in wrong.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(DataError) as caught:
            rows_of(path)
        assert str(caught.value).startswith(str(path))
        assert said in str(caught.value).removeprefix(str(path))


UNKNOWN = ["x.bin", "b/y.bin", "z.sqlite"]


@pytest.fixture
def folder(tmp_path):
    """A folder of rows, files about them, and three files that nobody reads."""
    for name in ("rows.jsonl", "README.md", "LICENSE", "load.py", ".gitattributes", *UNKNOWN):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(LINES if name == "rows.jsonl" else b"?")
    return tmp_path


@pytest.mark.parametrize("write", [write_zip, write_tar])
def test_files_of_unknown_types_in_archives_too(tmp_path, write):
    path = tmp_path / ("x.zip" if write is write_zip else "x.tar")
    write(path, {"0.jsonl": LINES, "1.jpg": b"picture", "2.jpg": b"picture", "in.zip": b"PK", "README.md": b"!"})
    with pytest.raises(DataError, match=r"file.? of types that flatout does not read: .*\(1\.jpg\)"):
        rows_of(path)
    source = open_source(SourceConfig(path=str(path), unread_files="skip"))
    for _ in range(2):
        assert [row.columns for row in source.rows()] == ROWS
        assert source.unread.said() == "3 files are not read: 2 .jpg (1.jpg), 1 .zip (in.zip)"


@pytest.mark.parametrize("pattern", ["", "**/*"])
def test_files_of_unknown_types_beside_rows_are_named_and_stop_until_told(folder, pattern, small_tokenizer_dir, capfd):
    words = ["data", "build", str(folder / pattern), "--tokenizer", str(small_tokenizer_dir), "--name", "x"]
    words += ["--root", str(folder / "root")]
    unread = "2 .bin (y.bin), 1 .sqlite (z.sqlite)"
    assert main(words) == 3
    told = " ".join(capfd.readouterr().err.split())
    assert f"3 files of types that flatout does not read beside 1 that it reads: {unread}; " in told
    assert main([*words, "--unread-files", "skip"]) == 0
    assert f"3 files are not read: {unread}" in " ".join(capfd.readouterr().err.split())
    report = json.loads((folder / "root/built_dataset/x/report.json").read_text())
    assert any("3 files are not read" in note for note in report["notes"])
    # files about rows need no word
    for name in UNKNOWN:
        (folder / name).unlink()
    source = open_source(SourceConfig(path=str(folder / "*")))
    assert [row.columns for row in source.rows()] == ROWS
    assert source.unread.said() == ""
