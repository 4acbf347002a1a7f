"""Durable writes: whole or not there, private, and errors that say path and bytes."""

from __future__ import annotations

import errno
import json
import struct
from pathlib import Path

import pytest
import torch
from faulty_disk import BROKEN_DISK, FULL_DISK, Death, FaultyDisk, QuickDisk
from safetensors.torch import load_file, save_file

from flatout.errors import CheckpointError, ResourceError
from flatout.train.storage import Disk, FileFacts, Storage, digest, read_json
from flatout.train.tensor_file import encode_tensors, read_metadata, read_tensors

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
    return Storage(QuickDisk()).create(path, chunks, size_bytes)


def tensors_of_all_kinds() -> dict[str, torch.Tensor]:
    base = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)) * 40
    tensors = {str(dtype): base.abs().to(dtype) for dtype in DTYPES}
    return {**tensors, "strided": base.T, "empty": torch.empty(0, 4), "number": torch.tensor(7), "view": base[1:, ::2]}


def test_tensors_are_what_safetensors_itself_reads(tmp_path: Path) -> None:
    tensors = tensors_of_all_kinds()
    facts = write_tensors(tmp_path / "a.safetensors", tensors, {"k": "v"})
    theirs = load_file(tmp_path / "a.safetensors")
    ours, metadata = read_tensors(tmp_path / "a.safetensors")
    assert metadata == read_metadata(tmp_path / "a.safetensors") == {"k": "v"}
    assert facts == digest(tmp_path / "a.safetensors")
    for name, tensor in tensors.items():
        for read in (ours[name], theirs[name]):
            assert read.dtype == tensor.dtype
            assert read.shape == tensor.shape
            bits = tensor.contiguous().reshape(-1).view(torch.uint8)
            assert torch.equal(read.reshape(-1).view(torch.uint8), bits)


def test_the_layout_is_byte_for_byte_that_of_safetensors(tmp_path: Path) -> None:
    tensors = {
        "b": torch.arange(6.0).reshape(2, 3),
        "a": torch.arange(4, dtype=torch.int8),
        "c": torch.ones(2).double(),
    }
    write_tensors(tmp_path / "ours", tensors, {"k": "v"})
    save_file(tensors, tmp_path / "theirs", {"k": "v"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_read_tensors_do_not_hang_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": torch.ones(1000)}, {})
    tensor = read_tensors(path)[0]["a"]
    path.write_bytes(b"")  # a mapped tensor would end the process here
    assert bool((tensor == 1).all())


def test_a_dtype_without_a_name_is_refused() -> None:
    with pytest.raises(TypeError, match=r"'x' has dtype torch\.complex128"):
        encode_tensors({"x": torch.zeros(1, dtype=torch.complex128)}, {})


@pytest.mark.parametrize("size", [0, 1, 8 * 2**20 - 1, 8 * 2**20 + 1])
def test_bytes_of_any_size_and_private_modes(tmp_path: Path, size: int) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    storage = Storage()
    storage.make_dir(tmp_path / "new" / "deep")
    path = tmp_path / "new" / "deep" / "a"
    facts = storage.write_bytes(path, content[:size])
    assert path.read_bytes() == content[:size]
    assert facts == digest(path)
    assert facts.size_bytes == size
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new").stat().st_mode & 0o777 == path.parent.stat().st_mode & 0o777 == 0o700


def test_short_writes_are_finished(tmp_path: Path) -> None:
    class ShortDisk(QuickDisk):
        def write(self, fd: int, content: memoryview) -> int:
            return super().write(fd, content[:3])

    Storage(ShortDisk()).write_bytes(tmp_path / "a", b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"


@pytest.mark.parametrize("fault", ["die", "torn", FULL_DISK, BROKEN_DISK])
def test_a_replaced_file_is_old_or_new_at_every_operation(tmp_path: Path, fault: str | int) -> None:
    path = tmp_path / "config.json"
    counting = FaultyDisk()
    Storage(counting).write_json(path, {"n": 0})
    assert counting.num_operations == 6  # create, write, sync, close, rename, sync_dir
    for k in range(counting.num_operations):
        Storage(QuickDisk()).write_json(path, {"n": 1})
        disk = FaultyDisk(k, fault)
        with pytest.raises((Death, ResourceError)) as raised:
            Storage(disk).write_json(path, {"n": 2})
        assert read_json(path)["n"] in (1, 2)
        if isinstance(raised.value, ResourceError):
            assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
            assert "config.json" in str(raised.value)


def test_a_written_file_survives_a_power_cut_and_only_the_fsyncs_make_it_so(tmp_path: Path) -> None:
    class ForgetfulDisk(FaultyDisk):
        def sync(self, fd: int) -> None:
            pass

    for names_survive in (False, True):
        for disk, safe in ((FaultyDisk(), True), (ForgetfulDisk(), False)):
            path = tmp_path / "a"
            path.write_text("old")
            Storage(disk).write_bytes(path, b"new")
            disk.cut_power(names_survive=names_survive)
            assert (path.read_bytes() == b"new") is safe


def test_a_full_disk_says_path_needed_and_free_bytes(tmp_path: Path) -> None:
    class FullDisk(FaultyDisk):
        def free_bytes(self, path: Path) -> int:
            return 1234

    with pytest.raises(ResourceError) as raised:
        Storage(FullDisk(1, errno.ENOSPC)).write_bytes(tmp_path / "a", b"x" * 5000)
    for part in ("disk or quota full", str(tmp_path), "needs 5,000 bytes", "1,234 are free", "checkpoint.keep"):
        assert part in str(raised.value)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ResourceError, match="needs 1,235 bytes, 1,234 are free"):
        Storage(FullDisk()).require_free(tmp_path, 1235)
    Storage(FullDisk()).require_free(tmp_path, 1234)


def test_a_file_where_a_folder_should_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ResourceError, match=r"make the folder .*run.*Not a directory"):
        Storage().make_dir(tmp_path / "run")
    with pytest.raises(ResourceError, match="Not a directory"):
        Storage().make_dir(tmp_path / "run" / "checkpoints")


def test_remove_tree_takes_links_not_their_targets(tmp_path: Path) -> None:
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "a").write_text("")
    (tmp_path / "gone" / "deep").mkdir(parents=True)
    (tmp_path / "gone" / "deep" / "link").symlink_to(tmp_path / "keep")
    Storage().remove_tree(tmp_path / "gone")
    Storage().remove_tree(tmp_path / "gone")  # nothing there: nothing to do
    assert [path.name for path in tmp_path.iterdir()] == ["keep"]
    assert (tmp_path / "keep" / "a").exists()


def test_hostile_and_broken_files_are_named_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    cases = {
        "too short": b"1234567",
        "claims 1,099,511,627,776 bytes": struct.pack("<Q", 2**40) + b"{}",
        "not a readable safetensors file": struct.pack("<Q", 4) + b"{a}}" + b"0" * 10,
        "readable safetensors": struct.pack("<Q", 20_000) + b'{"a":' + b"[" * 19_995,
    }
    for message, content in cases.items():
        path.write_bytes(content)
        for read in (read_tensors, read_metadata):
            with pytest.raises(CheckpointError, match=message) as raised:
                read(path)
            assert str(path) in str(raised.value)


def test_broken_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    cases = {"line 1 column 2": b"{a", "codec": b"\xff\xfe\x00", "recursion": b"[" * 100_000}
    for message, content in cases.items():
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"state\.json: not readable as JSON.*{message}"):
            read_json(path)
    with pytest.raises(CheckpointError, match=r"other\.json: the file is missing"):
        read_json(tmp_path / "other.json")
    path.touch()
    with path.open("r+b") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(CheckpointError, match="over the limit of 67,108,864"):
        read_json(path)
    with pytest.raises(ValueError, match="JSON compliant"):
        Storage().write_json(path, {"loss": float("nan")})


def test_the_real_disk_and_file_facts(tmp_path: Path) -> None:
    facts = Storage(Disk()).write_json(tmp_path / "a", {"ü": 1})
    assert json.loads((tmp_path / "a").read_bytes()) == {"ü": 1}
    assert facts == FileFacts((tmp_path / "a").stat().st_size, facts.xxh3)
    assert len(facts.xxh3) == 32
