import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.data import registry
from flatout.data.registry import Entry, built_dir, entry_dir, find, load, upsert
from flatout.errors import DataError, ResourceError, SecurityError
from flatout.io.durable_io import Disk

ENTRY = Entry(
    name="finetom-1k",
    path="built_dataset/finetom-1k",
    sources=("org/set[train]",),
    num_samples=1000,
    tokenizer="Qwen/Qwen3-8B",
    template=None,
    loss_type="response_only",
    fingerprint="0123",
    created="2026-01-02T03:04:05+00:00",
)


def test_upsert_then_find_gives_the_entry_back(tmp_path):
    root = tmp_path / "deep" / "data"
    upsert(root, ENTRY)
    assert find(root, "finetom-1k") == ENTRY
    assert load(root) == {"finetom-1k": ENTRY}
    assert [path.name for path in sorted(root.iterdir())] == [".data_config.lock", "data_config.json"]
    assert load(tmp_path / "nothing") == {}


def test_upsert_replaces_in_place_and_leaves_what_people_wrote(tmp_path):
    foreign = {"name": "by-hand", "path_to_text_dataset": "x", "ünï": [1, {"z": 1, "a": 2}]}
    last = {"note": "no name at all"}
    old = {"name": "finetom-1k", "path": "old"}
    (tmp_path / "data_config.json").write_text(json.dumps([foreign, old, last]))
    upsert(tmp_path, ENTRY)
    upsert(tmp_path, replace(ENTRY, name="second"))
    raws = json.loads((tmp_path / "data_config.json").read_text(encoding="utf-8"))
    assert [json.dumps(raw) for raw in (raws[0], raws[2])] == [json.dumps(foreign), json.dumps(last)]
    assert [raw.get("name") for raw in raws] == ["by-hand", "finetom-1k", None, "second"]
    assert raws[1]["num_samples"] == 1000


def test_unknown_keys_of_an_entry_are_no_error(tmp_path):
    upsert(tmp_path, ENTRY)
    file = tmp_path / "data_config.json"
    file.write_text(file.read_text().replace('"name"', '"comment": "mine", "name"'))
    assert find(tmp_path, "finetom-1k") == ENTRY


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(DataError, match=r"build one with `flatout data build chats.jsonl"):
        find(tmp_path, "finetom")
    upsert(tmp_path, ENTRY)
    upsert(tmp_path, replace(ENTRY, name="other"))
    with pytest.raises(
        DataError, match=r"no data set 'finetom' in .*; did you mean 'finetom-1k'\? known: finetom-1k, other"
    ):
        find(tmp_path, "finetom")


BROKEN = [
    ('[{"name": "a",}]', ": not readable as JSON: 1:15: trailing comma"),
    ("{}", ": expected a list of entries; repair it by hand, or move it away and build again"),
    ("[5]", ": entry 1 is not an object with a name; remove it"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_a_damaged_file_is_named_and_never_overwritten(tmp_path, text, message):
    file = tmp_path / "data_config.json"
    file.write_text(text)
    for action in (lambda: load(tmp_path), lambda: upsert(tmp_path, ENTRY)):
        with pytest.raises(DataError) as caught:
            action()
        assert str(caught.value) == f"{file}{message}"
    assert file.read_text() == text


def test_a_wrong_field_is_named_with_its_entry(tmp_path):
    upsert(tmp_path, ENTRY)
    file = tmp_path / "data_config.json"
    good = file.read_text()
    file.write_text(good.replace("1000", '"many"'))
    with pytest.raises(DataError, match=r"entry 1 \(finetom-1k\): num_samples: Input should be a valid integer"):
        load(tmp_path)
    file.write_text(json.dumps(json.loads(good) * 2))
    with pytest.raises(DataError, match="entry 2: name 'finetom-1k' is given twice; remove one"):
        load(tmp_path)


NAMES = [
    "../x",
    "/abs",
    "a\0b",
    "-rf",
    ";rm",
    "x" * 300,
    "",
    ".",
    "..",
    "a/b",
    "a\n",
    "ａbc",
    "a\u202eb",
    "a b",
    ".hidden",
]


@pytest.mark.parametrize("name", NAMES)
def test_dangerous_names_are_refused(tmp_path, name):
    for action in (
        lambda: built_dir(tmp_path, name),
        lambda: find(tmp_path, name),
        lambda: upsert(tmp_path, replace(ENTRY, name=name)),
    ):
        with pytest.raises(SecurityError, match="is invalid: use letters"):
            action()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["../out", "/etc", "built_dataset/../../out", "a\0b", "link"])
def test_paths_out_of_the_root_are_refused(tmp_path, path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    bad = replace(ENTRY, path=path)
    with pytest.raises(SecurityError, match="is outside"):
        entry_dir(root, bad)
    with pytest.raises(SecurityError, match="is outside"):
        upsert(root, bad)
    (root / "data_config.json").write_text(json.dumps([registry.asdict(bad)]))
    with pytest.raises(SecurityError, match="is outside"):
        find(root, "finetom-1k")


def test_a_link_out_of_the_root_is_refused_and_one_inside_is_not(tmp_path):
    root = tmp_path / "root"
    (root / "built_dataset").mkdir(parents=True)
    (root / "built_dataset" / "evil").symlink_to(tmp_path)
    (root / "built_dataset" / "real").mkdir()
    (root / "built_dataset" / "alias").symlink_to("real")
    with pytest.raises(SecurityError, match="is outside"):
        built_dir(root, "evil")
    assert built_dir(root, "alias") == root / "built_dataset" / "alias"
    (tmp_path / "root-link").symlink_to(root)
    assert built_dir(tmp_path / "root-link", "real").is_dir()


def _upsert_some(root: str, worker: int) -> None:
    for number in range(10):
        upsert(Path(root), replace(ENTRY, name=f"w{worker}-{number}"))


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_upsert_some, args=(str(tmp_path), worker)) for worker in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert set(load(tmp_path)) == {f"w{worker}-{number}" for worker in range(4) for number in range(10)}


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    upsert(tmp_path, ENTRY)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Disk, "sync", staticmethod(full))
    with pytest.raises(ResourceError, match=r"disk or quota full: .*data_config.json"):
        upsert(tmp_path, replace(ENTRY, name="second"))
    assert set(load(tmp_path)) == {"finetom-1k"}
    assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*.tmp"))
