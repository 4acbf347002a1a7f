"""Durable writes: whole or not there, private, and errors that say path and bytes."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest
import torch
from faulty_disk import BROKEN_DISK, FULL_DISK, Death, FaultyDisk, QuickDisk
from safetensors.torch import load_file, save_file

from flatout.checkpoint.tensor_file import encode_tensors, open_tensor_file
from flatout.errors import CheckpointError, ResourceError, SecurityError
from flatout.io.durable_io import DurableIO, FileFacts, digest
from flatout.io.file_lock import RunLock, locked
from flatout.io.json_file import read_json
from flatout.io.own_files import AppendFile

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
]
DTYPES += [torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64]


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> FileFacts:
    size_bytes, chunks = encode_tensors(tensors, metadata)
    return DurableIO(QuickDisk()).create(path, chunks, size_bytes)


def tensors_of_all_kinds() -> dict[str, torch.Tensor]:
    base = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)) * 40
    tensors = {str(dtype): base.abs().to(dtype) for dtype in DTYPES}
    return {**tensors, "strided": base.T, "empty": torch.empty(0, 4), "number": torch.tensor(7), "view": base[1:, ::2]}


def test_tensors_are_what_safetensors_itself_reads(tmp_path):
    tensors = tensors_of_all_kinds()
    facts = write_tensors(tmp_path / "a.safetensors", tensors, {"k": "v"})
    theirs = load_file(tmp_path / "a.safetensors")
    assert open_tensor_file(tmp_path / "a.safetensors").metadata() == {"k": "v"}
    assert facts == digest(tmp_path / "a.safetensors")
    for name, tensor in tensors.items():
        read, bits = theirs[name], tensor.contiguous().reshape(-1).view(torch.uint8)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read.reshape(-1).view(torch.uint8), bits)


def test_the_layout_is_byte_for_byte_that_of_safetensors(tmp_path):
    tensors = {
        "b": torch.arange(6.0).reshape(2, 3),
        "a": torch.arange(4, dtype=torch.int8),
        "c": torch.ones(2).double(),
    }
    write_tensors(tmp_path / "ours", tensors, {"k": "v"})
    save_file(tensors, tmp_path / "theirs", {"k": "v"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("size", [0, 1, 8 * 2**20 - 1, 8 * 2**20 + 1])
def test_bytes_of_any_size(tmp_path, size):
    content = bytes(range(256)) * (size // 256 + 1)
    durable_io = DurableIO()
    durable_io.make_dir(tmp_path / "new" / "deep")
    path = tmp_path / "new" / "deep" / "a"
    facts = durable_io.write_bytes(path, content[:size])
    assert path.read_bytes() == content[:size]
    assert facts == digest(path)
    assert facts.size_bytes == size


@pytest.mark.parametrize(("umask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_modes_are_what_the_umask_leaves(tmp_path, umask, file_mode, folder_mode):
    before = os.umask(umask)
    try:
        DurableIO().make_dir(tmp_path / "new" / "deep")
        DurableIO().write_bytes(tmp_path / "new" / "a", b"a")
        AppendFile(tmp_path / "new" / "b").close()
        with RunLock(tmp_path / "run"):
            pass
    finally:
        os.umask(before)
    for path in (tmp_path / "new" / "a", tmp_path / "new" / "b", tmp_path / "run" / ".lock"):
        assert path.stat().st_mode & 0o777 == file_mode
    for path in (tmp_path / "new", tmp_path / "new" / "deep", tmp_path / "run"):
        assert path.stat().st_mode & 0o777 == folder_mode


def test_short_writes_are_finished(tmp_path):
    class ShortDisk(QuickDisk):
        def write(self, fd: int, content: memoryview) -> int:
            return super().write(fd, content[:3])

    DurableIO(ShortDisk()).write_bytes(tmp_path / "a", b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"


@pytest.mark.parametrize("fault", ["die", "torn", FULL_DISK, BROKEN_DISK])
def test_a_replaced_file_is_old_or_new_at_every_operation(tmp_path, fault):
    path = tmp_path / "config.json"
    counting = FaultyDisk()
    DurableIO(counting).write_json(path, {"n": 0})
    assert counting.num_operations == 6  # create, write, sync, close, rename, sync_dir
    for k in range(counting.num_operations):
        DurableIO(QuickDisk()).write_json(path, {"n": 1})
        disk = FaultyDisk(k, fault)
        with pytest.raises((Death, ResourceError)) as raised:
            DurableIO(disk).write_json(path, {"n": 2})
        assert read_json(path)["n"] in (1, 2)
        if isinstance(raised.value, ResourceError):
            assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
            assert "config.json" in str(raised.value)


def test_a_written_file_survives_a_power_cut_and_only_the_fsyncs_make_it_so(tmp_path):
    class ForgetfulDisk(FaultyDisk):
        def sync(self, fd: int) -> None:
            pass

    for names_survive in (False, True):
        for disk, safe in ((FaultyDisk(), True), (ForgetfulDisk(), False)):
            path = tmp_path / "a"
            path.write_text("old")
            DurableIO(disk).write_bytes(path, b"new")
            disk.cut_power(names_survive=names_survive)
            assert (path.read_bytes() == b"new") is safe


def test_a_full_disk_says_path_needed_and_free_bytes(tmp_path):
    class FullDisk(FaultyDisk):
        def free_bytes(self, path: Path) -> int:
            return 1234

    with pytest.raises(ResourceError) as raised:
        DurableIO(FullDisk(1, errno.ENOSPC)).write_bytes(tmp_path / "a", b"x" * 5000)
    for part in ("disk or quota full", str(tmp_path), "needs 5,000 bytes", "1,234 are free", "checkpoint.keep"):
        assert part in str(raised.value)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ResourceError, match="needs 1,235 bytes, 1,234 are free"):
        DurableIO(FullDisk()).require_free(tmp_path, 1235)
    DurableIO(FullDisk()).require_free(tmp_path, 1234)


def test_remove_tree_takes_links_not_their_targets(tmp_path):
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "a").write_text("")
    (tmp_path / "gone" / "deep").mkdir(parents=True)
    (tmp_path / "gone" / "deep" / "link").symlink_to(tmp_path / "keep")
    DurableIO().remove_tree(tmp_path / "gone")
    DurableIO().remove_tree(tmp_path / "gone")  # nothing there: nothing to do
    assert [path.name for path in tmp_path.iterdir()] == ["keep"]
    assert (tmp_path / "keep" / "a").exists()


def test_hostile_and_broken_files_are_named_not_parsed(tmp_path):
    path = tmp_path / "model.safetensors"
    cases = {
        "too short": b"1234567",
        "claims 1,099,511,627,776 bytes": struct.pack("<Q", 2**40) + b"{}",
        "not a readable safetensors file": struct.pack("<Q", 4) + b"{a}}" + b"0" * 10,
        "readable safetensors": struct.pack("<Q", 20_000) + b'{"a":' + b"[" * 19_995,
    }
    for message, content in cases.items():
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message) as raised:
            open_tensor_file(path)
        assert str(path) in str(raised.value)


def test_broken_json_is_named(tmp_path):
    path = tmp_path / "state.json"
    cases = {
        "1:2: key must be a string": b"{a",
        "write it as UTF-8": b"\xff\xfe\x00",
        "surrogate": b'{"a": "\\ud800"}',
        "nested too deeply": b"[" * 100_000,
        "Infinity is not valid JSON": b'{"a": [Infinity]}',
        'key "a" is given twice': b'{"a": 1, "a": 2}',
    }
    for message, content in cases.items():
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"state\.json: not readable as JSON.*{message}"):
            read_json(path)
    with pytest.raises(CheckpointError, match=r"other\.json: the file is missing"):
        read_json(tmp_path / "other.json")
    path.touch()
    with path.open("r+b") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(CheckpointError, match="exceed the limit of 67,108,864"):
        read_json(path)
    with pytest.raises(ValueError, match="JSON compliant"):
        DurableIO().write_json(path, {"loss": float("nan")})


class SyncCounting(QuickDisk):
    """Knows which files were synced, and can take back the content of all others."""

    def __init__(self) -> None:
        self.synced: set[int] = set()
        self.folders: set[Path] = set()

    def sync(self, fd: int) -> None:
        self.synced.add(os.fstat(fd).st_ino)

    def sync_dir(self, path: Path) -> None:
        self.folders.add(path)


def test_what_others_wrote_becomes_durable(tmp_path):
    (tmp_path / "final" / "deep").mkdir(parents=True)
    (tmp_path / "final" / "a").write_bytes(b"abc")
    (tmp_path / "final" / "deep" / "b").write_bytes(b"")
    disk = SyncCounting()
    names = DurableIO(disk).sync_tree(tmp_path / "final")
    files = [tmp_path / "final" / name for name in ("a", "deep/b")]
    assert sorted(names) == ["a", "deep/b"]
    assert disk.synced == {file.stat().st_ino for file in files}
    assert disk.folders == {tmp_path / "final", tmp_path / "final" / "deep"}
    (tmp_path / "final" / "deep" / "link").symlink_to(tmp_path / "final" / "a")
    with pytest.raises(SecurityError, match="deep/link: found a link"):
        DurableIO().sync_tree(tmp_path / "final")


def test_a_folder_takes_the_place_of_another(tmp_path):
    target, aside = tmp_path / "target", tmp_path / "aside"
    (tmp_path / ".target.tmp" / "left by a crash").mkdir(parents=True)
    for content in ("first", "second"):
        with DurableIO().replace_dir(target, aside=aside) as new:
            assert list(new.iterdir()) == []
            (new / "a").write_text(content)
    with pytest.raises(KeyboardInterrupt), DurableIO().replace_dir(target, aside=aside):
        raise KeyboardInterrupt
    assert (target / "a").read_text() == "second"
    assert (aside / "a").read_text() == "first"
    assert sorted(tmp_path.iterdir()) == [aside, target]


def test_no_link_is_followed(tmp_path):
    """What stands outside the folder stays as it is, and no pipe is waited for."""
    outside = tmp_path / "outside"
    outside.write_text("precious")
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    os.mkfifo(pipe)
    for open_file in (AppendFile, lambda path: locked(path, "nobody").__enter__()):
        link.symlink_to(outside)
        with pytest.raises(SecurityError, match=r"link is a symbolic link; .*remove it"):
            open_file(link)
        with pytest.raises(SecurityError, match="pipe is not a regular file"):
            open_file(pipe)
        link.unlink()
    link.symlink_to(outside)
    DurableIO().write_bytes(link, b"new")
    assert not link.is_symlink()
    assert outside.read_text() == "precious"


def test_a_line_cut_off_by_a_crash_is_removed(tmp_path):
    for before, kept in (("a\nb", "a\n"), ("a", ""), ("a\n", "a\n"), ("", "")):
        path = tmp_path / "events.jsonl"
        path.write_text(before)
        lines = AppendFile(path)
        lines.write("next")
        lines.close()
        assert path.read_text() == f"{kept}next\n"
