"""A disk that counts its operations and fails, dies or loses power at the k-th; and snapshots to save on it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from flatout.checkpoint.write import Snapshot
from flatout.io.durable_io import Disk


class Death(BaseException):
    """The process died here: nothing may catch it, and nothing works after it."""


class QuickDisk(Disk):
    """No waiting for the hardware: a test of a dying process needs no real fsync."""

    def sync(self, fd: int) -> None:
        pass

    def sync_dir(self, path: Path) -> None:
        pass


@dataclass
class Record:
    """One effect that a power cut may undo. `paths` are as they were then."""

    kind: str
    paths: tuple[Path, ...]
    folder: Path
    content: bytes = b""
    durable: bool = False


class FaultyDisk(QuickDisk):
    """Operation `at` (from 0) goes wrong in the way of `fault`.

    die: nothing of it happens, and nothing after it. torn: half of a write happens, then as die. exit: os._exit(137).
    An errno: the operation fails so, once, or from then on when `lasting` (removals still work, as on a full disk).
    """

    def __init__(self, at: int | None = None, fault: str | int = "die", *, lasting: bool = False) -> None:
        self.num_operations = 0
        self.log: list[str] = []
        self._at, self._fault, self._lasting = at, fault, lasting
        self._dead = False
        self._open: dict[int, Record] = {}
        self.journal: list[Record] = []

    def _step(self, name: str, path: object, tear: Callable[[], object] | None = None) -> None:
        if self._dead:
            raise Death
        index, self.num_operations = self.num_operations, self.num_operations + 1
        self.log.append(f"{name} {path}")
        if self._at is None or index < self._at:
            return
        if isinstance(self._fault, int):
            removal = name in ("unlink", "rmdir", "close")
            if index == self._at or (self._lasting and not removal):
                raise OSError(self._fault, os.strerror(self._fault))
        elif index == self._at:
            if self._fault == "exit":
                os._exit(137)
            if self._fault == "torn" and tear is not None:
                tear()
            self._dead = True
            raise Death

    def _note(self, kind: str, folder: Path, *paths: Path, content: bytes = b"") -> Record:
        record = Record(kind, paths, folder, content)
        self.journal.append(record)
        return record

    def mkdir(self, path: Path) -> None:
        self._step("mkdir", path)
        super().mkdir(path)
        self._note("mkdir", path.parent, path)

    def create(self, path: Path) -> int:
        self._step("create", path)
        fd = super().create(path)
        self._note("create", path.parent, path)
        self._open[fd] = self._note("data", path, path)
        return fd

    def write(self, fd: int, content: memoryview) -> int:
        self._step("write", fd, tear=lambda: os.write(fd, content[: len(content) // 2]))
        return super().write(fd, content)

    def sync(self, fd: int) -> None:
        self._step("sync", fd)
        self._open[fd].durable = True

    def close(self, fd: int) -> None:
        if fd in self._open:  # a dead process's files are closed for it
            del self._open[fd]
            super().close(fd)
        self._step("close", fd)

    def rename(self, source: Path, target: Path) -> None:
        self._step("rename", target)
        content = target.read_bytes() if target.is_file() else b""
        super().rename(source, target)
        self._note("rename", target.parent, source, target, content=content)

    def unlink(self, path: Path) -> None:
        self._step("unlink", path)
        content = path.read_bytes()
        super().unlink(path)
        self._note("unlink", path.parent, path, content=content)

    def rmdir(self, path: Path) -> None:
        self._step("rmdir", path)
        super().rmdir(path)
        self._note("rmdir", path.parent, path)

    def sync_dir(self, path: Path) -> None:
        self._step("sync_dir", path)
        for record in self.journal:
            if record.kind != "data" and record.folder == path:
                record.durable = True

    def cut_power(self, *, names_survive: bool) -> None:
        """Undo, last first, what no fsync made durable: names and content, or only content when names survive."""
        renames: list[tuple[Path, Path]] = []  # those that stay, first to last: earlier records' paths go through them
        for record in reversed(self.journal):
            lost = not record.durable and (record.kind == "data" or not names_survive)
            if lost:
                _undo(record, [_through(renames, path) for path in record.paths])
            elif record.kind == "rename":
                renames.insert(0, (record.paths[0], record.paths[1]))


def _through(renames: list[tuple[Path, Path]], path: Path) -> Path:
    for source, target in renames:
        if path == source or source in path.parents:
            path = target / path.relative_to(source)
    return path


def _undo(record: Record, paths: list[Path]) -> None:
    path = paths[0]
    if record.kind == "data" and path.exists():
        os.truncate(path, 0)
    elif record.kind == "mkdir":
        path.rmdir()
    elif record.kind == "create" and path.exists():
        path.unlink()
    elif record.kind == "unlink" and path.parent.exists():  # its folder may have gone for good
        path.write_bytes(record.content)
    elif record.kind == "rmdir":
        path.mkdir()
    elif record.kind == "rename":
        paths[1].rename(path)
        if record.content:
            paths[1].write_bytes(record.content)


def snapshot_of(step: int, mark: int = 0) -> Snapshot:
    """A small snapshot that is a pure function of (step, mark): several dtypes, a strided and an empty tensor."""
    generator = torch.Generator().manual_seed(1000 * mark + step)
    weight = torch.randn(5, 7, generator=generator)
    return Snapshot(
        step=step,
        tensors={
            "model": {"layer.weight": weight.T, "layer.lora": weight[:2].to(torch.bfloat16), "none": torch.empty(0, 3)},
            "optimizer": {"layer.weight/exp_avg": weight.double(), "layer.weight/step": torch.tensor(float(step))},
        },
        facts={"step": step, "mark": mark, "lr": 0.1 + step / 3, "none": None, "names": ["a", "ü"]},
    )


def same(left: Snapshot | None, right: Snapshot) -> bool:
    """Bit-equal in every tensor, fact and name."""
    if (
        left is None
        or left.step != right.step
        or left.facts != right.facts
        or left.tensors.keys() != right.tensors.keys()
    ):
        return False
    for stem, tensors in right.tensors.items():
        if left.tensors[stem].keys() != tensors.keys():
            return False
        for name, tensor in tensors.items():
            other = left.tensors[stem][name]
            if other.dtype != tensor.dtype or not torch.equal(other, tensor):
                return False
    return True


FULL_DISK, BROKEN_DISK = errno.ENOSPC, errno.EIO
