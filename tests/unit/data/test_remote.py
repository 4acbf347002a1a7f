"""Rows at addresses, from servers on this machine."""

import gzip
import io
import json
import os
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from row_cases import read_in_a_process
from store_stand_in import COMMIT, store_stand_in

from flatout.cli.main import main
from flatout.config.schema import SourceConfig
from flatout.data.rows.sources import open_source
from flatout.errors import DataError, ResourceError, UsageError

pytest.importorskip("aiohttp")
ROWS = [{"text": f"row {number} " + "word " * 40} for number in range(200)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def table() -> bytes:
    out = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(ROWS), out, row_group_size=50)
    return out.getvalue()


@pytest.fixture
def files(monkeypatch):
    with store_stand_in() as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.address)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", found.address)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASTANDIN")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "stand-in-secret")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        found.objects |= {"b/x/1.jsonl": LINES, "b/x/2.parquet": table(), "b/x/3.jsonl.gz": gzip.compress(LINES)}
        yield found


def rows_of(path: str, told: list[str] | None = None, **settings: Any) -> list[dict[str, Any]]:
    log = (lambda _: None) if told is None else told.append
    return [row.columns for row in open_source(SourceConfig(path=path, **settings), log).rows()]


@pytest.mark.parametrize("name", ["1.jsonl", "2.parquet", "3.jsonl.gz"])
@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_files_at_addresses_give_their_rows(files, scheme, name):
    address = f"{files.address}/b/x/{name}" if scheme == "http" else f"{scheme}://b/x/{name}"
    told: list[str] = []
    source = open_source(SourceConfig(path=address), told.append)
    assert [row.columns for row in source.rows()] == ROWS
    assert str(next(source.rows()).origin) == f"{address}:1"
    assert source.num_rows == (200 if name == "2.parquet" else None)
    assert len(told) == 1, "no connection had to be asked again"
    assert "known by ETag" in told[0] if scheme == "http" else "known by size and date" in told[0]


def test_folders_and_patterns_of_buckets(files):
    scheme = "s3"
    assert len(rows_of(f"{scheme}://b/x/")) == 600
    assert len(rows_of(f"{scheme}://b/x")) == 600
    assert len(rows_of(f"{scheme}://b/*/[12].*")) == 400
    files.objects["b/x/4.bin"] = b"?"
    with pytest.raises(DataError, match=r"1 file of types that flatout does not read beside 3 that it reads: 1 \.bin"):
        rows_of(f"{scheme}://b/x/")
    assert len(rows_of(f"{scheme}://b/x/", unread_files="skip")) == 600


@pytest.mark.parametrize("name", ["1.jsonl", "2.parquet"])
def test_a_cut_connection_is_taken_up_again(files, name):
    files.cuts += [5000, 5000]
    told: list[str] = []
    assert rows_of(f"{files.address}/b/x/{name}", told) == ROWS
    # a table's reader may leave a cut answer before it meets its end
    assert sum("asking again to send it" in line for line in told) in ((2,) if name == "1.jsonl" else (1, 2))


@pytest.mark.parametrize("name", ["1.jsonl", "2.parquet"])
def test_servers_without_ranges_sizes_or_marks(files, name):
    digests = {next(iter(open_source(SourceConfig(path=f"{files.address}/b/x/{name}")).files.values()))}
    files.has_ranges = False
    assert rows_of(f"{files.address}/b/x/{name}") == ROWS
    files.has_marks = False
    told: list[str] = []
    assert rows_of(f"{files.address}/b/x/{name}", told) == ROWS
    assert any("downloaded whole for its hash" in line for line in told)
    files.has_sizes = False
    assert rows_of(f"{files.address}/b/x/{name}") == ROWS
    digests.add(next(iter(open_source(SourceConfig(path=f"{files.address}/b/x/{name}")).files.values())))
    assert len(digests) == 2


FAILURES = [
    ([404] * 9, DataError, 3, "nothing is there; check the address"),
    ([403] * 9, DataError, 3, "access is denied"),
    ([401] * 9, DataError, 3, "access is denied"),
    ([503] * 99, ResourceError, 6, "check the network and run the command again"),
]


@pytest.mark.parametrize(("statuses", "kind", "code", "message"), FAILURES)
@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_failures_are_one_sentence_with_the_address_and_no_secret(files, scheme, statuses, kind, code, message):
    files.fails["b/x"] = list(statuses)
    files.fails["b"] = list(statuses)
    address = f"{files.address}/b/x/1.jsonl?X-Amz-Signature=topsecret" if scheme == "http" else "s3://b/x/1.jsonl"
    told: list[str] = []
    with pytest.raises(kind) as caught:
        rows_of(address, told)
    text = str(caught.value)
    assert text.startswith(address.replace("topsecret", "***") + ": ")
    assert message in text
    assert "\n" not in text
    assert "secret" not in text.replace("***", "") + "".join(told)
    assert caught.value.exit_code == code
    files.fails.clear()
    assert rows_of(address) == ROWS


def test_what_is_no_address_of_rows_is_refused(files):
    for path, kind, message in (
        ("ftp://host/x.jsonl", UsageError, "addresses begin with https://, http://, s3://, gs://, hf://; found ftp://"),
        ("https://me:pw123456@host/x.jsonl", UsageError, "no passwords in addresses"),
        (f"{files.address}/b/x/1.exe", DataError, "nothing is there"),
        ("s3://b/none/", DataError, "nothing is there"),
    ):
        with pytest.raises(kind, match=message) as caught:
            rows_of(path)
        assert "pw123456" not in str(caught.value)
    files.media_type = "text/html"
    with pytest.raises(DataError, match="sends a web page, not data"):
        rows_of(f"{files.address}/b/x/1.jsonl")


ODD = [
    "http://[::1/x.jsonl", "https://[zz]/x.jsonl", "http://", "http:///x.jsonl", "http://h:99999/x", "http://h:ab/x",
    "http://a b/x.jsonl", "http://.../x.jsonl", "s3://", "gs://", "hf://", "hf://x",
]  # fmt: skip


@pytest.mark.parametrize("address", ODD)
def test_what_is_no_address_is_refused_before_anybody_is_asked(address, tmp_path, small_tokenizer_dir, capfd):
    words = ["data", "build", address, "--tokenizer", str(small_tokenizer_dir), "--name", "x", "--root", str(tmp_path)]
    assert main(words) == 2
    said = capfd.readouterr().err
    assert f"error: {address}: no valid address; expected {address.partition('://')[0]}://" in said
    assert "asking again" not in said


class Changing(dict[str, bytes]):
    """Contents of which each answer has another row."""

    times = 0

    def __getitem__(self, key: str) -> bytes:
        self.times += 1
        return super().__getitem__(key) + f'{{"text": "answer {self.times:04} of this server"}}\n'.encode()


def test_the_rows_of_a_server_that_says_nothing_are_those_that_were_hashed(files, tmp_path, small_tokenizer_dir, capfd):
    files.objects, files.has_marks = Changing(files.objects), False
    address = f"{files.address}/b/x/1.jsonl"
    source = open_source(SourceConfig(path=address))
    (digest,) = source.files.values()
    first, second = ([row.columns for row in source.rows()] for _ in range(2))
    assert first == second
    assert len(first) == 201
    # the hash is that of these rows: the server sends them again, always
    sent = LINES + json.dumps(first[-1]).encode() + b"\n"
    files.objects = {"b/x/1.jsonl": sent}
    assert list(open_source(SourceConfig(path=address)).files.values()) == [digest]
    words = ["data", "build", address, "--tokenizer", str(small_tokenizer_dir), "--name", "x", "--root", str(tmp_path)]
    assert [main(words), main(words)] == [0, 0]
    assert "Reusing" in " ".join(capfd.readouterr().err.split())


def test_a_file_that_changes_while_it_is_read_is_refused(files):
    source = open_source(SourceConfig(path=f"{files.address}/b/x/1.jsonl"))
    rows = source.rows()
    next(rows)
    files.objects["b/x/1.jsonl"] = LINES + b'{"text": "new"}\n'
    with pytest.raises(DataError, match="the file changed while it was read"):
        list(rows)


def test_the_command_builds_from_an_address_and_writes_no_secret(files, tmp_path, small_tokenizer_dir, capfd):
    address = f"{files.address}/b/x/1.jsonl?token=topsecret"
    words = ["data", "build", address, "--tokenizer", str(small_tokenizer_dir), "--name", "x", "--root", str(tmp_path)]
    assert main(words) == 0
    assert main(words) == 0, "the same content is not built again"
    out = capfd.readouterr()
    assert "Reusing" in " ".join(out.err.split())
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"topsecret" in content for content in [*written, out.out.encode(), out.err.encode()])
    assert any(b"token=***" in content for content in written)


def test_google_buckets(files):
    paths = ("gs://b/x/1.jsonl", "gs://b/x/2.parquet", "gs://b/x", "gs://b/x/[12].*", "gs://b/none.jsonl")
    told = read_in_a_process(os.environ, *({"path": path} for path in paths))
    assert [line[:2] for line in told[:4]] == [[count, ROWS[0]] for count in (200, 200, 600, 400)]
    assert told[4] == [3, "gs://b/none.jsonl: nothing is there; check the address"]


def test_hub_addresses_are_pinned_to_a_commit(files, tmp_path):
    files.objects = {"org/set/data/1.jsonl": LINES, "org/set/2.parquet": table(), "org/set/README.md": b"hello"}
    variables = {"HF_ENDPOINT": files.address, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    set_, pinned = "hf://datasets/org/set", f"hf://datasets/org/set@{COMMIT}"
    paths = (
        f"{set_}/data/1.jsonl", f"{set_}@main/2.parquet", set_, f"{set_}/*/*.jsonl", f"{set_}/3.csv",
        "hf://datasets/org/none",
    )  # fmt: skip
    told = read_in_a_process({**os.environ, **variables}, *({"path": path} for path in paths))
    lines, table_ = f"{pinned}/data/1.jsonl", f"{pinned}/2.parquet"
    wanted = [(200, [lines]), (200, [table_]), (400, [table_, lines]), (200, [lines])]
    assert [(line[0], line[1], line[5:]) for line in told[:4]] == [(count, ROWS[0], own) for count, own in wanted]
    for _, text in told[4:]:
        assert "nothing is there; check the address; a private one looks the same without a login" in text
