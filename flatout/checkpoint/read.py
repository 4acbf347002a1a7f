"""Read a checkpoint slice by slice: each rank reads only its own shard, on any number of ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from flatout.checkpoint.manifest import Manifest, refuse_other_save
from flatout.checkpoint.tensor_file import DTYPES, open_tensor_file
from flatout.errors import CheckpointError
from flatout.io.json_file import parse_json
from flatout.parallel.shards import as_global, local_shard_of

# metadata key of a sharded file; the value is JSON: tensor name -> [global shape, offset]
PLACES = "places"
# what masters and moments are kept in
_CHECKED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def kind_of(stem: str) -> str:
    """Return what a file holds, without the rank that wrote it: `model-rank-3` is part of `model`."""
    return re.sub(r"-rank-\d+$", "", stem)


class Piece(NamedTuple):
    """The block of a tensor that one file holds."""

    file: Any
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    path: Path


class CheckpointTensors(Mapping[str, Tensor]):
    """The tensors of one kind ("model", "optimizer") of a checkpoint, read lazily.

    As a mapping it returns whole tensors, copied into memory; `shapes` are their shapes. Raises CheckpointError with
    the file for an invalid safetensors file, and with the name for a tensor of which a shard is missing.
    """

    def __init__(self, folder: Path, names: Sequence[str], manifest: Manifest) -> None:
        self._pieces: dict[str, list[Piece]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name in names:
            try:
                file = open_tensor_file(folder / name)
                metadata = file.metadata() or {}
                refuse_other_save(folder / name, metadata, manifest)
                places = parse_json(metadata.get(PLACES, "{}"))
                for key in file.keys():  # noqa: SIM118  (a file is not a mapping)
                    shape = tuple(file.get_slice(key).get_shape())
                    whole, offset = places.get(key, (shape, (0,) * len(shape)))
                    if self.shapes.setdefault(key, tuple(whole)) != tuple(whole):
                        raise ValueError(f"{key} has shape {tuple(whole)} here, {self.shapes[key]} in another file")
                    self._pieces.setdefault(key, []).append(Piece(file, tuple(offset), shape, folder / name))
            except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{folder / name}: not a readable safetensors file: {error}") from error
        for name, shape in self.shapes.items():
            saved = sum(torch.Size(piece.shape).numel() for piece in self._pieces[name])
            if saved != torch.Size(shape).numel():
                raise CheckpointError(f"{folder}: {name} of shape {shape} is incomplete: only {saved:,} values found")

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, name: str) -> Tensor:
        tensor = torch.empty(self.shapes[name], dtype=self.dtype(name))
        self.copy_into(name, tensor)
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in the files."""
        return DTYPES[self._pieces[name][0].file.get_slice(name).get_dtype()]

    @torch.no_grad()
    def copy_into(self, name: str, tensor: Tensor) -> None:
        """Fill a tensor of the global shape, plain or a DTensor (local shard only), on any device and of any dtype."""
        part = local_shard_of(tensor)
        for piece in self._pieces[name]:
            begin = [max(a, b) for a, b in zip(part.offset, piece.offset, strict=True)]
            ends = zip(part.offset, part.local.shape, piece.offset, piece.shape, strict=True)
            end = [min(a + m, b + n) for a, m, b, n in ends]
            if all(a < b for a, b in zip(begin, end, strict=True)):
                target, source = (
                    tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, origin, strict=True))
                    for origin in (part.offset, piece.offset)
                )
                # copied right away: the file is memory-mapped, so the tensor would change with the file
                source_tensor = piece.file.get_slice(name)[source] if source else piece.file.get_tensor(name)
                part.local[target].copy_(source_tensor)

    def refuse_non_finite(self, files: Collection[str]) -> None:
        """Raise CheckpointError for the first tensor of these files with NaN or infinity, which no run saves."""
        for name, pieces in self._pieces.items():
            for piece in pieces:
                tensor = piece.file.get_tensor(name) if piece.path.name in files else torch.empty(0)
                if (
                    tensor.numel()
                    and tensor.dtype in _CHECKED_DTYPES
                    and not math.isfinite(sum(map(float, tensor.aminmax())))
                ):
                    raise CheckpointError(f"{piece.path}: {name} is not finite; it was edited or damaged")

    def like(self, name: str, parameter: Tensor) -> Tensor:
        """Return a new tensor with the parameter's shape, which is the saved one, and its sharding and device.

        It has the files' dtype.
        """
        tensor = torch.empty_like(parameter.detach(), dtype=self.dtype(name))
        self.copy_into(name, as_global(tensor, parameter))
        return tensor


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A verified checkpoint: its facts in memory, its tensors on disk by kind ("model", "optimizer")."""

    path: Path
    step: int
    tensors: Mapping[str, CheckpointTensors]
    facts: Mapping[str, Any]
