"""A checkpoint on disk, read slice by slice: each rank takes what it needs, in however many parts it was written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flatout.errors import CheckpointError
from flatout.parallel.shards import part_of
from flatout.train.integrity import refuse_other_save
from flatout.train.manifest import Manifest
from flatout.train.tensor_file import DTYPES, TENSOR_SUFFIX, bound_header

# the key of a sharded file's metadata: JSON, tensor name -> [global shape, offset]
PLACES = "places"
_RANK = re.compile(r"-rank-\d+$")


def kind_of(stem: str) -> str:
    """What a file holds, whoever wrote it: `model-rank-3` is part of `model`."""
    return _RANK.sub("", stem)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor that one file holds."""

    file: Any
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of one kind ("model", "optimizer", "rng-0") of a checkpoint; nothing is read before it is asked for.

    As a mapping it gives whole tensors, copied into memory. Raises CheckpointError, naming the file, for a file that is
    no sound safetensors file and for a tensor of which a part is missing.
    """

    def __init__(self, folder: Path, names: Sequence[str], manifest: Manifest) -> None:
        self._pieces: dict[str, list[Piece]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name in names:
            try:
                self._open(folder / name, manifest)
            except (SafetensorError, OSError, ValueError, TypeError) as error:
                raise CheckpointError(f"{folder / name}: not a readable safetensors file: {error}") from error
        for name, shape in self._shapes.items():
            held = sum(torch.Size(piece.shape).numel() for piece in self._pieces[name])
            if held != torch.Size(shape).numel():
                raise CheckpointError(f"{folder}: {name} of shape {shape} is there in parts of {held:,} values only")

    def _open(self, path: Path, manifest: Manifest) -> None:
        bound_header(path)
        file = safe_open(path, framework="pt", device="cpu")
        metadata = file.metadata() or {}
        refuse_other_save(path, metadata, manifest)
        places = json.loads(metadata.get(PLACES, "{}"))
        for name in file.keys():  # noqa: SIM118  (a file is no mapping)
            shape = tuple(file.get_slice(name).get_shape())
            whole, offset = places.get(name, (shape, (0,) * len(shape)))
            if self._shapes.setdefault(name, tuple(whole)) != tuple(whole):
                raise ValueError(f"{name} has shape {tuple(whole)} here, {self._shapes[name]} in another file")
            self._pieces.setdefault(name, []).append(Piece(file, tuple(offset), shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, name: str) -> Tensor:
        tensor = torch.empty(self._shapes[name], dtype=self.dtype(name))
        self.copy_into(name, tensor)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in the files."""
        return DTYPES[self._pieces[name][0].file.get_slice(name).get_dtype()]

    @torch.no_grad()
    def copy_into(self, name: str, tensor: Tensor) -> None:
        """Fill a tensor of the whole shape, plain or sharded, with what this rank holds of it; any device and dtype."""
        part = part_of(tensor)
        for piece in self._pieces[name]:
            begin = [max(a, b) for a, b in zip(part.offset, piece.offset, strict=True)]
            ends = zip(part.offset, part.local.shape, piece.offset, piece.shape, strict=True)
            end = [min(a + m, b + n) for a, m, b, n in ends]
            if all(a < b for a, b in zip(begin, end, strict=True)):
                target = part.local[_box(begin, end, part.offset)]
                # copied at once: the file is mapped, and a mapped tensor changes when the file does
                target.copy_(_read(piece, name, _box(begin, end, piece.offset)))

    def like(self, name: str, parameter: Tensor) -> Tensor:
        """A new tensor of a parameter's shape, cut and placed as the parameter, in the files' dtype.

        Raises CheckpointError for another shape: that state cannot be cut as the parameter is.
        """
        if self.shape(name) != tuple(parameter.shape):
            raise CheckpointError(
                f"{name} has shape {self.shape(name)}, its parameter {tuple(parameter.shape)}; such a state only loads "
                "under a strategy that does not cut it: set strategy: ddp"
            )
        tensor = torch.empty_like(parameter.detach(), dtype=self.dtype(name))
        self.copy_into(name, tensor)
        return tensor


def _box(begin: Sequence[int], end: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, origin, strict=True))


def _read(piece: Piece, name: str, box: tuple[slice, ...]) -> Tensor:
    tensor: Tensor = piece.file.get_slice(name)[box] if box else piece.file.get_tensor(name)
    return tensor


def open_tensors(folder: Path, manifest: Manifest) -> dict[str, StoredTensors]:
    """The tensors of a checkpoint by kind, unread. Raises CheckpointError."""
    names: dict[str, list[str]] = {}
    for name in manifest.files:
        if name.endswith(TENSOR_SUFFIX):
            names.setdefault(kind_of(name.removesuffix(TENSOR_SUFFIX)), []).append(name)
    return {kind: StoredTensors(folder, held, manifest) for kind, held in names.items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """A verified checkpoint: its facts in memory, its tensors on disk by kind ("model", "optimizer", "rng-0")."""

    path: Path
    step: int
    tensors: Mapping[str, StoredTensors]
    facts: Mapping[str, Any]
